"""RMS normalisation on a CPU: in blocks of rows that stay in the cache, in float32 buffers used again."""

import torch
from torch import Tensor

from .._blocks import Wide, row_blocks


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0) if residual is None else torch.add(x, residual).contiguous()
    y, rstd = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape[:-1])
    if y.numel() == 0:
        return y, total, rstd.fill_(torch.nan)
    rows, ys, flat = Wide(x if residual is None else total), Wide(y), rstd.view(-1, 1)
    scale = None if weight is None else weight.float() + offset
    for at in row_blocks(*rows.rows.shape):
        a, out = rows.read(at), ys.unfilled(at)
        torch.mean(torch.mul(a, a, out=out), -1, keepdim=True, out=flat[at]).add_(eps).rsqrt_()
        torch.mul(a, flat[at], out=out)
        ys.write(at, out if scale is None else out.mul_(scale))
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
        xs, d_ys, d_xs, r = Wide(x), Wide(d_y), Wide(d_x) if need_x else None, rstd.reshape(-1, 1)
        totals = None if d_total is None else Wide(d_total)
        n, products = Wide(x), Wide(x)
        for at in row_blocks(*xs.rows.shape):
            d = d_ys.read(at)
            normal = torch.mul(xs.read(at), r[at], out=n.scratch(at))
            product = torch.mul(d, normal, out=products.scratch(at))
            if need_weight:
                d_scale += product.sum(0)
            if d_xs is not None:
                mean = (product.mean(-1) if scale is None else torch.mv(product, scale) / C).unsqueeze(-1)
                out = d_xs.unfilled(at)
                torch.sub(d if scale is None else torch.mul(d, scale, out=out), normal.mul_(mean), out=out).mul_(r[at])
                d_xs.write(at, out if totals is None else out.add_(totals.read(at)))
    return d_x, d_scale.to(x.dtype if weight is None else weight.dtype)
