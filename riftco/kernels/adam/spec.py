"""What a transactional Adam step means, in plain torch: lists of parameters, gradients, moments and step counts."""

import math

import torch
from torch import Tensor


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
    """One Adam update of every tensor in place; where `committed` is false nothing changes.

    g = clip_scale * grad (+ weight_decay * p unless decoupled); m += (1 - beta1) (g - m);
    v = beta2 v + (1 - beta2) g^2; p = p (1 - lr weight_decay, if decoupled)
    - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps).
    """
    if not params:
        return
    correction1, correction2 = advance(steps, committed, beta1, beta2)
    for p, grad, m, v, c1, c2 in zip(params, grads, exp_avgs, exp_avg_sqs, correction1, correction2):
        acc = m.dtype
        old, g = p.to(acc), clip_scale.to(acc) * grad.to(acc)
        if not decoupled:
            g = g + weight_decay * old
        new_m = m + (1 - beta1) * (g - m)
        new_v = beta2 * v + (1 - beta2) * g * g
        new = old * (1 - lr * weight_decay) if decoupled else old
        new = new - lr / c1 * new_m / (new_v.sqrt() / c2.sqrt() + eps)
        for stored, value in ((p, new), (m, new_m), (v, new_v)):
            stored.copy_(torch.where(committed, value.to(stored.dtype), stored))


def advance(steps: list[Tensor], committed: Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """Count a committed step and return 1 - beta1^t and 1 - beta2^t of every tensor.

    By expm1, as 1 - 0.999 in float32 keeps only five digits.
    """
    torch._foreach_add_(steps, [committed.to(steps[0].dtype)] * len(steps))  # one tensor for all would be read back
    count = torch.stack(steps)
    # a refused first step would divide by 1 - beta^0; its result is not stored
    count = torch.where(committed, count, 1.0)
    return tuple(-torch.expm1(count * (math.log(b) if b else -math.inf)) for b in (beta1, beta2))  # type: ignore


def accumulation_dtype(tensors: list[Tensor]) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
