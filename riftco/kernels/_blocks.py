"""Rows in blocks that stay in a CPU's cache, for launchers that would otherwise hold float32 copies of everything."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

EACH = 1 << 17  # elements of a block for each thread: few enough for the cache, so many that calls cost nothing


def row_blocks(N: int, C: int) -> Iterator[slice]:
    """Slices of N rows of C elements."""
    step = max(1, EACH * torch.get_num_threads() // max(C, 1))
    for start in range(0, N, step):
        yield slice(start, min(start + step, N))


class Wide:
    """Rows as float32 blocks: the rows themselves where they are float32, else copies in a buffer used again."""

    def __init__(self, t: Tensor):
        self.rows = t.reshape(-1, t.shape[-1])  # a view unless no two strides describe the rows
        self.narrow = t.dtype != torch.float32
        self.buffer: Tensor | None = None

    def read(self, at: slice) -> Tensor:
        return self.scratch(at).copy_(self.rows[at]) if self.narrow else self.rows[at]

    def unfilled(self, at: slice) -> Tensor:
        """What to write a block into, before `write`."""
        return self.scratch(at) if self.narrow else self.rows[at]

    def write(self, at: slice, block: Tensor) -> None:
        if self.narrow:
            self.rows[at].copy_(block)

    def scratch(self, at: slice) -> Tensor:
        """A block that lasts until the next one."""
        if self.buffer is None:
            self.buffer = torch.empty(at.stop - at.start, self.rows.shape[-1])
        return self.buffer[: at.stop - at.start]
