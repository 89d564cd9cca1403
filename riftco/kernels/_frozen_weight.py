"""What an op that contains a linear layer needs of a weight that is not a tensor: its product, and its rows.

A format brings two ops whose schemas follow one rule, with any number of tensors, texts and integers:

    riftco::<name>_fwd(Tensor x, <tensors>, Tensor? bias, <texts>, <integers>) -> Tensor    y = x W^T + bias
    riftco::<name>_bwd(Tensor d_y, <tensors>, <texts>, <integers>) -> Tensor                d_x = d_y W

and a weight class as below. Whatever has that is a base for adapters, without a line about it there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class FrozenWeight(Protocol):
    """W [N, C], held in a format of its own and never trained."""

    @property
    def kind(self) -> str:
        """The ops' name, and after colons the texts that they take: "nf4_linear", "gguf_linear:Q8_0"."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def device(self) -> torch.device: ...

    def operands(self) -> tuple[list[Tensor], list[int]]:
        """The tensors and the integers that both ops take, in the schemas' order."""
        ...

    def decoded(self, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
        """W[lo:hi] in `dtype`: for what is computed of W itself, a few rows at a time."""
        ...


def is_frozen(weight: object) -> bool:
    """Whether `weight` is a FrozenWeight: a look at one name, as a Protocol's isinstance costs microseconds a call."""
    return hasattr(weight, "operands")


DENSE = "dense"  # the kind of a weight that is a tensor


class Base(NamedTuple):
    """A weight of any kind as an op's arguments hold it: they hold no objects."""

    kind: str
    tensors: list[Tensor]
    sizes: list[int]

    def forward(self, x: Tensor, bias: Tensor | None, find: Callable) -> Tensor:
        """x W^T + bias; `find` is `_contract.launcher` or `meaning`."""
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
