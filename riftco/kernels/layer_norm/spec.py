"""What layer normalisation means, in plain torch. C hidden size; rows are all leading dimensions of x [..., C]."""

import torch
from torch import Tensor


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, residual [..., C], weight, bias [C] -> y [..., C] in x's dtype, total = x + residual (empty without), mean and
    rstd [...].

    z = total - mean(total), rstd = 1 / sqrt(mean(z^2) + eps), y = z * rstd * weight + bias, rounded once; without a
    residual x is the total.
    """
    total = x.new_empty(0) if residual is None else (x + residual).contiguous()
    a = x if residual is None else total
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    mean = a.mean(-1)
    z = a - mean.unsqueeze(-1)
    rstd = (z.square().mean(-1) + eps).rsqrt()
    y = z * rstd.unsqueeze(-1)
    if weight is not None:
        y = y * weight.to(a.dtype)
    if bias is not None:
        y = y + bias.to(a.dtype)
    return y.to(x.dtype).contiguous(), total, mean, rstd


def backward(
    d_y: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """With x the total, n = (x - mean) * rstd and g = d_y * weight: d_x = rstd * (g - mean(g) - n * mean(g * n)) +
    d_total, d_weight = sum(d_y * n), d_bias = sum(d_y).

    What is not needed comes back empty.
    """
    d_x, d_weight, d_bias = (x.new_empty(0) for _ in range(3))
    d = d_y.to(rstd.dtype)
    n = (x.to(rstd.dtype) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    if need_weight and weight is not None:
        d_weight = (d * n).sum_to_size(weight.shape).to(weight.dtype)
    if need_bias and bias is not None:
        d_bias = d.sum_to_size(bias.shape).to(bias.dtype)
    if need_x:
        g = d if weight is None else d * weight.to(d.dtype)
        d_x = rstd.unsqueeze(-1) * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
        if d_total is not None:
            d_x = d_x + d_total
        d_x = d_x.to(x.dtype).contiguous()
    return d_x, d_weight, d_bias
