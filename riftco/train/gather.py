"""Weights that are cut over processes, together again: the same names and values as one process holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..models import Decoder
from .state import whole


def gathered(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Name -> parameter on the host, one gathered at a time; all processes must ask, those that `keep` get them."""
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        full = whole(p.detach())
        if keep:
            found[name] = full.to("cpu").contiguous()
    return found


def gathered_model(model: Decoder, keep: bool) -> Decoder | None:
    """The whole model on the host, where it is kept; all processes must ask."""
    found = gathered(model, keep)
    if not keep:
        return None
    with torch.device("meta"):
        made = Decoder(model.config)
    made.load_state_dict(found, strict=False, assign=True)  # a tied head is listed once
    if model.config.tie_word_embeddings:
        made.lm_head.weight = made.model.embed_tokens.weight
    return made


@torch.no_grad()
def scatter(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put whole weights where the model holds its parts; every process reads its own rows of them."""
    for name, p in model.named_parameters():
        if name in weights:
            part: Any = p
            if not hasattr(part, "placements"):
                part.copy_(weights[name])
                continue
            from torch.distributed.tensor import distribute_tensor

            there = weights[name].to(part.device)
            cut = distribute_tensor(there, part.device_mesh, part.placements, src_data_rank=None)
            part.to_local().copy_(cut.to_local())
