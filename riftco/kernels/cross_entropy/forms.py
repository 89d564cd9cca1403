"""Cross-entropy of one interval a row, and the log-probability of each token: calls of `cross_entropy`."""

import torch
from torch import Tensor

from .._arguments import given, indices, number, whole
from .op import cross_entropy


def cross_entropy_time_range(logits: Tensor, target: Tensor, start: int | Tensor, end: int | Tensor, **options):
    """`cross_entropy` of the labels at times start <= t < end of every row; the other positions carry no loss.

    Args:
        logits: [B, T, V], floating. Differentiable.
        target: [B, T], int32 or int64.
        start, end: the same interval for all rows, or [B] integers, one interval a row; 0 <= start <= end <= T where
            they are numbers.
        options: `cross_entropy`'s. "mean" divides by the labelled positions inside the intervals.

    Returns:
        As `cross_entropy`; so are devices, numerics and source.

    Raises:
        ValueError: shapes or an interval that do not fit, and whatever `cross_entropy` refuses.
    """
    name = "cross_entropy_time_range"
    if not (isinstance(logits, Tensor) and isinstance(target, Tensor)) or target.shape != logits.shape[:2]:
        raise ValueError(f"{name}: logits must be [B, T, V] and target [B, T]; got {given(logits, target)}")
    if logits.dim() != 3:
        raise ValueError(f"{name}: logits must be [B, T, V]; got {given(logits)}")
    B, T = target.shape
    for side, at in (("start", start), ("end", end)):
        if not isinstance(at, Tensor):
            whole(name, side, at, f"in [0, {T}], or int32 or int64 ({B},)", least=0, most=T)
        elif not indices(at) or at.shape != (B,):
            raise ValueError(f"{name}: {side} must be int32 or int64 ({B},); got {given(at)}")
    if not isinstance(start, Tensor) and not isinstance(end, Tensor) and start > end:
        raise ValueError(f"{name}: 0 <= start <= end <= {T} does not hold for {start}, {end}")
    lo, hi = (at.unsqueeze(-1) if isinstance(at, Tensor) else at for at in (start, end))
    t = torch.arange(T, device=target.device)
    return cross_entropy(logits, torch.where((t >= lo) & (t < hi), target, -1), **options)


def per_token_logprobs(
    logits: Tensor, target: Tensor, *, temperature: float = 1.0, ignore_index: int = -100, impl: str | None = None
) -> Tensor:
    """log softmax(logits / temperature)[target] of every token, [...]; 0 where there is no label. Differentiable.

    Nothing of the logits' size is made by the forward, and the backward makes their gradient only.

    Args:
        logits: [..., V], float16/bfloat16/float32/float64. Differentiable.
        target: [...], int32 or int64; a negative label and `ignore_index` mean "no label".
        temperature: positive; logits are divided by it.
        impl: "spec" runs the plain-torch meaning under autograd.

    Returns:
        float32 (float64 for float64 logits), at most 0.

    Raises:
        ValueError: a temperature that is not positive, and whatever `cross_entropy` refuses.

    Devices, numerics and source: as `cross_entropy`.
    """
    number("per_token_logprobs", "temperature", temperature, "positive and finite", above=0)
    loss = cross_entropy(
        logits, target, ignore_index=ignore_index, logit_scale=1 / temperature, reduction="none", impl=impl
    )
    assert isinstance(loss, Tensor)
    return -loss
