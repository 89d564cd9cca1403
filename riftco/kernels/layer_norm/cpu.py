"""Layer normalisation on a CPU: PyTorch's own kernel, given float32 weights so that its statistics are float32 too."""

import torch
from torch import Tensor

from . import spec


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return spec.forward(x, residual, weight, bias, eps)
    total = x.new_empty(0) if residual is None else torch.add(x, residual).contiguous()
    a = x if residual is None else total
    y, mean, rstd = torch.native_layer_norm(a, a.shape[-1:], *_wide(a, weight, bias), eps)
    return y.to(x.dtype).contiguous(), total, mean.squeeze(-1), rstd.squeeze(-1)


def backward(
    d_y: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    need_weight, need_bias = need_weight and weight is not None, need_bias and bias is not None
    if x.numel() == 0:
        return spec.backward(d_y, d_total, x, weight, bias, mean, rstd, need_x, need_weight, need_bias)
    d_x, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(
        d_y.to(x.dtype), x, x.shape[-1:], mean.unsqueeze(-1), rstd.unsqueeze(-1), *_wide(x, weight, bias),
        [need_x, need_weight, need_bias],
    )  # fmt: skip
    if need_x and d_total is not None:
        d_x = d_x + d_total
    return (
        d_x.contiguous() if need_x else x.new_empty(0),
        d_weight.to(weight.dtype) if weight is not None and need_weight else x.new_empty(0),
        d_bias.to(bias.dtype) if bias is not None and need_bias else x.new_empty(0),
    )


def _wide(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Without both, the kernel would keep its statistics in x's dtype."""
    C = x.shape[-1]
    return (
        torch.ones(C) if weight is None else weight.float(),
        torch.zeros(C) if bias is None else bias.float(),
    )
