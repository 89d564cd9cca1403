"""An adapter made part of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import nn
from .plan import CARRIERS, RECORD, tied_pair
from .spec import AdapterError


@dataclass(frozen=True)
class Merged:
    """What merging changed.

    Attributes:
        relative: layer -> ||W' - W|| / ||W|| over its whole weight, W being the (dequantised) base.
        lost: layer -> what rounding W' to its dtype took of that change, ||round(W') - W'|| / ||W' - W||.
        untied: whether embedding and head shared a weight, and no longer do.
    """

    relative: dict[str, float] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    untied: bool = False

    def lines(self) -> list[str]:
        """For people: the whole model, and the layers that changed most."""
        if not self.relative:
            return ["no layer carried a LoRA; what was trained in place is part of the weights"]
        whole = math.sqrt(sum(r * r for r in self.relative.values()) / len(self.relative))
        worst, lost = max(self.lost.items(), key=lambda item: item[1])
        lines = [
            f"merged {len(self.relative)} layers; the delta is {whole:.2%} of the base's norm (root mean square), and "
            f"rounding took {lost:.2%} of it at most"
        ]
        if lost > 0.1:
            lines.append(f"  {worst} lost that: so small a delta needs float32 (riftco merge --dtype fp32)")
        most = sorted(self.relative.items(), key=lambda item: -item[1])[:3]
        lines += [f"  {name}: {ratio:.2%}" for name, ratio in most]
        if self.untied:
            lines.append("embedding and head shared one weight and no longer do")
        return lines


@torch.no_grad()
def merge_adapter(model: torch.nn.Module, *, dtype: torch.dtype | None = None) -> Merged:
    """Put the adapter of `model` into its weights and take its layers away; changed in place.

    Each delta is added in float32 and rounded once. Quantised bases are dequantised: what they lost stays lost, and
    the result is a dense layer. Where an adapter changed an embedding and a head that share a weight in different
    ways, they part, and a `config` with tie_word_embeddings says so.

    Args:
        model: what `apply_lora` or `load_adapter` changed.
        dtype: of the layers that are merged; by default that of each base, or where it was quantised the model's.

    Returns:
        How large the delta was, layer by layer.

    Raises:
        AdapterError: the model carries no adapter.
    """
    carriers = {n: m for n, m in model.named_modules() if isinstance(m, CARRIERS)}
    if not carriers and not hasattr(model, RECORD):
        raise AdapterError("the model carries no adapter to merge; load one first")
    done = Merged()
    config: Any = getattr(model, "config", None)
    was_tied = bool(getattr(config, "tie_word_embeddings", False))
    shared: dict[int, torch.nn.Parameter] = {}  # an embedding and a head that changed alike go on sharing one weight
    for name, layer in carriers.items():
        base = layer.base_layer
        owner = layer.embedding if isinstance(layer, nn.TiedLoRALinear) else layer
        owner = layer.tokens if isinstance(layer, nn.TokensHead) else owner
        if id(owner) not in shared:
            kept = dtype or (base.weight.dtype if isinstance(base.weight, Tensor) else _dtype(model))
            before, weight = _dense(base), merged_weight(layer)
            rounded = weight.to(kept)
            done.relative[name] = _ratio(weight - before, before)
            done.lost[name] = _ratio(rounded - weight, weight - before)
            shared[id(owner)] = torch.nn.Parameter(rounded, requires_grad=False)
        _put(model, name, base, shared[id(owner)])
    if hasattr(model, RECORD):
        delattr(model, RECORD)
    if was_tied and tied_pair(dict(model.named_modules(remove_duplicate=False))) == (None, None):
        done = Merged(done.relative, done.lost, untied=True)
        if hasattr(config, "replace"):
            model.config = config.replace(tie_word_embeddings=False)
        elif config is not None:
            config.tie_word_embeddings = False
    return done


def merged_weight(layer: torch.nn.Module) -> Tensor:
    """The weight that does alone what `layer` does with its adapter, in float32 (float64 in float64)."""
    if isinstance(layer, nn.TokensHead):
        layer = layer.tokens
    if isinstance(layer, nn.TrainableTokens):
        weight = _dense(layer.base_layer).clone()
        return weight.index_copy_(0, layer.ids, layer.trainable_tokens_delta.detach().to(weight.dtype))
    if isinstance(layer, nn.TiedLoRALinear):
        layer = layer.embedding
    assert isinstance(layer, (nn.LoRALinear, nn.LoRAEmbedding))
    weight = _dense(layer.base_layer)
    if isinstance(layer, nn.LoRAEmbedding):
        a, b = layer.lora_embedding_B.t(), layer.lora_embedding_A.t()
    else:
        a, b = layer.lora_A.weight, layer.lora_B.weight
    weight = torch.addmm(weight, b.detach().to(weight.dtype), a.detach().to(weight.dtype), alpha=layer.scale)
    if layer.lora_magnitude_vector is None:
        return weight
    gain = (layer.lora_magnitude_vector / layer.weight_norm()).detach().to(weight.dtype)
    return weight * (gain if isinstance(layer, nn.LoRAEmbedding) else gain.unsqueeze(1))


def _dense(base: torch.nn.Module) -> Tensor:
    weight: Any = base.weight
    if isinstance(weight, Tensor):
        return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    return weight.decoded(0, weight.shape[0], torch.float32)


def _dtype(model: torch.nn.Module) -> torch.dtype:
    """That of its activations: a decoder says it, another model's dense embedding has it."""
    if isinstance(own := getattr(model, "dtype", None), torch.dtype):
        return own
    dense = (m.weight.dtype for m in model.modules() if isinstance(m, torch.nn.Embedding))
    return next(dense, torch.get_default_dtype())


def _ratio(part: Tensor, whole: Tensor) -> float:
    size = float(whole.norm())
    return float(part.norm()) / size if size else 0.0


def _put(model: torch.nn.Module, name: str, base: torch.nn.Module, weight: torch.nn.Parameter) -> None:
    """The base layer in its adapter's place, with its new weight."""
    if isinstance(base, nn.GGUFEmbedding):
        base = nn.Embedding(*weight.shape, device="meta").train(base.training)
    elif not isinstance(base, (torch.nn.Linear, torch.nn.Embedding)):
        dense = torch.nn.Linear(base.in_features, base.out_features, bias=False, device="meta")  # type: ignore[arg-type]
        dense.bias = base.bias  # type: ignore[assignment]
        base = dense.train(base.training)
    base.weight = weight
    model.set_submodule(name, base)
