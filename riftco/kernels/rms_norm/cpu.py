"""RMS normalisation on a CPU: in blocks of rows that stay in the cache, in float32 buffers used again."""

import torch
from torch import Tensor

from .._blocks import Wide, step_of


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0) if residual is None else torch.add(x, residual).contiguous()
    y, rstd = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape[:-1])
    if y.numel() == 0:
        return y, total, rstd.fill_(torch.nan)
    step = step_of(rstd.numel(), x.shape[-1])
    rows, ys, flat = Wide(x if residual is None else total, step), Wide(y, step), rstd.view(-1, 1).split(step)
    scale = None if weight is None else weight.float() + offset
    for i, r in enumerate(flat):
        a, out = rows.read(i), ys.unfilled(i)
        torch.mean(torch.mul(a, a, out=out), -1, keepdim=True, out=r).add_(eps).rsqrt_()
        torch.mul(a, r, out=out)
        ys.write(i, out if scale is None else out.mul_(scale))
    return y, total, rstd


def backward(
    d_y: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    C, need_weight = x.shape[-1], need_weight and weight is not None
    d_x = torch.empty(x.shape if need_x else 0, dtype=x.dtype)
    d_scale = torch.zeros(C if need_weight else 0)
    scale = None if weight is None else weight.float() + offset
    if x.numel():
        step = step_of(rstd.numel(), C)
        xs, d_ys, d_xs = Wide(x, step), Wide(d_y, step), Wide(d_x, step) if need_x else None
        totals = None if d_total is None else Wide(d_total, step)
        n, products = Wide(x, step), Wide(x, step)  # for their scratch
        for i, r in enumerate(rstd.reshape(-1, 1).split(step)):
            d = d_ys.read(i)
            normal = torch.mul(xs.read(i), r, out=n.scratch(i))
            product = torch.mul(d, normal, out=products.scratch(i))
            if need_weight:
                d_scale += product.sum(0)
            if d_xs is not None:
                mean = (product.mean(-1) if scale is None else torch.mv(product, scale) / C).unsqueeze(-1)
                out = d_xs.unfilled(i)
                g = d if scale is None else torch.mul(d, scale, out=out)
                torch.addcmul(g, normal, mean, value=-1, out=out).mul_(r)
                d_xs.write(i, out if totals is None else out.add_(totals.read(i)))
    return d_x, d_scale.to(x.dtype if weight is None else weight.dtype)
