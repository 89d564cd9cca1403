"""Layer normalisation on a CPU. Forward: PyTorch's kernel, given float32 weights so that its statistics are too.
Backward: in blocks of rows that stay in the cache, as PyTorch's sums the gradients of 16-bit weights in 16 bit.
"""

import torch
from torch import Tensor

from .._blocks import Wide, row_blocks
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
    C, need_weight, need_bias = x.shape[-1], need_weight and weight is not None, need_bias and bias is not None
    d_x = torch.empty(x.shape if need_x else 0, dtype=x.dtype)
    d_scale, d_shift = (torch.zeros(C if need else 0) for need in (need_weight, need_bias))
    scale = None if weight is None else weight.float()
    if x.numel():
        xs, d_ys, d_xs = Wide(x), Wide(d_y), Wide(d_x) if need_x else None
        means, r = mean.reshape(-1, 1), rstd.reshape(-1, 1)
        totals = None if d_total is None else Wide(d_total)
        n, products = Wide(x), Wide(x)
        for at in row_blocks(*xs.rows.shape):
            d = d_ys.read(at)
            normal = torch.sub(xs.read(at), means[at], out=n.scratch(at)).mul_(r[at])
            product = torch.mul(d, normal, out=products.scratch(at))
            if need_weight:
                d_scale += product.sum(0)
            if need_bias:
                d_shift += d.sum(0)
            if d_xs is not None:
                of_product, of_g = (
                    (t.mean(-1) if scale is None else torch.mv(t, scale) / C).unsqueeze(-1) for t in (product, d)
                )
                out = d_xs.unfilled(at)
                torch.sub(d if scale is None else torch.mul(d, scale, out=out), normal.mul_(of_product), out=out)
                out.sub_(of_g).mul_(r[at])
                d_xs.write(at, out if totals is None else out.add_(totals.read(at)))
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
