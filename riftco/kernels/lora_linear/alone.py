"""Triton kernels that write what comes through the adapters alone, for base products to be added into it.

Nothing of the output's size is read. A program holds its columns of A or B, taken apart once, and walks down the rows.
"""

import triton
import triton.language as tl

from .._dot import dot
from ..attention.cuda.scores import kept
from .kernels import halves, product_for


@triton.jit
def _columns(w_ptr, stride, rank, r, n, N):
    """w[r, n], 0 outside."""
    inside = (r < rank)[:, None] & (n < N)[None, :]
    return tl.load(w_ptr + r[:, None] * stride[0] + n[None, :] * stride[1], mask=inside, other=0.0)


@triton.jit
def _strip(
    out_ptr, bias_ptr, seed_ptr, xa_ptr, ws, strides, ranks, limit, factor, tile_m, n0, M, N, R, tiles,
    HAS_KEEP: tl.constexpr, HELD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out[m, n] = bias[n] + factor * masked(xa w) for `tiles` tiles of rows, which are contiguous. Side by side in xa,
    R numbers a row, are the ranks of each of the weights. HELD: none has more than BR."""
    kind: tl.constexpr = out_ptr.dtype.element_ty
    TERMS: tl.constexpr = HELD and kind != tl.float32 and xa_ptr.dtype.element_ty == tl.float32
    n = n0.to(tl.int64) + tl.arange(0, BN)
    r = tl.arange(0, BR)
    held = ()
    for i in tl.static_range(len(ws)):
        if HELD:
            w = _columns(ws[i], strides[i], ranks[i], r, n, N)
            held = held + ((halves(w * factor) if TERMS else (w,)),)  # type: ignore[assignment]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(kind).to(tl.float32)
    for j in range(tiles):
        m = (tile_m * tiles + j).to(tl.int64) * BM + tl.arange(0, BM)
        acc = tl.zeros([BM, BN], tl.float32)
        first = 0
        for i in tl.static_range(len(ws)):
            for start in range(0, BR if HELD else ranks[i], BR):
                at = start + r
                live = (m < M)[:, None] & (at < ranks[i])[None, :]
                xa = tl.load(xa_ptr + m[:, None] * R + (first + at)[None, :], mask=live, other=0.0)
                if TERMS:
                    high, low = halves(xa)
                    acc += dot(low, held[i][0])
                    acc += dot(high, held[i][1])
                    acc += dot(high, held[i][0])
                elif HELD:
                    acc += dot(xa, held[i][0])
                else:
                    acc += product_for(xa, _columns(ws[i], strides[i], ranks[i], at, n, N), kind)
            first += ranks[i]
        if not TERMS:
            acc *= factor
        if HAS_KEEP:
            acc = tl.where(kept(seed_ptr, limit, tile_m * 0, m.to(tl.int32), n0, BN), acc, 0.0)
        if bias_ptr is not None:
            acc += bias[None, :]
        tl.store(out_ptr + m[:, None] * N + n[None, :], acc.to(kind), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def up_alone(
    out_ptr, seed_ptr, g_ptr, ws, strides, ranks, limit, factor, M, C, R, tiles,
    HAS_KEEP: tl.constexpr, HELD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """dropout'(g A) of all members."""
    strips = tl.cdiv(C, BN)
    _strip(
        out_ptr, None, seed_ptr, g_ptr, ws, strides, ranks, limit, factor, tl.program_id(0) // strips,
        tl.program_id(0) % strips * BN, M, C, R, tiles, HAS_KEEP, HELD, BM, BN, BR,
    )  # fmt: skip


@triton.jit
def up_each_alone(
    ys, biases, xa_ptr, ws, strides, ranks, factors, M, widths, R, strips, tiles,
    HELD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """y = bias + factor * (x A^T) B^T of each member; programs side by side write the same rows."""
    tile_m = tl.program_id(0) // strips
    strip = tl.program_id(0) % strips
    before, first = 0, 0
    for i in tl.static_range(len(ys)):
        count = tl.cdiv(widths[i], BN)
        if (strip >= before) & (strip < before + count):
            _strip(
                ys[i], biases[i], None, xa_ptr + first, (ws[i],), (strides[i],), (ranks[i],), 0, factors[i], tile_m,
                (strip - before) * BN, M, widths[i], R, tiles, False, HELD, BM, BN, BR,
            )  # fmt: skip
        before += count
        first += ranks[i]
