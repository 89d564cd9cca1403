"""What an op that contains a linear layer needs of a weight that is not a tensor: its product, and its rows.

A format brings two ops whose schemas follow one rule, with any number of tensors, texts and integers:

    riftco::<name>_fwd(Tensor x, <tensors>, Tensor? bias, <texts>, <integers>) -> Tensor    y = x W^T + bias
    riftco::<name>_bwd(Tensor d_y, <tensors>, <texts>, <integers>) -> Tensor                d_x = d_y W

and a weight class as below. Whatever has that is a base for adapters, without a line about it there.
"""

from __future__ import annotations

from typing import Protocol

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
