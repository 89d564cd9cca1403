"""Matrix products of the CPU route that read float32 or bfloat16 and give float32, in memory that is used again.

A bfloat16 product of PyTorch is summed in float32 and rounded at the end. Taken twice, the second time with minus the
first result added before it is rounded, the two together are the float32 sum to 1 part in 2 ** 17. Where the CPU
multiplies bfloat16 in hardware, both take half the time of one float32 product.
"""

import functools
import math

import torch
from torch import Tensor


class Scratch:
    """Named buffers, each as large as its largest use: pages that are new to the process cost more than a pass."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Contiguous; holds whatever it held before."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=dtype)
        return self.buffers[name][:size].view(shape)


class Float32:
    dtype = torch.float32

    def __init__(self) -> None:
        self.scratch = Scratch()

    def operand(self, p: Tensor, name: str) -> Tensor:
        """`p` in the dtype of the products."""
        return p

    def product(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        """a @ b in float32, until the next product of that name."""
        return torch.bmm(a, b, out=self.scratch.take(name, (*a.shape[:2], b.shape[2])))

    def add(self, to: Tensor, a: Tensor, b: Tensor) -> None:
        """to += a @ b"""
        if to.is_contiguous():
            to.baddbmm_(a, b)
        else:  # PyTorch would take the products of a strided batch one by one
            to += self.product(a, b, "sum")


class Bfloat16(Float32):
    dtype = torch.bfloat16

    def operand(self, p: Tensor, name: str) -> Tensor:
        return self.scratch.take(name, tuple(p.shape), self.dtype).copy_(p)

    def product(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        first, second = self._pair(a, b)
        return self.scratch.take(name, tuple(first.shape)).copy_(first).add_(second)

    def add(self, to: Tensor, a: Tensor, b: Tensor) -> None:
        first, second = self._pair(a, b)
        to.add_(first).add_(second)

    def _pair(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*a.shape[:2], b.shape[2])
        first = torch.bmm(a, b, out=self.scratch.take("first", shape, self.dtype))
        return first, torch.baddbmm(first, a, b, beta=-1, out=self.scratch.take("second", shape, self.dtype))


def products(dtype: torch.dtype, terms: int) -> Float32:
    """For inputs of `dtype` whose products have about `terms` multiplications in all."""
    if dtype == torch.bfloat16 and terms > 1 << 18 and torch.backends.mkldnn.enabled and _pairs_are_exact():
        return Bfloat16()
    return Float32()


@functools.cache
def _pairs_are_exact() -> bool:
    """Whether this CPU has bfloat16 products, and PyTorch's round as described above."""
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return False
    a, b = (torch.arange(n, dtype=torch.float32).sin().bfloat16().view(1, 64, -1) for n in (64 * 64, 64 * 96))
    want = torch.bmm(a.float(), b.float())
    return bool((Bfloat16().product(a, b, "probe") - want).abs().max() < 1e-5 * want.abs().max())
