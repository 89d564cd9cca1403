"""The adapters' Triton kernels, over tuples of members. M rows, C features, R ranks; sums in float32.

A bfloat16 operand beside a float32 one is not widened: the float32 one is taken apart into two bfloat16 terms, which
hold it to 2^-17, so that tensor cores make products far finer than the bfloat16 operand is.
"""

import triton
import triton.language as tl

from .._dot import dot
from ..attention.cuda.scores import kept


@triton.jit
def halves(t):
    """float32 t as bfloat16 terms high + low, to 2^-17; inf is in the first alone. The first is rounded as an integer:
    conversions of single numbers are slow. The largest NaN becomes a zero there, and stays NaN in the second."""
    high = ((t.to(tl.int32, bitcast=True) + 0x8000) & -65536).to(tl.float32, bitcast=True)
    rest = tl.where(tl.abs(high) == float("inf"), 0.0, t - high)
    return high.to(tl.bfloat16), rest.to(tl.bfloat16)


@triton.jit
def add_product(acc, a, b):
    """acc + a b in float32: of bfloat16 and float32 to 2^-17, of two 16-bit operands as they are, of others in
    float32."""
    if a.dtype == tl.bfloat16 and b.dtype == tl.float32:
        high, low = halves(b)
        acc = acc + dot(a, low)
        acc = acc + dot(a, high)
    elif a.dtype == b.dtype:
        acc = acc + dot(a, b)
    else:
        acc = acc + dot(a.to(tl.float32), b.to(tl.float32))
    return acc


@triton.jit
def product_for(a, b, out_dtype: tl.constexpr):
    """a b for a 16-bit result: of two float32 operands without the terms below 2^-16."""
    if out_dtype == tl.float32 or a.dtype != tl.float32:
        out = dot(a, b)
    else:
        a_high, a_low = halves(a)
        b_high, b_low = halves(b)
        out = dot(a_low, b_high) + dot(a_high, b_low) + dot(a_high, b_high)
    return out


@triton.jit
def narrow(h, dtype: tl.constexpr):
    """h beside an adapter of `dtype`: rounded to it where it is a 16-bit one."""
    return h if dtype == tl.float32 else h.to(dtype)


@triton.jit
def place(rows_ptr, m, M, lines, HAS_ROWS: tl.constexpr):
    """The flattened row of position m. A row that is not there is taken for the nearest that is: no foreign memory."""
    if HAS_ROWS:
        return tl.minimum(tl.maximum(tl.load(rows_ptr + m, mask=m < M, other=0), 0), lines - 1)
    return m


