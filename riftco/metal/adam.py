"""Launches csrc/metal/adam.metal; the contract is riftco/kernels/adam/op.py. One launch a tensor, or a run of pages."""

import functools
import math

import torch
from torch import Tensor

from ..kernels.adam import spec
from ..kernels.adam.layout import dense_in_memory, in_one_order
from . import launch

CHUNK = 16384


def norm(grads: list[Tensor], clip: float | None) -> tuple[Tensor, Tensor, Tensor]:
    live = [g if dense_in_memory(g) else g.contiguous() for g in grads if g.numel()]
    parts = [-(-g.numel() // CHUNK) for g in live]
    both = torch.zeros(2, max(sum(parts), 1), dtype=torch.float32, device=grads[0].device)
    at = 0
    for g, count in zip(live, parts):
        largest, squares = both[:, at : at + count]
        at += count
        launch("adam", "adam_norm", [g.dtype], [largest, squares], [g], [g.numel()], groups=count, threads=g.numel())
    largest = both[0].amax()
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return spec.finish(largest, (both[1] * (both[0] / unit).square()).sum(), clip)


def step(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], steps: list[Tensor],
    committed: Tensor, *options,
) -> None:  # fmt: skip
    if not params:
        return
    spec.advance(steps, committed)
    for p, g, m, v, t in zip(params, grads, exp_avgs, exp_avg_sqs, steps):
        worked = in_one_order(p, g, m, v)
        _update(*worked, t, committed, options)
        for stored, changed in zip((p, m, v), (worked[0], worked[2], worked[3])):
            if changed is not stored:
                stored.copy_(changed)


def paged_step(
    params: list[Tensor], grads: list[Tensor], slabs: list[Tensor], starts: list[int], firsts: list[int],
    page_size: int, steps: list[Tensor], committed: Tensor, *options,
) -> None:  # fmt: skip
    """8-bit pages are decoded and encoded by PyTorch's operations, a run of pages at a time."""
    updates = [functools.partial(_update, step=t, committed=committed, options=options) for t in steps]
    spec.over_pages(params, grads, slabs, starts, firsts, page_size, committed, updates)


def _update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, committed: Tensor, options: tuple) -> None:
    """The elements of these four tensors lie in one order in memory."""
    if p.numel() == 0:
        return
    if g.dtype != p.dtype:
        g = g.float()  # keeps the order in memory
    clip_scale, lr, beta1, beta2, eps, weight_decay, decoupled = options
    logs = [math.log(b) if b else -math.inf for b in (beta1, beta2)]
    launch(
        "adam", "adam_step", [p.dtype, g.dtype], [p, m, v], [g, step, committed, clip_scale, lr],
        [p.numel(), decoupled], [*logs, 1 - beta1, beta2, 1 - beta2, eps, weight_decay],
        groups=-(-p.numel() // 1024), threads=p.numel(),
    )  # fmt: skip
