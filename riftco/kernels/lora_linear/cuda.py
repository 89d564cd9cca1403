"""The adapter's part of a LoRA layer in Triton, forward and backward, around a base product that others make.

Dense base products are torch's (cuBLAS), NF4 ones the nf4 room's launchers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dot import dot
from .._launch import as_rows, on
from ..nf4 import cuda as nf4
from .spec import inverse_keep

BLOCK_C = 32  # features reduced at once by _down
BLOCK_R = 32  # ranks reduced at once by _up
BLOCK_N = 64
SPLITS = 32  # most partial sums of d_A and d_B over the rows
SPLIT_ROWS = 256  # fewest rows worth a partial sum


@triton.jit
def _row(rows_ptr, m, M, lines, HAS_ROWS: tl.constexpr):
    """The flattened row of position m. A row that is not there is taken for the nearest that is: no foreign memory."""
    if HAS_ROWS:
        return tl.minimum(tl.maximum(tl.load(rows_ptr + m, mask=m < M, other=0), 0), lines - 1)
    return m


@triton.jit
def _down(
    in_ptr, keep_ptr, rows_ptr, w_ptr, out_ptr, inner, stride_o, stride_i, stride_c, stride_wr, stride_wc, factor,
    M, C, R, lines, HAS_KEEP: tl.constexpr, HAS_ROWS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """out [M, R] = factor * masked(in)[M, C] w[R, C]^T, in w's dtype."""
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    row = _row(rows_ptr, m, M, lines, HAS_ROWS)
    r = tl.arange(0, BR)
    line_ptr = in_ptr + (row // inner) * stride_o + (row % inner) * stride_i
    acc = tl.zeros([BM, BR], tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC).to(tl.int64)
        live = (m < M)[:, None] & (c < C)[None, :]
        h = tl.load(line_ptr[:, None] + c[None, :] * stride_c, mask=live, other=0.0)
        if HAS_KEEP:
            kept = tl.load(keep_ptr + row[:, None] * C + c[None, :], mask=live, other=0)
            h = tl.where(kept != 0, h, tl.zeros_like(h))
        w = tl.load(
            w_ptr + r[None, :] * stride_wr + c[:, None] * stride_wc, mask=(r < R)[None, :] & (c < C)[:, None], other=0.0
        )
        acc += dot(h.to(w.dtype), w)
    tl.store(out_ptr + m[:, None] * R + r[None, :], acc * factor, mask=(m < M)[:, None] & (r < R)[None, :])


@triton.jit
def _up(
    y_ptr, keep_ptr, rows_ptr, xa_ptr, w_ptr, stride_wn, stride_wr, factor, M, N, R, lines,
    HAS_KEEP: tl.constexpr, HAS_ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """y[row, N] += factor * masked(xa [M, R] w[N, R]^T), only in the rows that are listed; y is contiguous."""
    tiles_m = tl.cdiv(M, BM)
    m = (tl.program_id(0) % tiles_m).to(tl.int64) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) // tiles_m).to(tl.int64) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, R, BR):
        r = start + tl.arange(0, BR)
        xa = tl.load(xa_ptr + m[:, None] * R + r[None, :], mask=(m < M)[:, None] & (r < R)[None, :], other=0.0)
        w = tl.load(
            w_ptr + n[None, :] * stride_wn + r[:, None] * stride_wr, mask=(n < N)[None, :] & (r < R)[:, None], other=0.0
        )
        acc += dot(xa, w)
    row = _row(rows_ptr, m, M, lines, HAS_ROWS)
    live = (m < M)[:, None] & (n < N)[None, :]
    at = row[:, None] * N + n[None, :]
    acc *= factor
    if HAS_KEEP:
        acc = tl.where(tl.load(keep_ptr + at, mask=live, other=0) != 0, acc, 0.0)
    tl.store(y_ptr + at, tl.load(y_ptr + at, mask=live, other=0.0).to(tl.float32) + acc, mask=live)


@triton.jit
def _grad(
    in_ptr, keep_ptr, rows_ptr, g_ptr, out_ptr, inner, stride_o, stride_i, stride_c, stride_s, stride_or, stride_oc,
    factor, M, C, R, rows_each, lines, HAS_KEEP: tl.constexpr, HAS_ROWS: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out[s, R, C] = factor * sum over the s-th range of rows of g[m, R]^T masked(in)[m, C], in g's dtype."""
    tiles_c = tl.cdiv(C, BC)
    tiles_r = tl.cdiv(R, BR)
    c = (tl.program_id(0) % tiles_c).to(tl.int64) * BC + tl.arange(0, BC)
    r = (tl.program_id(0) // tiles_c % tiles_r).to(tl.int64) * BR + tl.arange(0, BR)
    s = (tl.program_id(0) // tiles_c // tiles_r).to(tl.int64)
    stop = tl.minimum((s + 1) * rows_each, M)
    acc = tl.zeros([BR, BC], tl.float32)
    for start in range(0, rows_each, BM):
        m = s * rows_each + start + tl.arange(0, BM)
        row = _row(rows_ptr, m, stop, lines, HAS_ROWS)
        live = (m < stop)[:, None] & (c < C)[None, :]
        line_ptr = in_ptr + (row // inner) * stride_o + (row % inner) * stride_i
        h = tl.load(line_ptr[:, None] + c[None, :] * stride_c, mask=live, other=0.0)
        if HAS_KEEP:
            kept = tl.load(keep_ptr + row[:, None] * C + c[None, :], mask=live, other=0)
            h = tl.where(kept != 0, h, tl.zeros_like(h))
        g = tl.load(g_ptr + m[None, :] * R + r[:, None], mask=(m < stop)[None, :] & (r < R)[:, None], other=0.0)
        acc += dot(g, h.to(g.dtype))
    at = s * stride_s + r[:, None] * stride_or + c[None, :] * stride_oc
    tl.store(out_ptr + at, acc * factor, mask=(r < R)[:, None] & (c < C)[None, :])


def forward(
    x: Tensor, weight: Tensor, absmax: Tensor | None, block_size: int, bias: Tensor | None, lora_a: Tensor,
    lora_b: Tensor, scale: float, keep: Tensor | None, dropout_p: float, rows: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    N, C = lora_b.shape[0], lora_a.shape[1]
    D = torch.promote_types(lora_a.dtype, lora_b.dtype)
    if absmax is None:
        y = torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    else:
        y = nf4.forward(x, weight, absmax, bias, N, C, block_size)
    keep, rows = _plain(keep, rows)
    factor = inverse_keep(keep, dropout_p)
    xa = _launch_down(x, keep, rows, lora_a.to(D), factor)
    _launch_up(y, None, rows, xa, lora_b.to(D), scale)
    return y, xa


def backward(
    d_y: Tensor, x: Tensor | None, weight: Tensor, absmax: Tensor | None, block_size: int, lora_a: Tensor,
    lora_b: Tensor, xa: Tensor | None, scale: float, keep: Tensor | None, dropout_p: float, rows: Tensor | None,
    need_x: bool, need_w: bool, need_a: bool, need_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    N, C = lora_b.shape[0], lora_a.shape[1]
    D = torch.promote_types(lora_a.dtype, lora_b.dtype)
    keep, rows = _plain(keep, rows)
    factor = scale * inverse_keep(keep, dropout_p)
    d_x = d_w = d_a = d_b = d_y.new_empty(0)
    if need_x or need_a:
        g = _launch_down(d_y, None, rows, lora_b.to(D).t(), 1.0)
    if need_x:
        d_x = (d_y @ weight).contiguous() if absmax is None else nf4.backward(d_y, weight, absmax, N, C, block_size)
        _launch_up(d_x, keep, rows, g, lora_a.to(D).t(), factor)
    if need_w:
        assert x is not None
        d_w = d_y.reshape(-1, N).t() @ x.reshape(-1, C)
    if need_a:
        assert x is not None
        d_a = _launch_grad(x, keep, rows, g, factor, False).to(lora_a.dtype)
    if need_b:
        assert xa is not None
        d_b = _launch_grad(d_y, None, rows, xa, scale, True).to(lora_b.dtype)
    return d_x, d_w, d_a, d_b


def _plain(keep: Tensor | None, rows: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    keep = None if keep is None else keep.contiguous().view(torch.uint8)
    return keep, None if rows is None else rows.contiguous()


def _count(t: Tensor, rows: Tensor | None) -> int:
    return t.shape[:-1].numel() if rows is None else rows.numel()


def _launch_down(t: Tensor, keep: Tensor | None, rows: Tensor | None, w: Tensor, factor: float) -> Tensor:
    """t [..., C], w [R, C] -> [rows, R] in w's dtype."""
    M, (R, C) = _count(t, rows), w.shape
    out = torch.empty(M, R, dtype=w.dtype, device=t.device)
    if M == 0:
        return out
    lines, inner, stride_o, stride_i = as_rows(t)
    BR = max(16, triton.next_power_of_2(R))
    BM = 64 if BR <= 64 else 32
    with on(t):
        _down[(triton.cdiv(M, BM),)](
            lines, keep, rows, w, out, inner, stride_o, stride_i, lines.stride(-1), *w.stride(), factor, M, C, R,
            t.shape[:-1].numel(),
            HAS_KEEP=keep is not None, HAS_ROWS=rows is not None, BM=BM, BC=BLOCK_C, BR=BR, num_stages=2,
        )  # fmt: skip
    return out


def _launch_up(y: Tensor, keep: Tensor | None, rows: Tensor | None, xa: Tensor, w: Tensor, factor: float) -> None:
    """Add factor * xa w^T to y [..., N] in place, w [N, R]."""
    M, (N, R) = _count(y, rows), w.shape
    if M == 0 or N == 0:
        return
    BM = 64 if M > 32 else 32
    with on(y):
        _up[(triton.cdiv(M, BM) * triton.cdiv(N, BLOCK_N),)](
            y, keep, rows, xa, w, *w.stride(), factor, M, N, R, y.shape[:-1].numel(),
            HAS_KEEP=keep is not None, HAS_ROWS=rows is not None, BM=BM, BN=BLOCK_N, BR=BLOCK_R, num_stages=2,
        )  # fmt: skip


def _launch_grad(
    t: Tensor, keep: Tensor | None, rows: Tensor | None, g: Tensor, factor: float, transposed: bool
) -> Tensor:
    """t [..., C], g [rows, R] -> factor * g^T t as [R, C], or as [C, R]; float32."""
    M, C, R = _count(t, rows), t.shape[-1], g.shape[1]
    splits = max(1, min(SPLITS, triton.cdiv(M, SPLIT_ROWS)))
    shape = (splits, C, R) if transposed else (splits, R, C)
    out = torch.empty(shape, dtype=torch.float32, device=t.device)
    if out.numel() == 0 or M == 0:
        return out.zero_()[0]
    lines, inner, stride_o, stride_i = as_rows(t)
    stride_or, stride_oc = (1, R) if transposed else (C, 1)
    tiles = triton.cdiv(C, BLOCK_N) * triton.cdiv(R, 64 if R > 16 else 16)
    with on(t):
        _grad[(tiles * splits,)](
            lines, keep, rows, g, out, inner, stride_o, stride_i, lines.stride(-1), R * C, stride_or, stride_oc,
            factor, M, C, R, triton.cdiv(M, splits), t.shape[:-1].numel(),
            HAS_KEEP=keep is not None, HAS_ROWS=rows is not None,
            BM=32, BC=BLOCK_N, BR=64 if R > 16 else 16, num_stages=2,
        )  # fmt: skip
    return out.sum(0)