@triton.jit
def start_of(row, where, SPLIT: tl.constexpr):
    """Where a row begins. Two strides cost two 64-bit divisions a row, which one launch in a thousand needs."""
    return (row // where[0]) * where[1] + (row % where[0]) * where[2] if SPLIT else row * where[2]


@triton.jit
def side_by_side(ws, strides, ranks, r, c, C):
    """w[r, c] of weights whose ranks stand side by side; r and c broadcast to the tile, which is 0 outside."""
    first = 0
    w = tl.zeros((r + c).shape, ws[0].dtype.element_ty)
    for i in tl.static_range(len(ws)):
        own = (r >= first) & (r < first + ranks[i]) & (c < C)
        w += tl.load(ws[i] + (r - first) * strides[i][0] + c * strides[i][1], mask=own, other=0.0)
        first += ranks[i]
    return w


@triton.jit
def _down_tile(
    in_ptr, seed_ptr, rows_ptr, ws, strides, ranks, out_ptr, where, limit, factor, tile_m, r0, start, M, C, R_out,
    lines, width, SPLIT: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_ROWS: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out[m, r] = factor * sum over the features from `start` of masked(in)[m, c] w[r, c], for BR ranks from r0 on of
    each of the weights, which stand side by side in `out`."""
    m = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    row = place(rows_ptr, m, M, lines, HAS_ROWS)
    r = r0 + tl.arange(0, BR)
    line_ptr = in_ptr + start_of(row, where, SPLIT)
    accs = ()
    for _ in tl.static_range(len(ws)):
        accs = accs + (tl.zeros([BM, BR], tl.float32),)  # type: ignore[assignment]
    for at in range(start, tl.minimum(start + width, C), BC):
        c = at + tl.arange(0, BC).to(tl.int64)
        live = (m < M)[:, None] & (c < C)[None, :]
        h = tl.load(line_ptr[:, None] + c[None, :] * where[3], mask=live, other=0.0)
        if HAS_KEEP:
            h = tl.where(kept(seed_ptr, limit, tile_m * 0, row.to(tl.int32), at, BC), h, tl.zeros_like(h))
        h = narrow(h, ws[0].dtype.element_ty)
        sums = ()
        for i in tl.static_range(len(ws)):
            own = (r < ranks[i])[None, :] & (c < C)[:, None]
            w = tl.load(ws[i] + r[None, :] * strides[i][0] + c[:, None] * strides[i][1], mask=own, other=0.0)
            sums = sums + (add_product(accs[i], h, w),)  # type: ignore[assignment]
        accs = sums
    for i in tl.static_range(len(ws)):
        at_out = out_ptr + m[:, None] * R_out + r[None, :]
        tl.store(at_out, accs[i] * factor, mask=(m < M)[:, None] & (r < ranks[i])[None, :])
        out_ptr += ranks[i]


@triton.jit
def down(
    in_ptr, seed_ptr, rows_ptr, ws, strides, ranks, out_ptr, where, limit, factor, M, C, R, tiles_r, lines, splits,
    width,
    SPLIT: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_ROWS: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """x A^T of all members: out [splits, M, R]."""
    r0 = tl.program_id(0) % tiles_r * BR
    split = tl.program_id(0) // tiles_r % splits
    tile_m = tl.program_id(0) // tiles_r // splits
    _down_tile(
        in_ptr, seed_ptr, rows_ptr, ws, strides, ranks, out_ptr + split.to(tl.int64) * M * R, where, limit, factor,
        tile_m, r0, split * width, M, C, R, lines, width, SPLIT, HAS_KEEP, HAS_ROWS, BM, BC, BR,
    )  # fmt: skip


@triton.jit
def down_each(
    ins, rows_ptr, ws, strides, ranks, out_ptr, wheres, factors, M, widths, R, tiles_r, lines, splits, width,
    SPLIT: tl.constexpr, HAS_ROWS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """factor * d_y B of each member, side by side: out [splits, M, R]."""
    member = tl.program_id(0) % len(ins)
    rest = tl.program_id(0) // len(ins)
    r0 = rest % tiles_r * BR
    split = rest // tiles_r % splits
    tile_m = rest // tiles_r // splits
    first = 0
    for i in tl.static_range(len(ins)):
        if member == i:
            _down_tile(
                ins[i], None, rows_ptr, (ws[i],), (strides[i],), (ranks[i],),
                out_ptr + split.to(tl.int64) * M * R + first, wheres[i], 0, factors[i], tile_m, r0, split * width, M,
                widths[i], R, lines, width, SPLIT, False, HAS_ROWS, BM, BC, BR,
            )  # fmt: skip
        first += ranks[i]


@triton.jit
def _up_strip(
    parts, seed_ptr, rows_ptr, xa_ptr, ws, strides, ranks, limit, factor, tile_m, n0, M, N, R, R_in, lines,
    HAS_KEEP: tl.constexpr, HAS_ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """parts[0][row, N] = sum of the parts + factor * masked(xa [M, R] w[R, N]) for TILES tiles from column n0 on; rows
    of N numbers, contiguous. The next tile of the first part is on its way while one is made."""
    m = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    out_dtype = parts[0].dtype.element_ty
    row = place(rows_ptr, m, M, lines, HAS_ROWS)
    n = n0.to(tl.int64) + tl.arange(0, BN)
    stop = tl.minimum(N, n0 + TILES * BN)
    ahead = tl.load(parts[0] + row[:, None] * N + n[None, :], mask=(m < M)[:, None] & (n < stop)[None, :], other=0.0)
    for j in range(TILES):
        held = ahead
        live = (m < M)[:, None] & (n < stop)[None, :]
        at = row[:, None] * N + n[None, :]
        later = n + BN
        then = (m < M)[:, None] & (later < stop)[None, :]
        ahead = tl.load(parts[0] + row[:, None] * N + later[None, :], mask=then, other=0.0)
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, R, BR):
            r = start + tl.arange(0, BR)
            xa = tl.load(xa_ptr + m[:, None] * R_in + r[None, :], mask=(m < M)[:, None] & (r < R)[None, :], other=0.0)
            acc += product_for(xa, side_by_side(ws, strides, ranks, r[:, None], n[None, :], N), out_dtype)
        acc *= factor
        if HAS_KEEP:
            acc = tl.where(kept(seed_ptr, limit, tile_m * 0, row.to(tl.int32), n0 + j * BN, BN), acc, 0.0)
        total = held.to(tl.float32)
        for i in tl.static_range(1, len(parts)):
            total += tl.load(parts[i] + at, mask=live, other=0.0).to(tl.float32)
        tl.store(parts[0] + at, total + acc, mask=live)
        n = later


@triton.jit
def up(
    parts, seed_ptr, rows_ptr, g_ptr, ws, strides, ranks, limit, factor, M, C, R, lines,
    HAS_KEEP: tl.constexpr, HAS_ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """d_x: the members' parts and what comes through their adapters, added up once."""
    tiles_m = tl.cdiv(M, BM)
    tile_m = tl.program_id(0) % tiles_m
    n0 = tl.program_id(0) // tiles_m * (BN * TILES)
    _up_strip(
        parts, seed_ptr, rows_ptr, g_ptr, ws, strides, ranks, limit, factor, tile_m, n0, M, C, R, R, lines, HAS_KEEP,
        HAS_ROWS, BM, BN, BR, TILES,
    )  # fmt: skip


@triton.jit
def up_each(
    ys, rows_ptr, xa_ptr, ws, strides, ranks, factors, M, widths, R, lines,
    HAS_ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """y += factor * (x A^T) B^T of each member."""
    tiles_m = tl.cdiv(M, BM)
    tile_m = tl.program_id(0) % tiles_m
    strip = tl.program_id(0) // tiles_m
    before, first = 0, 0
    for i in tl.static_range(len(ys)):
        count = tl.cdiv(widths[i], BN * TILES)
        if (strip >= before) & (strip < before + count):
            _up_strip(
                (ys[i],), None, rows_ptr, xa_ptr + first, (ws[i],), (strides[i],), (ranks[i],), 0, factors[i], tile_m,
                (strip - before) * (BN * TILES), M, widths[i], ranks[i], R, lines, False, HAS_ROWS, BM, BN, BR, TILES,
            )  # fmt: skip
        before += count
        first += ranks[i]


@triton.jit
def _grad_tile(
    in_ptr, seed_ptr, rows_ptr, g_ptr, out_ptr, where, stride_r, stride_c, limit, factor, tile_c, tile_r, s, M, C, R,
    R_in, rows_each, lines, SPLIT: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_ROWS: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out[r, c] = factor * sum over the s-th range of rows of g[m, r] masked(in)[m, c]."""
    c0 = tile_c * BC
    c = c0 + tl.arange(0, BC).to(tl.int64)
    r = tile_r.to(tl.int64) * BR + tl.arange(0, BR)
    stop = tl.minimum((s + 1) * rows_each, M)
    acc = tl.zeros([BC, BR], tl.float32)
    for start in range(0, rows_each, BM):
        m = s * rows_each + start + tl.arange(0, BM)
        row = place(rows_ptr, m, stop, lines, HAS_ROWS)
        live = (m < stop)[:, None] & (c < C)[None, :]
        line_ptr = in_ptr + start_of(row, where, SPLIT)
        h = tl.load(line_ptr[:, None] + c[None, :] * where[3], mask=live, other=0.0)
        if HAS_KEEP:
            h = tl.where(kept(seed_ptr, limit, tile_c * 0, row.to(tl.int32), c0, BC), h, tl.zeros_like(h))
        g = tl.load(g_ptr + m[:, None] * R_in + r[None, :], mask=(m < stop)[:, None] & (r < R)[None, :], other=0.0)
        acc = add_product(acc, tl.trans(narrow(h, g.dtype)), g)
    tl.store(
        out_ptr + r[None, :] * stride_r + c[:, None] * stride_c, acc * factor, mask=(r < R)[None, :] & (c < C)[:, None]
    )


@triton.jit
def grads(
    ins, seed_ptr, rows_ptr, partners, columns, out_ptr, wheres, places, strides, limit, factors, M, widths, ranks, R,
    total, rows_each, splits, lines, SPLIT: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_ROWS: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BR_B: tl.constexpr,
):  # fmt: skip
    """All gradients of A and B, out [splits, total]; dropout's mask is for the first product, that of x."""
    s = (tl.program_id(0) % splits).to(tl.int64)
    tile = tl.program_id(0) // splits
    before = 0
    for i in tl.static_range(len(ins)):
        tiles_c = tl.cdiv(widths[i], BC)
        count = tiles_c * tl.cdiv(ranks[i], BR if i == 0 else BR_B)
        if (tile >= before) & (tile < before + count):
            _grad_tile(
                ins[i], seed_ptr, rows_ptr, partners[i] + columns[i], out_ptr + s * total + places[i], wheres[i],
                strides[i][0], strides[i][1], limit, factors[i], (tile - before) % tiles_c, (tile - before) // tiles_c,
                s, M, widths[i], ranks[i], R, rows_each, lines, SPLIT, HAS_KEEP and i == 0, HAS_ROWS, BM, BC,
                BR if i == 0 else BR_B,
            )  # fmt: skip
        before += count
