"""Which tensors a kernel may walk as they lie in memory."""

import torch
from torch import Tensor


def in_one_order(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four tensors with their elements in one order in memory; those that lie otherwise are copied."""
    if p.is_contiguous() and g.is_contiguous() and m.is_contiguous() and v.is_contiguous():  # hundreds of them a step
        return p, g, m, v
    if not (dense_in_memory(p) and m.stride() == v.stride() == p.stride()):
        return p.contiguous(), g.contiguous(), m.contiguous(), v.contiguous()
    return p, g if g.stride() == p.stride() else torch.empty_like(p, dtype=g.dtype).copy_(g), m, v


def dense_in_memory(t: Tensor) -> bool:
    """Every element once and no gaps, in any order of the dimensions."""
    if t.is_contiguous():
        return True
    expected = 1
    for size, stride in sorted(zip(t.shape, t.stride()), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
