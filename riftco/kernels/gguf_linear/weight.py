"""GGUFWeight: a frozen weight in one of GGUF's block formats, kept as the file has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._arguments import given, indices
from .formats import Format, format_of


@dataclass(frozen=True, eq=False)
class GGUFWeight:
    """W [N, K] as packed blocks. Never cast: `.to(dtype)` of a module leaves the bytes as they are.

    Attributes:
        packed: uint8 [N, bytes of a row].
        format: GGML's name, such as "Q4_K".
        shape: (N, K), K a multiple of the format's block.

    Raises:
        ValueError: a format that cannot be read back for a gradient, with the remedy; bytes that do not fit the shape.
    """

    packed: Tensor
    format: str
    shape: tuple[int, int]

    def __post_init__(self):
        f = format_of(self.format)
        if len(self.shape) != 2 or self.shape[1] % f.block:
            raise ValueError(
                f"GGUFWeight: the shape must be (N, K) with K a multiple of {f.block} in {f.name}; got {self.shape}"
            )
        wanted = (self.shape[0], f.row_bytes(self.shape[1]))
        if self.packed.dtype != torch.uint8 or tuple(self.packed.shape) != wanted:
            raise ValueError(
                f"GGUFWeight: a {f.name} weight {tuple(self.shape)} must be uint8 {wanted}; "
                f"got {self.packed.dtype} {tuple(self.packed.shape)}"
            )
        object.__setattr__(self, "shape", tuple(self.shape))

    @classmethod
    def from_reader(cls, tensor: Any) -> GGUFWeight:
        """A copy of the bytes of a matrix that gguf.GGUFReader found."""
        f = format_of(tensor.tensor_type.name)
        N, K = (int(n) for n in reversed(tensor.shape))
        packed = torch.from_numpy(tensor.data.copy()).view(torch.uint8).reshape(N, f.row_bytes(K))
        return cls(packed, f.name, (N, K))

    @property
    def info(self) -> Format:
        return format_of(self.format)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def kind(self) -> str:  # this and the next two: _frozen_weight.FrozenWeight
        return f"gguf_linear:{self.format}"

    def operands(self) -> tuple[list[Tensor], list[int]]:
        return [self.packed], [*self.shape]

    def decoded(self, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
        return torch.ops.riftco.gguf_dequantize(self.packed[lo:hi], self.format, hi - lo, self.shape[1], dtype)

    def rows(self, index: Tensor) -> GGUFWeight:
        """W[index]: rows picked or put in another order (as q's and k's are for their rotation), not requantised."""
        if not indices(index) or index.dim() != 1:
            raise ValueError(f"GGUFWeight.rows: index must be int32 or int64 [n]; got {given(index)}")
        return GGUFWeight(self.packed[index], self.format, (index.numel(), self.shape[1]))

    def to(self, device: torch.device | str) -> GGUFWeight:
        return self.map(lambda t: t.to(device))

    def map(self, fn: Callable[[Tensor], Tensor]) -> GGUFWeight:
        """The same weight with `fn` applied to its bytes: a move moves, a cast of floating tensors has no hold."""
        return GGUFWeight(fn(self.packed), self.format, self.shape)
