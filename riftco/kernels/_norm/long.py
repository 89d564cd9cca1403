"""Normalisation of rows that do not fit a program's registers: each is walked twice, or thrice with a mean. The
gradients of weight and bias are a kernel of their own that goes down the columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import cdiv
from .rows import _normed, _offset, _scale, rows_of

BLOCK_C = 4096  # columns held at once
SHARES = 64  # parts the rows are cut into for the gradients of weight and bias


@triton.jit
def _load(x_ptr, r_ptr, total_ptr, c, x_c, r_c, mask, HAS_RESIDUAL: tl.constexpr):
    """A block of x + residual in float32, rounded as it is stored."""
    x = tl.load(x_ptr + c * x_c, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        r = tl.load(r_ptr + c * r_c, mask=mask, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + r).to(total_ptr.dtype.element_ty)
    return x.to(tl.float32)


@triton.jit
def _long_fwd(
    y_ptr, total_ptr, mean_ptr, rstd_ptr, x_ptr, r_ptr, w_ptr, b_ptr,
    x_inner, x_o, x_i, x_c, r_inner, r_o, r_i, r_c, w_c, b_c, C, eps, offset,
    X_SPLIT: tl.constexpr, R_SPLIT: tl.constexpr, CENTRE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + _offset(n, x_inner, x_o, x_i, X_SPLIT)
    r_row = r_ptr + _offset(n, r_inner, r_o, r_i, R_SPLIT) if HAS_RESIDUAL else x_row
    total = tl.zeros([BLOCK], tl.float32)
    if CENTRE:
        for start in range(0, C, BLOCK):
            c = start + tl.arange(0, BLOCK).to(tl.int64)
            total += _load(x_row, r_row, total_ptr, c, x_c, r_c, c < C, HAS_RESIDUAL)
    mean = tl.sum(total, 0) / C
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK).to(tl.int64)
        z = _load(x_row, r_row, total_ptr, c, x_c, r_c, c < C, HAS_RESIDUAL) - mean
        squares += tl.where(c < C, z * z, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / C + eps)
    if CENTRE:
        tl.store(mean_ptr + n, mean)
    tl.store(rstd_ptr + n, rstd)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK).to(tl.int64)
        x = _load(x_row, r_row, total_ptr, c, x_c, r_c, c < C, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            tl.store(total_ptr + n * C + c, x, mask=c < C)
        w, b = _scale(w_ptr, b_ptr, w_c, b_c, c, C, HAS_WEIGHT, HAS_BIAS)
        y = _normed((x - mean) * rstd, w, b, offset, HAS_WEIGHT, HAS_BIAS)
        tl.store(y_ptr + n * C + c, y, mask=c < C)


@triton.jit
def _long_bwd_x(
    d_x_ptr, d_y_ptr, d_total_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr,
    d_inner, d_o, d_i, d_c, t_inner, t_o, t_i, t_c, x_inner, x_o, x_i, x_c, w_c, C, offset,
    D_SPLIT: tl.constexpr, T_SPLIT: tl.constexpr, X_SPLIT: tl.constexpr, CENTRE: tl.constexpr, HAS_TOTAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + _offset(n, x_inner, x_o, x_i, X_SPLIT)
    d_row = d_y_ptr + _offset(n, d_inner, d_o, d_i, D_SPLIT)
    rstd = tl.load(rstd_ptr + n)
    mean = tl.load(mean_ptr + n) if CENTRE else 0.0
    products = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK).to(tl.int64)
        z = (tl.load(x_row + c * x_c, mask=c < C, other=0.0).to(tl.float32) - mean) * rstd
        g = tl.load(d_row + c * d_c, mask=c < C, other=0.0).to(tl.float32)
        w, b = _scale(w_ptr, w_ptr, w_c, 0, c, C, HAS_WEIGHT, False)
        g = _normed(g, w, b, offset, HAS_WEIGHT, False)
        products += g * z
        if CENTRE:
            sums += g
    product = tl.sum(products, 0) / C
    sum_g = tl.sum(sums, 0) / C
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK).to(tl.int64)
        z = (tl.load(x_row + c * x_c, mask=c < C, other=0.0).to(tl.float32) - mean) * rstd
        g = tl.load(d_row + c * d_c, mask=c < C, other=0.0).to(tl.float32)
        w, b = _scale(w_ptr, w_ptr, w_c, 0, c, C, HAS_WEIGHT, False)
        g = _normed(g, w, b, offset, HAS_WEIGHT, False)
        d_x = rstd * (g - z * product - sum_g)
        if HAS_TOTAL:
            t_row = d_total_ptr + _offset(n, t_inner, t_o, t_i, T_SPLIT)
            d_x += tl.load(t_row + c * t_c, mask=c < C, other=0.0).to(tl.float32)
        tl.store(d_x_ptr + n * C + c, d_x, mask=c < C)


@triton.jit
def _long_bwd_weight(
    part_ptr, d_y_ptr, x_ptr, mean_ptr, rstd_ptr, d_inner, d_o, d_i, d_c, x_inner, x_o, x_i, x_c, N, C, rows_each,
    D_SPLIT: tl.constexpr, X_SPLIT: tl.constexpr, CENTRE: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    share = tl.program_id(1).to(tl.int64)
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, rows_each, ROWS):
        n = share * rows_each + start + tl.arange(0, ROWS)
        live = (n < N) & (start + tl.arange(0, ROWS) < rows_each)
        mask = live[:, None] & (c < C)
        x = tl.load(x_ptr + _offset(n, x_inner, x_o, x_i, X_SPLIT)[:, None] + c * x_c, mask=mask, other=0.0)
        g = tl.load(d_y_ptr + _offset(n, d_inner, d_o, d_i, D_SPLIT)[:, None] + c * d_c, mask=mask, other=0.0)
        z = x.to(tl.float32)
        if CENTRE:
            z = z - tl.load(mean_ptr + n, mask=live, other=0.0)[:, None]
        weight_sum += g.to(tl.float32) * (z * tl.load(rstd_ptr + n, mask=live, other=0.0)[:, None])
        bias_sum += g.to(tl.float32)
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = part_ptr + share * C + columns
    if NEED_WEIGHT:
        tl.store(part, tl.sum(weight_sum, 0), mask=columns < C)
        part += tl.num_programs(1).to(tl.int64) * C
    if NEED_BIAS:
        tl.store(part, tl.sum(bias_sum, 0), mask=columns < C)


def forward(y, total, mean, rstd, x, residual, weight, bias, eps: float, offset: float, centre: bool) -> None:
    """Fills y, total, mean and rstd."""
    C, N = x.shape[-1], x.shape[:-1].numel()
    x, x_strides, x_split = rows_of(x)
    residual, r_strides, r_split = rows_of(residual)
    _long_fwd[(N,)](
        y, total, mean, rstd, x, residual, weight, bias, *x_strides, *r_strides,
        0 if weight is None else weight.stride(0), 0 if bias is None else bias.stride(0), C, eps, offset,
        X_SPLIT=x_split, R_SPLIT=r_split, CENTRE=centre, HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, BLOCK=BLOCK_C, num_warps=8,
    )  # fmt: skip


def backward(
    d_x, d_y, d_total, x, weight, mean, rstd, offset: float, need_x: bool, need_weight: bool, need_bias: bool
) -> Tensor:
    """Fills d_x and returns [weight and bias that need a gradient, shares, C] sums in float32."""
    C, N = x.shape[-1], x.shape[:-1].numel()
    d_y, d_strides, d_split = rows_of(d_y)
    d_total, t_strides, t_split = rows_of(d_total)
    x, x_strides, x_split = rows_of(x)
    if need_x:
        _long_bwd_x[(N,)](
            d_x, d_y, d_total, x, weight, mean, rstd, *d_strides, *t_strides, *x_strides,
            0 if weight is None else weight.stride(0), C, offset,
            D_SPLIT=d_split, T_SPLIT=t_split, X_SPLIT=x_split, CENTRE=mean is not None, HAS_TOTAL=d_total is not None,
            HAS_WEIGHT=weight is not None, BLOCK=BLOCK_C, num_warps=8,
        )  # fmt: skip
    rows, block = 16, 128
    shares = min(SHARES, cdiv(N, rows))
    part = torch.empty(need_weight + need_bias, shares, C, dtype=torch.float32, device=x.device)
    if need_weight or need_bias:
        _long_bwd_weight[(cdiv(C, block), shares)](
            part, d_y, x, mean, rstd, *d_strides, *x_strides, N, C, cdiv(N, shares),
            D_SPLIT=d_split, X_SPLIT=x_split, CENTRE=mean is not None, NEED_WEIGHT=need_weight, NEED_BIAS=need_bias,
            ROWS=rows, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return part
