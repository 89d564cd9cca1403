"""What a transactional Adam step means, in plain torch: lists of parameters, gradients, moments and step counts."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from . import quantized
from .equations import Update

RUN = 1 << 16  # elements that are updated at once on a CPU, where they and what is computed of them stay in the cache


def norm(grads: list[Tensor], clip: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Global norm of all gradients, clip scale, and whether the step may be committed: three scalars on the device.

    Two passes: the largest absolute value, then the squares of everything divided by it, so that neither 1e38 nor
    1e-38 leaves float32.
    """
    acc = accumulation_dtype(grads)
    live = [g for g in grads if g.numel()]
    if not live:
        return finish(grads[0].new_zeros((), dtype=acc), grads[0].new_zeros((), dtype=acc), clip)
    largest = torch.stack([g.abs().amax().to(acc) for g in live]).amax()
    unit = torch.where(largest > 0, largest, 1.0)
    return finish(largest, torch.stack([(g.to(acc) / unit).square().sum() for g in live]).sum(), clip)


def finish(largest: Tensor, squares: Tensor, clip: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """(norm, clip scale, committed) from the largest absolute value and the sum of squares of gradients / largest.

    A step is refused, with clip scale 0, when a gradient is not finite or its square would not be after clipping.
    """
    root = squares.sqrt()
    total = torch.where(largest.isfinite() & (largest > 0), largest * root, largest)
    scale = torch.ones_like(largest)
    if clip is not None:
        scale = torch.clamp(clip / torch.where(largest > 0, largest, 1.0) / root, max=1.0)  # no overflow in between
    committed = (largest * scale).square().isfinite()
    return total, torch.where(committed, scale, 0.0), committed


def step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    committed: Tensor,
    clip_scale: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Count the step and update every tensor in place; where `committed` is false nothing changes."""
    if not params:
        return
    advance(steps, committed)
    options = committed, clip_scale, lr, beta1, beta2, eps, weight_decay, decoupled
    for p, g, m, v, t in zip(params, grads, exp_avgs, exp_avg_sqs, steps):
        Update(t, *options)(p, g, m, v)


def advance(steps: list[Tensor], committed: Tensor) -> None:
    """Count a committed step."""
    torch._foreach_add_(steps, [committed.to(steps[0].dtype)] * len(steps))  # one tensor for all would be read back


def paged_step(
    params: list[Tensor],
    grads: list[Tensor],
    slabs: list[Tensor],
    starts: list[int],
    firsts: list[int],
    page_size: int,
    steps: list[Tensor],
    committed: Tensor,
    clip_scale: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """The update, after `advance`, of those elements whose moments lie in these slabs of pages."""
    options = committed, clip_scale, lr, beta1, beta2, eps, weight_decay, decoupled
    updates = [Update(t, *options) for t in steps]
    over_pages(params, grads, slabs, starts, firsts, page_size, committed, updates)


def over_pages(
    params: list[Tensor],
    grads: list[Tensor],
    slabs: list[Tensor],
    starts: list[int],
    firsts: list[int],
    page_size: int,
    committed: Tensor,
    updates: Sequence[Callable],
) -> None:
    """Call each tensor's update on stretches of (parameter, gradient, m, v), 1-D and contiguous, as short as RUN."""
    for p, grad, first, update in zip(params, grads, firsts, updates):
        flat, g = p.contiguous().view(-1), grad.contiguous().view(-1)
        for slab, a, b, lo, hi in runs_of(p.numel(), first, slabs, starts, page_size):
            if slab.dtype == torch.uint8:
                quantized.update(flat[lo:hi], g[lo:hi], slab[a:b], page_size, committed, update)
            else:
                m, v = (moment[a:b].view(-1)[: hi - lo] for moment in slab)
                update(flat[lo:hi], g[lo:hi], m, v)
        if flat.data_ptr() != p.data_ptr():
            p.copy_(flat.view(p.shape))


def runs_of(
    numel: int, first: int, slabs: Sequence[Tensor], starts: Sequence[int], page_size: int
) -> Iterator[tuple[Tensor, int, int, int, int]]:
    """(slab, its pages a..b, elements lo..hi that they hold) of a tensor whose pages are numbered from `first` on."""
    most, pages = max(RUN // page_size, 1), -(-numel // page_size)
    for slab, start in zip(slabs, starts):
        low, high = max(start - first, 0), min(start + pages_in(slab) - first, pages)
        for page in range(low, high, most):
            end = min(page + most, high)
            row = page + first - start
            yield slab, row, row + end - page, page * page_size, min(end * page_size, numel)


def pages_in(slab: Tensor) -> int:
    """A slab is [2, pages, page size] of m and v, or uint8 [pages, bytes] of what quantized.parts names."""
    return slab.shape[0 if slab.dtype == torch.uint8 else 1]


def accumulation_dtype(tensors: list[Tensor]) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
