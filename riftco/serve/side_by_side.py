"""Many float32 tensors in a few pieces of memory, so that a handful of copies moves all of them."""

from __future__ import annotations

import math
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
        self.device = torch.device(device)
        places, sizes, room = {}, [0], SLAB // 4
        for name, shape in self.shapes.items():
            need = -(-math.prod(shape) * 4 // ALIGNED) * ALIGNED // 4
            if need > room:
                if sizes[-1]:
                    sizes.append(0)
                room = max(need, SLAB // 4)
            places[name] = len(sizes) - 1, sizes[-1]
            sizes[-1] += need
            room -= need
        if pinned:
            self.pieces = [torch.empty(n, dtype=torch.float32, pin_memory=True) for n in sizes]
        else:
            self.pieces = [torch.zeros(n, dtype=torch.float32, device=device) for n in sizes]
        self.views = {
            name: self.pieces[piece][at : at + math.prod(self.shapes[name])].view(self.shapes[name])
            for name, (piece, at) in places.items()
        }

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

    @torch.no_grad()
    def on_host(self) -> SideBySide:
        """A copy in the host's memory; from a GPU into pinned memory, and waited for."""
        made = SideBySide(self.shapes, "cpu", pinned=self.cuda)
        for mine, copy in zip(self.pieces, made.pieces):
            copy.copy_(mine, non_blocking=self.cuda)
        if self.cuda:
            torch.cuda.current_stream(self.device).synchronize()
        return made
