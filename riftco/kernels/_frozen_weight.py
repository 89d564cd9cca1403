"""What an op that contains a linear layer needs of a weight that is not a tensor: its product, and its rows.

A format brings two ops whose schemas follow one rule, with any number of tensors, texts and integers:

    riftco::<name>_fwd(Tensor x, <tensors>, Tensor? bias, <texts>, <integers>) -> Tensor    y = x W^T + bias
    riftco::<name>_bwd(Tensor d_y, <tensors>, <texts>, <integers>) -> Tensor                d_x = d_y W

and a weight class as below. CUDA's launchers of both take one keyword more, `onto`: a contiguous tensor of the result's
shape, into which the product is added in place of a bias, and which is returned. Whatever has that is a base for
adapters, without a line about it there.
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

    def forward(self, x: Tensor, bias: Tensor | None, find: Callable, onto: Tensor | None = None) -> Tensor:
        """x W^T + bias; `find` is `_contract.launcher` or `meaning`. On CUDA `onto` may take the bias's place."""
        if self.kind == DENSE:
            if onto is not None:
                return _added(onto, x, self.tensors[0].t())
            return torch.nn.functional.linear(x, self.tensors[0], None if bias is None else bias.to(x.dtype))
        name, *texts = self.kind.split(":")
        return find(f"{name}_fwd", x)(x, *self.tensors, bias, *texts, *self.sizes, **_given(onto))

    def backward(self, d_y: Tensor, find: Callable, onto: Tensor | None = None) -> Tensor:
        """d_y W; on CUDA added into `onto` where that is given."""
        if self.kind == DENSE:
            return d_y @ self.tensors[0] if onto is None else _added(onto, d_y, self.tensors[0])
        name, *texts = self.kind.split(":")
        return find(f"{name}_bwd", d_y)(d_y, *self.tensors, *texts, *self.sizes, **_given(onto))


def _given(onto: Tensor | None) -> dict[str, Tensor]:
    """As a keyword, which the launchers of other devices do not have."""
    return {} if onto is None else {"onto": onto}


def _added(onto: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """onto [..., J] += left [..., I] right [I, J], in the matrix product itself."""
    lines = left.shape[:-1].numel()
    onto.view(lines, onto.shape[-1]).addmm_(left.reshape(lines, left.shape[-1]), right)
    return onto


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
