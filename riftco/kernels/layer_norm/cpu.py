"""Layer normalisation on a CPU: PyTorch's kernels, given float32 weights so that their statistics are too. Backward in
blocks of rows that stay in the cache; the gradients of weight and bias are summed here, in float32.
"""

import torch
from torch import Tensor

from .._blocks import Wide, step_of
from . import spec

aten = torch.ops.aten


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
    C, need_weight, need_bias = x.shape[-1], need_weight and weight is not None, need_bias and bias is not None
    d_x = torch.empty(x.shape if need_x else 0, dtype=x.dtype)
    d_scale, d_shift = (torch.zeros(C if need else 0) for need in (need_weight, need_bias))
    if x.numel():
        step = step_of(mean.numel(), C)
        xs, d_ys, centred, products = Wide(x, step), Wide(d_y, step), Wide(x, step), Wide(x, step)
        d_xs = Wide(d_x, step) if need_x else None
        totals = None if d_total is None else Wide(d_total, step)
        means, rstds = (t.reshape(-1, 1).split(step) for t in (mean, rstd))
        affine, zeros = _wide(x, weight, bias), torch.zeros(step, 1)
        for i, r in enumerate(rstds):
            d = d_ys.read(i)
            # what the kernel would subtract at its end, where a mean far from zero takes the digits
            z = torch.sub(xs.read(i), means[i], out=centred.scratch(i))
            if need_weight:  # not the kernel's own sum, which adds one row after the other
                d_scale += torch.mul(d, z, out=products.scratch(i)).mul_(r).sum(0)
            if need_bias:
                d_shift += d.sum(0)
            if d_xs is not None:
                g, *_ = aten.native_layer_norm_backward(d, z, [C], zeros[: len(z)], r, *affine, [True, False, False])
                d_xs.blocks[i].copy_(g if totals is None else g.add_(totals.read(i)))
    return (
        d_x,
        d_scale.to(x.dtype if weight is None else weight.dtype),
        d_shift.to(x.dtype if bias is None else bias.dtype),
    )


def _wide(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Without both, the kernel would keep its statistics in x's dtype."""
    C = x.shape[-1]
    return (
        torch.ones(C) if weight is None else weight.float(),
        torch.zeros(C) if bias is None else bias.float(),
    )
