"""Normalisation of rows that a program holds in its registers: one read and one write of each tensor.

Forward, a program takes a few rows. Backward, programs as many as the GPU runs at once go through the rows and keep the
sums of the weight's and the bias's gradient in registers; each writes one float32 row of them. No atomics. A frozen
weight costs nothing.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from .._launch import as_rows, cdiv, next_power_of_2

WHOLE = 16384  # columns a program holds at once
TILE = 2048  # elements held at once by a program of several short rows
FEW = 256  # rows up to which time is latency, as in a decoding step


class Tuning(NamedTuple):
    """What the clock decides. Columns up to `columns` run with these."""

    columns: int
    forward_warps: int
    warps: int
    stages: int  # of the loop over rows: the loads of this many rows, less one, run ahead
    each: int  # programs a multiprocessor, where the weight's gradient is summed
    frozen_each: int  # the same where it is not; 0: a program for each tile of rows


TUNING = (  # 16-bit elements
    Tuning(1024, 4, 4, 3, 4, 0),
    Tuning(2048, 4, 4, 3, 4, 0),
    Tuning(4096, 4, 8, 1, 3, 0),
    Tuning(8192, 8, 16, 3, 1, 0),
    Tuning(WHOLE, 16, 32, 2, 1, 0),
)
TUNING_WIDE = (  # float32
    Tuning(1024, 4, 4, 3, 4, 0),
    Tuning(2048, 4, 8, 3, 2, 0),
    Tuning(4096, 8, 8, 3, 2, 0),
    Tuning(8192, 16, 16, 2, 1, 0),
    Tuning(WHOLE, 16, 32, 1, 1, 0),
)


@triton.jit
def _offset(n, inner, stride_o, stride_i, SPLIT: tl.constexpr):
    """Where row n starts."""
    return (n // inner) * stride_o + (n % inner) * stride_i if SPLIT else n * stride_i


@triton.jit
def _scale(w_ptr, b_ptr, w_c, b_c, c, C, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Weight and bias. AHEAD of the rows' sums they cost registers, behind them the time of a load."""
    w = tl.load(w_ptr + c * w_c, mask=c < C, other=0.0) if HAS_WEIGHT else 1.0
    b = tl.load(b_ptr + c * b_c, mask=c < C, other=0.0) if HAS_BIAS else 0.0
    return w, b


@triton.jit
def _normed(z, w, b, offset, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    if HAS_WEIGHT:
        z = z * (w.to(tl.float32) + offset)
    if HAS_BIAS:
        z = z + b.to(tl.float32)
    return z


@triton.jit
def _norm_fwd(
    y_ptr, total_ptr, mean_ptr, rstd_ptr, x_ptr, r_ptr, w_ptr, b_ptr,
    x_inner, x_o, x_i, x_c, r_inner, r_o, r_i, r_c, w_c, b_c, N, C, eps, offset,
    X_SPLIT: tl.constexpr, R_SPLIT: tl.constexpr, CENTRE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        cuda.gdc_wait()  # all that the kernel before has written is there
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)[None, :]
    mask = (n < N)[:, None] & (c < C)
    x = tl.load(x_ptr + _offset(n, x_inner, x_o, x_i, X_SPLIT)[:, None] + c.to(tl.int64) * x_c, mask=mask, other=0.0)
    if HAS_RESIDUAL:  # the sum is rounded before it is normalised, as without fusion
        r_row = _offset(n, r_inner, r_o, r_i, R_SPLIT)[:, None]
        r = tl.load(r_ptr + r_row + c.to(tl.int64) * r_c, mask=mask, other=0.0).to(tl.float32)
    if AHEAD:
        w, b = _scale(w_ptr, b_ptr, w_c, b_c, c, C, HAS_WEIGHT, HAS_BIAS)
    if HAS_RESIDUAL:
        x = (x.to(tl.float32) + r).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + n[:, None] * C + c, x, mask=mask)
    z = x.to(tl.float32)
    if CENTRE:
        mean = tl.sum(z, 1) / C
        tl.store(mean_ptr + n, mean, mask=n < N)
        z = tl.where(c < C, z - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.where(n < N, tl.sum(z * z, 1) / C + eps, 1.0))
    tl.store(rstd_ptr + n, rstd, mask=n < N)
    if not AHEAD:
        w, b = _scale(w_ptr, b_ptr, w_c, b_c, c, C, HAS_WEIGHT, HAS_BIAS)
    y = _normed(z * rstd[:, None], w, b, offset, HAS_WEIGHT, HAS_BIAS)
    tl.store(y_ptr + n[:, None] * C + c, y, mask=mask)


