"""Rows in blocks that stay in a CPU's cache, for launchers that would otherwise hold float32 copies of everything."""

from __future__ import annotations

import torch
from torch import Tensor

EACH = 1 << 17  # elements of a block for each thread: few enough for the cache, so many that calls cost little


def step_of(N: int, C: int) -> int:
    """How many of N rows of C elements make a block."""
    return max(1, min(N, EACH * torch.get_num_threads() // max(C, 1)))


class Wide:
    """Rows as float32 blocks of `step`: the rows themselves where they are float32, else copies in a buffer used again.

    Block i is read, or is written to where `unfilled` says and then stored by `write`.
    """

    def __init__(self, t: Tensor, step: int):
        rows = t.reshape(-1, t.shape[-1])  # a view unless no two strides describe the rows
        self.blocks = rows.split(step) if len(rows) > step else (rows,)  # once for all: a slice costs as much as a call
        self.narrow = t.dtype != torch.float32
        self.buffer: Tensor | None = None
        self.shape = step, t.shape[-1]

    def __len__(self) -> int:
        return len(self.blocks)

    def read(self, i: int) -> Tensor:
        return self.scratch(i).copy_(self.blocks[i]) if self.narrow else self.blocks[i]

    def unfilled(self, i: int) -> Tensor:
        return self.scratch(i) if self.narrow else self.blocks[i]

    def write(self, i: int, block: Tensor) -> None:
        if self.narrow:
            self.blocks[i].copy_(block)

    def scratch(self, i: int) -> Tensor:
        """Room of a block's shape that lasts until the next block."""
        if self.buffer is None:
            self.buffer = torch.empty(self.shape)
        n = len(self.blocks[i])
        return self.buffer if n == self.shape[0] else self.buffer[:n]
