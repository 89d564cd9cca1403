"""What the Triton kernels share: which run a tile belongs to, and how rows are read, dequantised where they must be.

A tile holds M rows of one run and one key head: row f is the query head f % G of the group at query row f // G, so one
read of a key tile serves the whole group.
"""

import triton
import triton.language as tl

from .._dot import dot

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
RUNS = tl.constexpr(128)  # runs looked at together when a tile finds its own


@triton.jit
def _bounds(cu_ptr, run, n, total, each):
    """First row of run `run`; run n is what no run owns, up to `total`."""
    if cu_ptr is None:
        at = run * each
    else:
        at = tl.load(cu_ptr + run, mask=run <= n, other=total).to(tl.int32)
    return tl.minimum(tl.maximum(at, 0), total)


@triton.jit
def find_run(tile, cu_ptr, n, total, each, G, M: tl.constexpr):
    """(run, first of its rows x G in the tile) of tile number `tile`. Run n + 1 means no tile has that number."""
    if cu_ptr is None:
        tiles = tl.cdiv(each * G, M)
        run = tile // tiles
        first = tile - run * tiles
    else:
        done = tile * 0
        run = tile * 0
        passed = tile * 0
        for block in range(0, n + 1, RUNS):
            r = block + tl.arange(0, RUNS)
            rows = _bounds(cu_ptr, r + 1, n, total, each) - _bounds(cu_ptr, r, n, total, each)
            tiles = tl.cdiv(tl.maximum(tl.where(r <= n, rows, 0), 0) * G, M)
            last = done + tl.cumsum(tiles, 0)
            before = (last <= tile) & (r <= n)
            run += tl.sum(before.to(tl.int32), 0)
            passed = tl.maximum(passed, tl.max(tl.where(before, last, 0), 0))
            done += tl.sum(tiles, 0)
        first = tile - passed
    return run, first * M


@triton.jit
def place(run, slots_ptr, positions_ptr, cu_q_ptr, cu_k_ptr, n, n_slots, total, total_k, each, each_k, capacity):
    """(live, slot, position of the first new key, prefix length, first query row, query rows, first key, keys)."""
    there = run < n
    slot = tl.load(slots_ptr + run, mask=there, other=-1).to(tl.int32)
    live = (slot >= 0) & (slot < n_slots)
    start = tl.load(positions_ptr + run, mask=there, other=0).to(tl.int32)
    q0 = _bounds(cu_q_ptr, run, n, total, each)
    q1 = _bounds(cu_q_ptr, run + 1, n, total, each)
    k0 = _bounds(cu_k_ptr, run, n, total_k, each_k)
    k1 = _bounds(cu_k_ptr, run + 1, n, total_k, each_k)
    prefix = tl.minimum(tl.maximum(start, 0), capacity)
    return live, tl.where(live, slot, 0), start, prefix, q0, tl.maximum(q1 - q0, 0), k0, tl.maximum(k1 - k0, 0)


@triton.jit
def load_rows(ptr, row, stride_row, stride_col, ok, D: tl.constexpr, PAD: tl.constexpr):
    """[len(row), PAD]: rows at `row` (a number for each), 0 where not ok and in the padding."""
    col = tl.arange(0, PAD)
    at = ptr + row.to(tl.int64)[:, None] * stride_row + col[None, :] * stride_col
    mask = ok[:, None] if D == PAD else ok[:, None] & (col < D)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def load_heads(ptr, t, g, stride_row, stride_head, stride_col, ok, D: tl.constexpr, PAD: tl.constexpr):
    """[M, PAD]: row t, head g of the group."""
    col = tl.arange(0, PAD)
    at = t.to(tl.int64) * stride_row + g.to(tl.int64) * stride_head
    mask = ok[:, None] if D == PAD else ok[:, None] & (col < D)[None, :]
    return tl.load(ptr + at[:, None] + col[None, :] * stride_col, mask=mask, other=0.0)


@triton.jit
def store_heads(ptr, row, ok, value, D: tl.constexpr, PAD: tl.constexpr):
    """Rows of a contiguous [.., D] tensor."""
    col = tl.arange(0, PAD)
    at = ptr + row.to(tl.int64)[:, None] * D + col[None, :]
    mask = ok[:, None] if D == PAD else ok[:, None] & (col < D)[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def cached_at(j, ok, table_ptr, page_size, n_pages, PAGED: tl.constexpr):
    """(page, row in it) of cached positions j of a slot; without pages the slot is the page, already in the pointer."""
    if PAGED:
        page = tl.load(table_ptr + j // page_size, mask=ok, other=0).to(tl.int64)
        page = tl.minimum(tl.maximum(page, 0), n_pages - 1)
        row = j % page_size
    else:
        page = tl.zeros_like(j).to(tl.int64)
        row = j
    return page, row


@triton.jit
def load_cached(
    ptr, scale_ptr, page, row, ok, stride_page, stride_row, stride_scale_page, stride_scale_row,
    dtype: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """[len(row), PAD] in `dtype`; 0 where not ok. Codes are multiplied by their scale in float32 and rounded once."""
    N: tl.constexpr = row.shape[0]
    at = page * stride_page + row.to(tl.int64) * stride_row
    if QUANTIZED:
        block = tl.arange(0, PAD // 32)
        inner = tl.arange(0, 32)
        mask = ok[:, None] if D == PAD else ok[:, None] & (block * 32 < D)[None, :]
        codes = tl.load(
            ptr + at[:, None, None] + (block * 32)[None, :, None] + inner[None, None, :], mask=mask[:, :, None], other=0
        )
        scale_at = page * stride_scale_page + row.to(tl.int64) * stride_scale_row
        scale = tl.load(scale_ptr + scale_at[:, None] + block[None, :], mask=mask, other=0.0)
        value = codes.to(tl.float32) * scale.to(tl.float32)[:, :, None]
        rows = tl.reshape(value.to(dtype), [N, PAD])
    else:
        col = tl.arange(0, PAD)
        mask = ok[:, None] if D == PAD else ok[:, None] & (col < D)[None, :]
        rows = tl.load(ptr + at[:, None] + col[None, :], mask=mask, other=0.0).to(dtype)
    return rows


@triton.jit
def scores(q, k, scale, softcap, CAPPED: tl.constexpr):
    """scale q k^T in units of log 2, capped where asked."""
    s = dot(q, tl.trans(k))
    if CAPPED:
        s = s * (scale / softcap)
        s = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E)) + 1.0))  # tanh
    else:
        s = s * (scale * LOG2E)
    return s


@triton.jit
def reach(first, prefix, start, left, t_low, t_high, Tq, Tk, N: tl.constexpr, WINDOW: tl.constexpr):
    """Keys that a tile of query rows t_low to t_high sees: (from, to) of the prefix, (from, to) of the new keys."""
    low = first * 0
    new_low = first * 0
    if WINDOW:
        low = tl.maximum(start + Tk - Tq + t_low - left, 0)
        new_low = tl.maximum(Tk - Tq + t_low - left, 0)
    high = tl.minimum(prefix, start + Tk - Tq + t_high + 1)
    return low // N * N, high, new_low, tl.minimum(Tk, Tk - Tq + t_high + 1)