@triton.jit
def _norm_bwd(
    d_x_ptr, part_ptr, d_y_ptr, d_total_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr,
    d_inner, d_o, d_i, d_c, t_inner, t_o, t_i, t_c, x_inner, x_o, x_i, x_c, w_c, N, C, offset,
    D_SPLIT: tl.constexpr, T_SPLIT: tl.constexpr, X_SPLIT: tl.constexpr, CENTRE: tl.constexpr, HAS_TOTAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK)[None, :]
    far = c.to(tl.int64)
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    if HAS_WEIGHT:
        w = tl.load(w_ptr + far * w_c, mask=c < C, other=0.0)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for start in tl.range(first, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        n = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (n < N)[:, None] & (c < C)
        x = tl.load(x_ptr + _offset(n, x_inner, x_o, x_i, X_SPLIT)[:, None] + far * x_c, mask=mask, other=0.0)
        g = tl.load(d_y_ptr + _offset(n, d_inner, d_o, d_i, D_SPLIT)[:, None] + far * d_c, mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + n, mask=n < N, other=0.0)[:, None]
        z = x.to(tl.float32)
        if CENTRE:
            z = z - tl.load(mean_ptr + n, mask=n < N, other=0.0)[:, None]
        z = z * rstd
        g = g.to(tl.float32)
        if NEED_WEIGHT:
            weight_sum += g * z
        if NEED_BIAS:
            bias_sum += g
        if NEED_X:
            if HAS_WEIGHT:
                g = g * (w.to(tl.float32) + offset)
            d_x = g - z * (tl.sum(g * z, 1) / C)[:, None]
            if CENTRE:
                d_x = d_x - (tl.sum(g, 1) / C)[:, None]
            d_x = d_x * rstd
            if HAS_TOTAL:
                t_row = _offset(n, t_inner, t_o, t_i, T_SPLIT)[:, None]
                d_x += tl.load(d_total_ptr + t_row + far * t_c, mask=mask, other=0.0).to(tl.float32)
            tl.store(d_x_ptr + n[:, None] * C + c, d_x, mask=mask)
    columns = tl.arange(0, BLOCK)
    part = part_ptr + tl.program_id(0).to(tl.int64) * C + columns
    if NEED_WEIGHT:
        tl.store(part, tl.sum(weight_sum, 0), mask=columns < C)
        part += tl.num_programs(0).to(tl.int64) * C
    if NEED_BIAS:
        tl.store(part, tl.sum(bias_sum, 0), mask=columns < C)


def rows_of(t: Tensor | None) -> tuple[Tensor | None, tuple[int, int, int, int], bool]:
    """(tensor, (inner, outer, inner and column stride), whether two strides are needed) as the kernels take them."""
    if t is None:
        return None, (1, 0, 0, 0), False
    rows, inner, outer, stride = as_rows(t)
    return rows, (inner, outer, stride, rows.stride(-1)), inner < t.shape[:-1].numel()


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def hopper(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def tuning(C: int, itemsize: int) -> Tuning:
    return next(t for t in (TUNING_WIDE if itemsize > 2 else TUNING) if t.columns >= C)


def block_of(C: int) -> tuple[int, int]:
    """(rows a program takes, columns it holds)."""
    block = next_power_of_2(max(C, 16))
    return max(1, min(32, TILE // block)), block


def forward(y, total, mean, rstd, x, residual, weight, bias, eps: float, offset: float, centre: bool) -> None:
    """Fills y, total, mean and rstd."""
    C, N = x.shape[-1], x.shape[:-1].numel()
    rows, block = block_of(C)
    early = N <= FEW and hopper(x.device)
    x, x_strides, x_split = rows_of(x)
    residual, r_strides, r_split = rows_of(residual)
    _norm_fwd[(cdiv(N, rows),)](
        y, total, mean, rstd, x, residual, weight, bias, *x_strides, *r_strides,
        0 if weight is None else weight.stride(0), 0 if bias is None else bias.stride(0), N, C, eps, offset,
        X_SPLIT=x_split, R_SPLIT=r_split, CENTRE=centre, HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, ROWS=rows, BLOCK=block,
        AHEAD=N <= FEW, num_warps=tuning(C, x.element_size()).forward_warps, EARLY=early,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def backward(
    d_x, d_y, d_total, x, weight, mean, rstd, offset, need_x: bool, need_weight: bool, need_bias: bool
) -> Tensor:
    """Fills d_x and returns [weight and bias that need a gradient, programs, C] sums in float32."""
    C, N = x.shape[-1], x.shape[:-1].numel()
    rows, block = block_of(C)
    tuned = tuning(C, x.element_size())
    tiles = cdiv(N, rows)
    each = tuned.each if need_weight or need_bias else tuned.frozen_each
    programs = min(tiles, processors(x.device) * each) if each else tiles
    part = torch.empty(need_weight + need_bias, programs, C, dtype=torch.float32, device=x.device)
    d_y, d_strides, d_split = rows_of(d_y)
    d_total, t_strides, t_split = rows_of(d_total)
    x, x_strides, x_split = rows_of(x)
    _norm_bwd[(programs,)](
        d_x, part, d_y, d_total, x, weight, mean, rstd, *d_strides, *t_strides, *x_strides,
        0 if weight is None else weight.stride(0), N, C, offset,
        D_SPLIT=d_split, T_SPLIT=t_split, X_SPLIT=x_split, CENTRE=mean is not None, HAS_TOTAL=d_total is not None,
        HAS_WEIGHT=weight is not None, NEED_X=need_x, NEED_WEIGHT=need_weight, NEED_BIAS=need_bias,
        ROWS=rows, BLOCK=block, STAGES=tuned.stages if programs < tiles else 1, num_warps=tuned.warps,
    )  # fmt: skip
    return part
