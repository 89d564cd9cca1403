"""The Adam step on CPUs: PyTorch's fused kernel on a stretch of elements at a time.

A stretch fits the cache, so that scaling the gradient and converting dtypes cost no memory traffic. The kernel itself
skips a refused update.
"""

import torch
from torch import Tensor

from . import spec


class FusedUpdate:
    """equations.Update by PyTorch's kernel, for contiguous stretches."""

    def __init__(self, step, committed, clip_scale, lr, beta1, beta2, eps, weight_decay, decoupled):
        self.kernel = (torch.ops.aten._fused_adamw_ if decoupled else torch.ops.aten._fused_adam_).tensor_lr
        self.step, self.lr, self.scale = [step], lr, clip_scale
        self.refused = torch.where(committed, 0.0, 1.0)
        self.options = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}

    def __call__(self, p: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> None:
        wide, g = p.to(m.dtype), grad.to(m.dtype) * self.scale
        self.kernel(
            [wide], [g], [m], [v], [], self.step, lr=self.lr, found_inf=self.refused, amsgrad=False, maximize=False,
            **self.options,
        )  # fmt: skip
        if wide is not p:
            p.copy_(wide)


def step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    committed: Tensor,
    *options,
) -> None:
    if not params:
        return
    spec.advance(steps, committed)
    for p, g, m, v, t in zip(params, grads, exp_avgs, exp_avg_sqs, steps):
        update = FusedUpdate(t, committed, *options)
        flat = [x.contiguous().view(-1) for x in (p, g, m, v)]
        for stretch in zip(*(x.split(spec.RUN) for x in flat)):
            update(*stretch)
        for x, worked in zip((p, m, v), (flat[0], flat[2], flat[3])):
            if worked.data_ptr() != x.data_ptr():
                x.copy_(worked.view(x.shape))


def paged_step(
    params: list[Tensor],
    grads: list[Tensor],
    slabs: list[Tensor],
    starts: list[int],
    firsts: list[int],
    page_size: int,
    steps: list[Tensor],
    committed: Tensor,
    *options,
) -> None:
    updates = [FusedUpdate(t, committed, *options) for t in steps]
    spec.over_pages(params, grads, slabs, starts, firsts, page_size, committed, updates)
