"""What RMS normalisation means, in plain torch. C hidden size; rows are all leading dimensions of x [..., C]."""

import torch
from torch import Tensor


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [..., C], weight [C] -> y [..., C] in x's dtype, total = x + residual (empty without), rstd [...].

    rstd = 1 / sqrt(mean(total^2) + eps); y = total * rstd * (weight + offset), rounded once; without a residual x is
    the total.
    """
    total = x.new_empty(0) if residual is None else (x + residual).contiguous()
    a = x if residual is None else total
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    rstd = (a.square().mean(-1) + eps).rsqrt()
    y = a * rstd.unsqueeze(-1)
    if weight is not None:
        y = y * (weight.to(a.dtype) + offset)
    return y.to(x.dtype).contiguous(), total, rstd


def backward(
    d_y: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """With x the total, n = x * rstd and g = d_y * (weight + offset): d_x = rstd * (g - n * mean(g * n)) + d_total,
    d_weight = sum(d_y * n).

    What is not needed comes back empty.
    """
    d_x, d_weight = x.new_empty(0), x.new_empty(0)
    d = d_y.to(rstd.dtype)
    n = x.to(rstd.dtype) * rstd.unsqueeze(-1)
    if need_weight and weight is not None:
        d_weight = (d * n).sum_to_size(weight.shape).to(weight.dtype)
    if need_x:
        g = d if weight is None else d * (weight.to(d.dtype) + offset)
        d_x = rstd.unsqueeze(-1) * (g - n * (g * n).mean(-1, keepdim=True))
        if d_total is not None:
            d_x = d_x + d_total
        d_x = d_x.to(x.dtype).contiguous()
    return d_x, d_weight
