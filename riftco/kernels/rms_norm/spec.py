"""What RMS normalisation means, in plain torch. C hidden size; rows are all leading dimensions of x [..., C]."""

import torch
from torch import Tensor


def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """x [..., C], weight [C] -> y [..., C] in x's dtype, rstd [...].

    rstd = 1 / sqrt(mean(x^2) + eps); y = x * rstd * (weight + offset), rounded once.
    """
    a = x.to(_acc(x))
    rstd = (a.square().mean(-1) + eps).rsqrt()
    y = a * rstd.unsqueeze(-1)
    if weight is not None:
        y = y * (weight.to(a.dtype) + offset)
    return y.to(x.dtype).contiguous(), rstd


def backward(
    d_y: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """With n = x * rstd and g = d_y * (weight + offset): d_x = rstd * (g - n * mean(g * n)), d_weight = sum(d_y * n).

    What is not needed comes back empty.
    """
    d_x, d_weight = x.new_empty(0), x.new_empty(0)
    d = d_y.to(rstd.dtype)
    n = x.to(rstd.dtype) * rstd.unsqueeze(-1)
    if need_weight and weight is not None:
        d_weight = (d * n).sum_to_size(weight.shape).to(weight.dtype)
    if need_x:
        g = d if weight is None else d * (weight.to(d.dtype) + offset)
        d_x = (rstd.unsqueeze(-1) * (g - n * (g * n).mean(-1, keepdim=True))).to(x.dtype).contiguous()
    return d_x, d_weight


def _acc(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
