"""The one forward path of serving: rows over a cache that keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..functional import Cache, attention_with_cache
from ..models import Decoder
from .batch import Batch, Run


class Reading:
    """Attention of new rows over their slots' rows; the new rows are written into the cache."""

    def __init__(self, cache: Cache, runs: Sequence[Run], device: torch.device):
        lengths = [run.end - run.start for run in runs]
        host = torch.tensor([[run.slot for run in runs], [run.position for run in runs]], dtype=torch.int64)
        self.slots, self.positions = host.to(device, non_blocking=True).unbind()
        self.longest, self.cache = max(lengths), cache
        self.cu = None
        if self.longest > 1:  # plain decoding has one row a run
            self.cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        self.rows = cache.rows(self.slots, self.positions, sum(lengths), self.cu)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q[0], k[0], v[0]
        out = attention_with_cache(
            q, k, v, self.cache, layer, self.slots, self.positions, cu_seqlens_q=self.cu, max_seqlen_q=self.longest
        )
        self.cache.write(layer, self.rows, k, v)
        assert isinstance(out, Tensor)
        return out[None]


@torch.no_grad()
def serve(model: Decoder, cache: Cache, batch: Batch) -> Tensor:
    """Write the batch's rows into the cache; the logits of its output rows [outputs, V]."""
    device = model.device
    reading = Reading(cache, list(batch.runs()), device)
    rotation = model.rotary(batch.positions.to(device))
    x = model.model.embed_tokens(batch.tokens.to(device)[None])
    for layer in model.model.layers:
        x = layer(x, rotation, None, reading)
    wanted = batch.output.nonzero().flatten().to(device)
    if not len(wanted):
        return x.new_empty(0, model.config.vocab_size)
    return model.lm_head(model.model.norm(x[0].index_select(0, wanted)))
