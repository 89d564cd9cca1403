"""RMS normalisation in Triton. A program takes a few rows; the weight's gradient is a kernel of its own, so that a
frozen weight costs nothing and no atomics are needed: each program sums its share of the rows, torch adds the shares.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import as_rows, on

BLOCK_C = 4096  # columns held at once; longer rows are walked
TILE = 1024  # elements held at once by a program of several short rows
SHARES = 64  # parts the rows are cut into for the weight's gradient


@triton.jit
def _offsets(n, inner, stride_o, stride_i):
    return (n // inner) * stride_o + (n % inner) * stride_i


@triton.jit
def _rms_norm_fwd(
    y_ptr, rstd_ptr, x_ptr, w_ptr, inner, stride_o, stride_i, stride_c, stride_w, N, C, eps, offset,
    HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (n < N)[:, None]
    row_ptr = x_ptr + _offsets(n, inner, stride_o, stride_i)[:, None]
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        c = (start + tl.arange(0, BLOCK).to(tl.int64))[None, :]
        x = tl.load(row_ptr + c * stride_c, mask=live & (c < C), other=0.0).to(tl.float32)
        squares += x * x
    rstd = 1.0 / tl.sqrt(tl.where(n < N, tl.sum(squares, 1) / C + eps, 1.0))
    tl.store(rstd_ptr + n, rstd, mask=n < N)
    for start in range(0, C, BLOCK):
        c = (start + tl.arange(0, BLOCK).to(tl.int64))[None, :]
        x = tl.load(row_ptr + c * stride_c, mask=live & (c < C), other=0.0).to(tl.float32)
        y = x * rstd[:, None]
        if HAS_WEIGHT:
            y = y * (tl.load(w_ptr + c * stride_w, mask=c < C, other=0.0).to(tl.float32) + offset)
        tl.store(y_ptr + n[:, None] * C + c, y, mask=live & (c < C))


@triton.jit
def _rms_norm_bwd_x(
    d_x_ptr, d_y_ptr, x_ptr, w_ptr, rstd_ptr,
    d_inner, d_stride_o, d_stride_i, d_stride_c, inner, stride_o, stride_i, stride_c, stride_w, N, C, offset,
    HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (n < N)[:, None]
    row_ptr = x_ptr + _offsets(n, inner, stride_o, stride_i)[:, None]
    d_row_ptr = d_y_ptr + _offsets(n, d_inner, d_stride_o, d_stride_i)[:, None]
    rstd = tl.load(rstd_ptr + n, mask=n < N, other=0.0)[:, None]
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        c = (start + tl.arange(0, BLOCK).to(tl.int64))[None, :]
        x = tl.load(row_ptr + c * stride_c, mask=live & (c < C), other=0.0).to(tl.float32)
        g = tl.load(d_row_ptr + c * d_stride_c, mask=live & (c < C), other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g = g * (tl.load(w_ptr + c * stride_w, mask=c < C, other=0.0).to(tl.float32) + offset)
        products += g * (x * rstd)
    mean = (tl.sum(products, 1) / C)[:, None]
    for start in range(0, C, BLOCK):
        c = (start + tl.arange(0, BLOCK).to(tl.int64))[None, :]
        x = tl.load(row_ptr + c * stride_c, mask=live & (c < C), other=0.0).to(tl.float32)
        g = tl.load(d_row_ptr + c * d_stride_c, mask=live & (c < C), other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g = g * (tl.load(w_ptr + c * stride_w, mask=c < C, other=0.0).to(tl.float32) + offset)
        tl.store(d_x_ptr + n[:, None] * C + c, rstd * (g - x * rstd * mean), mask=live & (c < C))


@triton.jit
def _rms_norm_bwd_weight(
    part_ptr, d_y_ptr, x_ptr, rstd_ptr,
    d_inner, d_stride_o, d_stride_i, d_stride_c, inner, stride_o, stride_i, stride_c, N, C, rows_each,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    share = tl.program_id(1).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, rows_each, ROWS):
        n = share * rows_each + start + tl.arange(0, ROWS)
        inside = (n < N) & (start + tl.arange(0, ROWS) < rows_each)
        mask = inside[:, None] & (c < C)
        x_row = x_ptr + _offsets(n, inner, stride_o, stride_i)[:, None]
        d_row = d_y_ptr + _offsets(n, d_inner, d_stride_o, d_stride_i)[:, None]
        x = tl.load(x_row + c * stride_c, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(d_row + c * d_stride_c, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + n, mask=inside, other=0.0)[:, None]
        total += g * (x * rstd)
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(part_ptr + share * C + columns, tl.sum(total, 0), mask=columns < C)


def _tile(C: int) -> tuple[int, int, int]:
    """(rows a program takes, columns it holds at once, warps)."""
    block = min(BLOCK_C, triton.next_power_of_2(max(C, 16)))
    return max(1, min(32, TILE // block)), block, 8 if block >= 2048 else 4


def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    C, N = x.shape[-1], x.shape[:-1].numel()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if N == 0 or C == 0:
        return y, rstd.fill_(torch.nan)  # the mean of nothing
    t, inner, stride_o, stride_i = as_rows(x)
    rows, block, warps = _tile(C)
    with on(x):
        _rms_norm_fwd[(triton.cdiv(N, rows),)](
            y, rstd, t, weight, inner, stride_o, stride_i, t.stride(-1), 0 if weight is None else weight.stride(0),
            N, C, eps, offset, HAS_WEIGHT=weight is not None, ROWS=rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return y, rstd


def backward(
    d_y: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    C, N = x.shape[-1], x.shape[:-1].numel()
    d_x = torch.empty(x.shape if need_x else 0, dtype=x.dtype, device=x.device)
    need_weight = need_weight and weight is not None
    d_weight = x.new_empty(0) if weight is None or not need_weight else torch.zeros_like(weight)
    if N == 0 or C == 0:
        return d_x, d_weight
    t, *x_strides = as_rows(x)
    d, *d_strides = as_rows(d_y)
    rstd = rstd.contiguous()
    with on(x):
        if need_x:
            rows, block, warps = _tile(C)
            _rms_norm_bwd_x[(triton.cdiv(N, rows),)](
                d_x, d, t, weight, rstd, *d_strides, d.stride(-1), *x_strides, t.stride(-1),
                0 if weight is None else weight.stride(0), N, C, offset,
                HAS_WEIGHT=weight is not None, ROWS=rows, BLOCK=block, num_warps=warps,
            )  # fmt: skip
        if need_weight:
            rows, block = 16, min(128, triton.next_power_of_2(max(C, 16)))
            shares = min(SHARES, triton.cdiv(N, rows))
            part = torch.empty(shares, C, dtype=torch.float32, device=x.device)
            _rms_norm_bwd_weight[(triton.cdiv(C, block), shares)](
                part, d, t, rstd, *d_strides, d.stride(-1), *x_strides, t.stride(-1), N, C, triton.cdiv(N, shares),
                ROWS=rows, BLOCK=block, num_warps=4,
            )  # fmt: skip
            d_weight = part.sum(0).to(d_weight.dtype)
    return d_x, d_weight
