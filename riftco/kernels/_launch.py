"""Small helpers of the launchers, Triton's and Metal's."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def cdiv(a: int, b: int) -> int:
    """Triton's own is made for kernels as well, and costs a launcher ten times as much."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


_HERE = contextlib.nullcontext()


def on(t: Tensor) -> contextlib.AbstractContextManager:
    """Make `t`'s CUDA device current during a launch; nothing to do for the interpreter's CPU tensors."""
    here = not t.is_cuda or _one_gpu() or t.get_device() == torch.cuda.current_device()
    return _HERE if here else torch.cuda.device(t.device)


@functools.cache
def _one_gpu() -> bool:
    return torch.cuda.device_count() == 1


class Again:
    """Launches of one kernel whose arguments look alike to Triton, which looks at them in the first one only.

    Alike are equal dtypes, addresses that all are multiples of 16 bytes or all are not, the same arguments None, and
    equal numbers, but for those that the kernel does not specialise. `constants`: its constexprs, which come last, and
    Triton's options.
    """

    def __init__(self, kernel: Any, **constants: Any):
        self.kernel, self.constants = kernel, constants
        self.behind: list[Any] = []
        self.compiled: Any = None  # set last, as another thread may look
        self.made: tuple[int, Any] = (-1, None)  # of how many programs, the launch

    def __call__(self, grid: int, *args: Any) -> None:
        if self.compiled is None:
            compiled = self.kernel[(grid,)](*args, **self.constants)
            if compiled is not None:  # the interpreter compiles nothing
                self.behind = [self.constants[name] for name in self.kernel.arg_names[len(args) :]]
                self.compiled = compiled
            return
        made = self.made
        if grid != made[0]:
            made = self.made = (grid, self.compiled[grid, 1, 1])
        made[1](*args, *self.behind)

    def places(self, tensors: Iterable[Tensor | None], first: int) -> list[Any]:
        """Arguments of a next launch that begin at element `first` of the tensors, whose elements lie side by side:
        addresses, where Triton has looked; making a view costs the host as much as a quarter of a launch."""
        if self.compiled is None:
            return [t if t is None or not first else t[first:] for t in tensors]
        return [None if t is None else t.data_ptr() + first * t.element_size() for t in tensors]


def ordinary(tensors: Iterable[Tensor | None], numbers: Iterable[int]) -> bool:
    """Whether Triton makes no other kernel for where these begin, at multiples of 16 bytes, and for numbers that it is
    told not to specialise, of 32 bits."""
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors) and all(-(2**31) <= n < 2**31 for n in numbers)


def as_rows(t: Tensor) -> tuple[Tensor, int, int, int]:
    """View [..., C] as rows without a copy where two strides can describe them.

    Returns (tensor, inner, stride_outer, stride_inner): row n starts at
    ``(n // inner) * stride_outer + (n % inner) * stride_inner`` elements from the tensor's first.
    Leading dimensions that no two strides describe are copied into a contiguous tensor.
    """
    if t.is_contiguous():
        count = t.shape[:-1].numel()
        return t, max(count, 1), 0, t.shape[-1] if count != 1 else 0
    dims = [(size, stride) for size, stride in zip(t.shape[:-1], t.stride()[:-1]) if size != 1]
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > 2:
        return as_rows(t.contiguous())
    if len(merged) == 2:
        return t, merged[1][0], merged[0][1], merged[1][1]
    if len(merged) == 1:
        return t, max(merged[0][0], 1), 0, merged[0][1]
    return t, 1, 0, 0


def one_stride(t: Tensor) -> bool:
    """Whether the leading dimensions of [.., C] merge into one without a copy."""
    dims = [(size, stride) for size, stride in zip(t.shape[:-1], t.stride()[:-1]) if size != 1]
    return t.numel() == 0 or all(a[1] == b[1] * b[0] for a, b in itertools.pairwise(dims))


def as_batch(t: Tensor) -> Tensor:
    """[.., T, heads, D] as [B, T, heads, D]; leading dimensions are copied only where no stride describes them."""
    return t.unsqueeze(0) if t.dim() == 3 else t.flatten(0, -4)
