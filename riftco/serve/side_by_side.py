"""Many float32 tensors in a few pieces of memory, so that a handful of copies moves all of them."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..train.state import ALIGNED, SLAB

Shapes = Mapping[str, Sequence[int]]


class SideBySide:
    """Tensors by name, one behind the other.

    Args:
        shapes: name -> shape; the same shapes lie the same way wherever they are.
        device: where.
        pinned: page-locked, for copies from a GPU; what is in them is then up to who fills them. Else zeros.

    Attributes:
        pieces: of at most SLAB bytes, or one tensor.
        views: name -> the tensor within its piece.
    """

    def __init__(self, shapes: Shapes, device: torch.device | str, *, pinned: bool = False):
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        places, sizes, room = [], [0], SLAB // 4
        for shape in self.shapes.values():
            need = -(-math.prod(shape) * 4 // ALIGNED) * ALIGNED // 4
            if need > room:
                if sizes[-1]:
                    sizes.append(0)
                room = max(need, SLAB // 4)
            places.append((len(sizes) - 1, sizes[-1]))
            sizes[-1] += need
            room -= need
        self._places, self._sizes = places, sizes
        self._take(device, pinned)

    def _take(self, device: torch.device | str, pinned: bool) -> None:
        self.device = torch.device(device)
        if pinned:
            self.pieces = [torch.empty(n, dtype=torch.float32, pin_memory=True) for n in self._sizes]
        else:
            self.pieces = [torch.zeros(n, dtype=torch.float32, device=device) for n in self._sizes]
        self.views = {}
        for (name, shape), (piece, at) in zip(self.shapes.items(), self._places):
            self.views[name] = self.pieces[piece].as_strided(shape, _strides(shape), at)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @torch.no_grad()
    def copy_(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the values of those tensors."""
        if tensors:
            torch._foreach_copy_([self.views[name] for name in tensors], [t.detach() for t in tensors.values()])

    def zero_(self) -> None:
        for piece in self.pieces:
            piece.zero_()

    def host_room(self) -> SideBySide:
        """Memory of the host for a copy: pinned beside a GPU."""
        made = SideBySide.__new__(SideBySide)
        made.shapes, made._places, made._sizes = self.shapes, self._places, self._sizes
        made._take("cpu", self.cuda)
        return made

    @torch.no_grad()
    def on_host(self, room: SideBySide | None = None) -> SideBySide:
        """A copy in the host's memory, in `room` where there is one; from a GPU it is waited for."""
        made = room or self.host_room()
        for mine, copy in zip(self.pieces, made.pieces):
            copy.copy_(mine, non_blocking=self.cuda)
        if self.cuda:
            torch.cuda.current_stream(self.device).synchronize()
        return made


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1] if shape else ()
