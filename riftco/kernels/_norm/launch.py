"""Outputs, launches and the last sum of row normalisation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import cdiv, on
from . import long, rows


@triton.jit
def _add_parts(out_ptr, part_ptr, parts, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, parts, ROWS):
        p = start + tl.arange(0, ROWS).to(tl.int64)
        total += tl.load(part_ptr + p[:, None] * C + c, mask=(p < parts)[:, None] & (c < C), other=0.0)
    tl.store(out_ptr + c, tl.sum(total, 0), mask=c < C)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    centre: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, x + residual or nothing, mean or nothing, rstd)."""
    C, N = x.shape[-1], x.shape[:-1].numel()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dtype = x.dtype if residual is None or residual.dtype == x.dtype else torch.promote_types(x.dtype, residual.dtype)
    total = torch.empty(0 if residual is None else x.shape, dtype=dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    mean = torch.empty(x.shape[:-1] if centre else 0, dtype=torch.float32, device=x.device)
    if N == 0 or C == 0:
        return y, total, mean.fill_(torch.nan), rstd.fill_(torch.nan)  # the mean of nothing
    with on(x):
        fill = rows.forward if C <= rows.WHOLE else long.forward
        fill(y, total, mean, rstd, x, residual, weight, bias, eps, offset, centre)
    return y, total, mean, rstd


def backward(
    d_y: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None,
    rstd: Tensor, offset: float, need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(d_x, d_weight, d_bias); what is not needed comes back empty. A mean is what layer_norm has."""
    C, N = x.shape[-1], x.shape[:-1].numel()
    need_weight, need_bias = need_weight and weight is not None, need_bias and bias is not None
    d_x = torch.empty(x.shape if need_x else 0, dtype=x.dtype, device=x.device)
    d_weight, d_bias = (
        torch.empty(C if need else 0, dtype=x.dtype if t is None else t.dtype, device=x.device)
        for t, need in ((weight, need_weight), (bias, need_bias))
    )
    if N == 0 or C == 0:
        return d_x, d_weight.zero_(), d_bias.zero_()
    rstd, mean = rstd.contiguous(), None if mean is None else mean.contiguous()
    with on(x):
        fill = rows.backward if C <= rows.WHOLE else long.backward
        parts = fill(d_x, d_y, d_total, x, weight, mean, rstd, offset, need_x, need_weight, need_bias)
        for out, part in zip([t for t, need in ((d_weight, need_weight), (d_bias, need_bias)) if need], parts):
            _add_parts[(cdiv(C, 64),)](out, part, len(part), C, ROWS=32, BLOCK=64, num_warps=4)
    return d_x, d_weight, d_bias
