"""Layers that read one input (q, k, v; gate, up), with their weights side by side in memory: one product for all.

A decode step is bound by reading weights and by launches; the narrow k and v products fill no GPU by themselves.
Without gradients alone: training goes through linear_group, which adapters share.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import tpu
from ..functional import NF4Weight, nf4_linear
from ..nn import NF4Linear, plain_call

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@torch.no_grad()
def lay_side_by_side(model: nn.Module) -> None:
    """Move the weights of each group into one piece of memory, one group at a time. Their values stay, their storages
    are shared from here on."""
    for module in model.modules():
        for names in GROUPS:
            layers = [getattr(module, name, None) for name in names]
            if _alike(layers):
                _move(layers)


def product(x: Tensor, layers: Sequence[Any]) -> tuple[Tensor, ...] | None:
    """Each layer's output, views of one product; None where gradients are recorded, or the layers' weights are not
    neighbours or are watched by hooks."""
    if torch.is_grad_enabled() or not _alike(layers):
        return None
    biases = [layer.bias for layer in layers]
    bias = _over(biases) if biases[0] is not None else None
    if type(layers[0]) is NF4Linear:
        parts: list[NF4Weight] = [layer.weight for layer in layers]
        codes, scale = _over([p.codes for p in parts]), _over([p.scale for p in parts])
        if codes is None or scale is None or (biases[0] is not None and bias is None):
            return None
        shape = (sum(p.shape[0] for p in parts), parts[0].shape[1])
        y = nf4_linear(x, NF4Weight(codes, scale, shape, parts[0].block_size), bias)
    else:
        weight = _over([layer.weight for layer in layers])
        if weight is None or (biases[0] is not None and bias is None):
            return None
        y = F.linear(x, weight, bias)
    return y.split([layer.out_features for layer in layers], -1)


def _alike(layers: Sequence[Any]) -> bool:
    """Whether they are plain layers of one kind, which nobody watches."""
    kind = type(layers[0])
    if kind not in (nn.Linear, NF4Linear) or not all(type(x) is kind and plain_call(x, kind) for x in layers):
        return False
    if len({layer.bias is None for layer in layers}) > 1:
        return False
    if kind is nn.Linear:
        return len({(layer.weight.dtype, layer.weight.device) for layer in layers}) == 1
    weights = [layer.weight for layer in layers]
    sizes = {(w.block_size, w.device) for w in weights}
    return len(sizes) == 1 and all(w.numel() % w.block_size == 0 for w in weights)


def _move(layers: Sequence[Any]) -> None:
    if layers[0].bias is not None:
        _share([layer.bias for layer in layers])
    if type(layers[0]) is nn.Linear:
        _share([layer.weight for layer in layers])
        return
    weights = [layer.weight for layer in layers]
    codes = torch.cat([w.codes for w in weights]).split([len(w.codes) for w in weights])
    scales = torch.cat([w.scale for w in weights]).split([len(w.scale) for w in weights])
    for layer, weight, code, scale in zip(layers, weights, codes, scales):
        absmax = scale if weight.nested is None else weight.absmax
        moved = dataclasses.replace(weight, codes=code, absmax=absmax)
        object.__setattr__(moved, "scale", scale)  # derived: else it would be made again, elsewhere
        layer.weight = moved


def _share(parameters: Sequence[nn.Parameter]) -> None:
    joint = torch.cat(list(parameters))
    for p, part in zip(parameters, joint.split([len(p) for p in parameters])):
        p.data = part


def _over(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor over all of them, where each begins behind the one before it.

    None where tensors have no addresses: on XLA, on meta, while torch.compile traces.
    """
    if parts[0].device.type in (tpu.DEVICE_TYPE, "meta") or torch.compiler.is_compiling():
        return None
    for a, b in itertools.pairwise(parts):
        same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.shape[1:] == b.shape[1:]
        if not same or a.dtype != b.dtype or b.data_ptr() != a.data_ptr() + a.nbytes:
            return None
    if not all(t.is_contiguous() for t in parts):
        return None
    first = parts[0]
    return first.as_strided((sum(len(t) for t in parts), *first.shape[1:]), first.stride())
