"""DoRA's y = gain * z + bias in Triton: each tensor read once and written once, in both directions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import as_rows, cdiv, on

BLOCK_N = 128
BLOCK_M = 32
PROGRAMS = 1024  # rows are shared out among programs until there are so many
SPLITS = 64  # most partial sums of d_gain
SPLIT_ROWS = 128  # fewest rows worth one


@triton.jit
def rescale_fwd(
    z_ptr, gain_ptr, bias_ptr, y_ptr, where, M, N, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    tiles_n = tl.cdiv(N, BN)
    m = (tl.program_id(0) // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % tiles_n).to(tl.int64) * BN + tl.arange(0, BN)
    live = (m < M)[:, None] & (n < N)[None, :]
    line_ptr = z_ptr + (m // where[0]) * where[1] + (m % where[0]) * where[2]
    z = tl.load(line_ptr[:, None] + n[None, :] * where[3], mask=live, other=0.0).to(tl.float32)
    y = z * tl.load(gain_ptr + n, mask=n < N, other=0.0)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + m[:, None] * N + n[None, :], y, mask=live)


@triton.jit
def rescale_bwd(
    d_y_ptr, z_ptr, gain_ptr, d_z_ptr, out_ptr, where_y, where_z, M, N, rows_each, splits,
    NEED_Z: tl.constexpr, NEED_GAIN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """d_z, and the s-th partial sum of d_gain over a range of rows: out [splits, N]."""
    s = (tl.program_id(0) % splits).to(tl.int64)
    n = (tl.program_id(0) // splits).to(tl.int64) * BN + tl.arange(0, BN)
    gain = tl.load(gain_ptr + n, mask=n < N, other=0.0)
    total = tl.zeros([BN], tl.float32)
    stop = tl.minimum((s + 1) * rows_each, M)
    for start in range(0, rows_each, BM):
        m = s * rows_each + start + tl.arange(0, BM)
        live = (m < stop)[:, None] & (n < N)[None, :]
        y_line = d_y_ptr + (m // where_y[0]) * where_y[1] + (m % where_y[0]) * where_y[2]
        d_y = tl.load(y_line[:, None] + n[None, :] * where_y[3], mask=live, other=0.0).to(tl.float32)
        if NEED_Z:
            tl.store(d_z_ptr + m[:, None] * N + n[None, :], d_y * gain[None, :], mask=live)
        if NEED_GAIN:
            z_line = z_ptr + (m // where_z[0]) * where_z[1] + (m % where_z[0]) * where_z[2]
            z = tl.load(z_line[:, None] + n[None, :] * where_z[3], mask=live, other=0.0).to(tl.float32)
            total += tl.sum(d_y * z, 0)
    if NEED_GAIN:
        tl.store(out_ptr + s * N + n, total, mask=n < N)


def forward(z: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    M, N = z.shape[:-1].numel(), z.shape[-1]
    if y.numel() == 0:
        return y
    lines, inner, stride_o, stride_i = as_rows(z)
    bias = None if bias is None else bias.contiguous()
    with on(z):
        rescale_fwd[(cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),)](
            lines, gain.contiguous(), bias, y, (inner, stride_o, stride_i, lines.stride(-1)), M, N,
            HAS_BIAS=bias is not None, BM=BLOCK_M, BN=BLOCK_N,
        )  # fmt: skip
    return y


def backward(d_y: Tensor, z: Tensor, gain: Tensor, need_z: bool, need_gain: bool) -> tuple[Tensor, Tensor]:
    M, N = d_y.shape[:-1].numel(), d_y.shape[-1]
    d_z = torch.empty(d_y.shape if need_z else 0, dtype=d_y.dtype, device=d_y.device)
    tiles = cdiv(N, BLOCK_N)
    splits = max(1, min(SPLITS, cdiv(M, SPLIT_ROWS), cdiv(PROGRAMS, max(tiles, 1))))
    out = torch.empty(splits, N if need_gain else 0, dtype=torch.float32, device=d_y.device)
    if M == 0 or N == 0:
        return d_z, out.zero_()[0]
    lines_y, *where_y = as_rows(d_y)
    lines_z, *where_z = as_rows(z)
    with on(d_y):
        rescale_bwd[(tiles * splits,)](
            lines_y, lines_z, gain.contiguous(), d_z, out, (*where_y, lines_y.stride(-1)),
            (*where_z, lines_z.stride(-1)), M, N, cdiv(M, splits), splits,
            NEED_Z=need_z, NEED_GAIN=need_gain, BM=BLOCK_M, BN=BLOCK_N,
        )  # fmt: skip
    return d_z, out.sum(0) if splits > 1 else out[0]
