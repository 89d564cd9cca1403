"""Which tensors may be written to in place: no element twice, and none of another tensor. Torch-only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def lies_once(t: Tensor) -> bool:
    """Whether every element has a place of its own in memory; False also for views too odd to tell at a glance.

    Under a tracer, which cannot sort symbolic strides, only expanded dimensions are seen."""
    if torch.compiler.is_compiling():
        return all(stride != 0 or size <= 1 for size, stride in zip(t.shape, t.stride()))
    reach = 0
    for size, stride in sorted(zip(t.shape, t.stride()), key=lambda pair: pair[1]):
        if size > 1 and stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def first_shared(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Which two of these have a byte in common, if any do."""
    spans = []
    for i, t in enumerate(tensors):
        if _has_memory(t):
            start = t.untyped_storage().data_ptr() + t.storage_offset() * t.element_size()
            reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1
            spans.append((start, start + reach * t.element_size(), i))
    spans.sort()
    for at, (_, end, i) in enumerate(spans):
        for start, _, j in spans[at + 1 :]:
            if start >= end:
                break
            if share_memory(tensors[i], tensors[j]):
                return min(i, j), max(i, j)
    return None


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether a byte of memory belongs to both."""
    if not (_has_memory(a) and _has_memory(b)):
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    # places of b counted down from its last byte: their sum with places of a is then one number where they meet
    steps: dict[int, int] = {}
    meet = int(b.storage_offset()) * b.element_size() - int(a.storage_offset()) * a.element_size()
    for t in (a, b):
        for step, most in ((t.element_size() * s, n - 1) for n, s in zip(t.shape, t.stride())):
            steps[step] = steps.get(step, 0) + most
            meet += step * most if t is b else 0
        steps[1] = steps.get(1, 0) + t.element_size() - 1
    meet += b.element_size() - 1
    return _reaches(sorted((s, n) for s, n in steps.items() if n and s), meet)


def _has_memory(t: Tensor) -> bool:
    """Not of a tracer's tensors and other kinds of their own, nor of XLA's, which are values, nor of empty ones."""
    if torch.compiler.is_compiling() or type(t) not in (Tensor, torch.nn.Parameter):
        return False
    return t.numel() > 0 and t.device.type not in ("meta", "xla")


def _reaches(steps: list[tuple[int, int]], total: int) -> bool:
    """Whether some 0 <= x_i <= most_i have sum x_i step_i = total; steps ascend."""
    if total <= 0 or not steps:
        return total == 0
    *smaller, (step, most) = steps
    rest = sum(s * n for s, n in smaller)
    first, last = max(0, -(-(total - rest) // step)), min(most, total // step)
    return any(_reaches(smaller, total - step * x) for x in range(first, last + 1))
