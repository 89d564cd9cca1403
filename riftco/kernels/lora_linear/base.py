"""The products under the adapters: dense weights and frozen ones of any format, through one pair of functions.

An op's arguments hold no objects, so a group's weights travel as their kinds, all their tensors and all their integers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._contract import launcher, meaning
from .._frozen_weight import FrozenWeight

__all__ = ["DENSE", "Base", "arity", "dtypes", "launcher", "meaning", "pack", "unpack"]

DENSE = "dense"


class Base(NamedTuple):
    kind: str
    tensors: list[Tensor]
    sizes: list[int]

    def forward(self, x: Tensor, bias: Tensor | None, find: Callable) -> Tensor:
        """x W^T + bias; `find` is `launcher` or `meaning`."""
        if self.kind == DENSE:
            return torch.nn.functional.linear(x, self.tensors[0], None if bias is None else bias.to(x.dtype))
        name, *texts = self.kind.split(":")
        return find(f"{name}_fwd", x)(x, *self.tensors, bias, *texts, *self.sizes)

    def backward(self, d_y: Tensor, find: Callable) -> Tensor:
        """d_y W."""
        if self.kind == DENSE:
            return d_y @ self.tensors[0]
        name, *texts = self.kind.split(":")
        return find(f"{name}_bwd", d_y)(d_y, *self.tensors, *texts, *self.sizes)


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


@functools.cache
def arity(kind: str) -> tuple[int, int]:
    """How many tensors and integers describe a weight, as the schema of its product's gradient says."""
    if kind == DENSE:
        return 1, 0
    name, *texts = kind.split(":")
    schema = getattr(torch.ops.riftco, f"{name}_bwd").default._schema
    types = [str(a.type) for a in schema.arguments[1:]]
    tensors = sum("Tensor" in t for t in types)
    return tensors, len(types) - tensors - len(texts)


def dtypes(x: Tensor, lora_a: list[Tensor], lora_b: list[Tensor]) -> tuple[torch.dtype, torch.dtype]:
    """(the adapters' dtype, the accumulator's)."""
    D = _promoted(*(t.dtype for t in (*lora_a, *lora_b)))
    return D, _promoted(D, x.dtype, torch.float32)


@functools.cache  # torch.promote_types is an operator's call each time
def _promoted(*dtypes: torch.dtype) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)
