"""The products under the adapters: dense weights and frozen ones of any format, through one pair of functions.

An op's arguments hold no objects, so a group's weights travel as their kinds, all their tensors and all their integers.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._contract import launcher, meaning
from .._frozen_weight import DENSE, Base, FrozenWeight, arity

__all__ = ["DENSE", "Base", "arity", "count", "dtypes", "launcher", "meaning", "pack", "unpack"]


def pack(weights: list[Tensor | FrozenWeight]) -> tuple[list[str], list[Tensor], list[int], list[int]]:
    """(kinds, all tensors, all integers, how many tensors each has)."""
    kinds, tensors, sizes, counts = [], [], [], []
    for weight in weights:
        kind, parts, numbers = (
            (DENSE, [weight], []) if isinstance(weight, Tensor) else (weight.kind, *weight.operands())
        )
        kinds.append(kind)
        tensors += parts
        sizes += numbers
        counts.append(len(parts))
    return kinds, tensors, sizes, counts


def unpack(kinds: list[str], tensors: list[Tensor], sizes: list[int]) -> list[Base]:
    bases, t, s = [], 0, 0
    for kind in kinds:
        parts, numbers = arity(kind)
        bases.append(Base(kind, list(tensors[t : t + parts]), list(sizes[s : s + numbers])))
        t, s = t + parts, s + numbers
    return bases


def count(t: Tensor, rows: Tensor | None) -> int:
    """How many rows of t [..., C] an adapter is for: those that are listed, or all."""
    lines = t.shape[:-1].numel()
    if rows is None:
        return lines
    if not lines and rows.numel():  # kernels take the nearest row that is there
        raise IndexError(f"lora_linear: {rows.numel()} rows are listed, and x has none")
    return rows.numel()


def dtypes(x: Tensor, lora_a: list[Tensor], lora_b: list[Tensor]) -> tuple[torch.dtype, torch.dtype]:
    """(the adapters' dtype, the accumulator's)."""
    D = _promoted(*(t.dtype for t in (*lora_a, *lora_b)))
    return D, _promoted(D, x.dtype, torch.float32)


@functools.cache  # torch.promote_types is an operator's call each time
def _promoted(*dtypes: torch.dtype) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)
