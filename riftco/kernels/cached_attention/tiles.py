"""What the Triton kernels share: which run a tile belongs to, and how rows are read, dequantised where they must be.

A tile holds M rows of one run and one key head: row f is the query head f % G of the group at query row f // G, so one
read of a key tile serves the whole group.
"""

import triton
import triton.language as tl

from .._dot import INTERPRETED, dot

LOG2E = tl.constexpr(1.4426950408889634)
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
def cached_at(j, ok, table, PAGED: tl.constexpr):
    """(page, row in it) of cached positions j of a slot; ok None means all are there. `table` is (pointer to the slot's
    pages, rows of a page, pages). Without pages the slot is the page, already in the pointers."""
    if PAGED:
        if ok is None:
            page = tl.load(table[0] + j // table[1]).to(tl.int64)
        else:
            page = tl.load(table[0] + j // table[1], mask=ok, other=0).to(tl.int64)
        page = tl.minimum(tl.maximum(page, 0), table[2] - 1)
        row = j % table[1]
    else:
        page = tl.zeros_like(j).to(tl.int64)
        row = j
    return page, row


@triton.jit
def _load(ptr, ok, within, WHOLE: tl.constexpr):
    """0 where not ok (None: all are) or not within the columns (WHOLE: all are)."""
    if ok is None:
        if WHOLE:
            value = tl.load(ptr)
        else:
            value = tl.load(ptr, mask=within[None, :], other=0)
    elif WHOLE:
        value = tl.load(ptr, mask=ok[:, None], other=0)
    else:
        value = tl.load(ptr, mask=ok[:, None] & within[None, :], other=0)
    return value


@triton.jit
def fetch(of, page, row, ok, D: tl.constexpr, PAD: tl.constexpr, QUANTIZED: tl.constexpr):
    """Cached rows as they are stored, and the scales of their blocks; 0 where not ok. Codes come as words of four
    [len(row), PAD / 4]. `of` is (pointer to rows, page and row strides, pointer to scales, page and row strides)."""
    at = page * of[1] + row.to(tl.int64) * of[2]
    if QUANTIZED:
        col = tl.arange(0, PAD // 4)
        words = of[0].to(tl.pointer_type(tl.int32), bitcast=True) + (at // 4)[:, None]
        rows = _load(words + col[None, :], ok, col * 4 < D, D == PAD)
        block = tl.arange(0, PAD // 32)
        scale_at = page * of[4] + row.to(tl.int64) * of[5]
        scale = _load(of[3] + scale_at[:, None] + block[None, :], ok, block * 32 < D, D == PAD)
    else:
        col = tl.arange(0, PAD)
        rows = _load(of[0] + at[:, None] + col[None, :], ok, col < D, D == PAD)
        scale = 1.0
    return rows, scale


# A word of four codes -> their values in float16, times a scale. A byte with its sign bit flipped, under the high byte
# of 1024.0, is 1024 + 128 + its value: exact, and a quarter of the instructions that conversions one by one take.
FOUR_CODES = tl.constexpr("""{
    .reg .b32 bytes, magic, low, high, unit;
    xor.b32 bytes, $4, 0x80808080;
    mov.b32 magic, 0x64646464;
    prmt.b32 low, bytes, magic, 0x4140;
    prmt.b32 high, bytes, magic, 0x4342;
    mov.b32 magic, 0x64806480;
    sub.rn.f16x2 low, low, magic;
    sub.rn.f16x2 high, high, magic;
    mov.b32 unit, {$5, $5};
    mul.rn.f16x2 low, low, unit;
    mul.rn.f16x2 high, high, unit;
    mov.b32 {$0, $1}, low;
    mov.b32 {$2, $3}, high;
}""")

SAME = tl.constexpr("mov.b32 $0, $1;")


@triton.jit
def dequantize(rows, scale, dtype: tl.constexpr, PAD: tl.constexpr, QUANTIZED: tl.constexpr):
    """Fetched rows in `dtype` [N, PAD]; code times scale is rounded once."""
    N: tl.constexpr = rows.shape[0]
    if not QUANTIZED:
        value = rows.to(dtype)
    else:
        words = tl.reshape(rows, [N, PAD // 32, 8])
        if dtype == tl.float16 and not INTERPRETED:
            unit = tl.broadcast_to(scale[:, :, None], [N, PAD // 32, 8])
            kinds: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
            a, b, c, d = tl.inline_asm_elementwise(
                FOUR_CODES, "=h,=h,=h,=h,r,h", [words, unit], dtype=kinds, is_pure=True, pack=1
            )
        else:
            unit = scale.to(tl.float32)[:, :, None]
            a = (((words << 24) >> 24).to(tl.float32) * unit).to(dtype)
            b = (((words << 16) >> 24).to(tl.float32) * unit).to(dtype)
            c = (((words << 8) >> 24).to(tl.float32) * unit).to(dtype)
            d = ((words >> 24).to(tl.float32) * unit).to(dtype)
        value = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [N, PAD])
        if dtype == tl.float16 and not INTERPRETED:
            # opaque to the compiler, which would lay operands out for 8-bit values because it sees the joins
            value = tl.inline_asm_elementwise(SAME, "=r,r", [value], dtype=tl.float16, is_pure=False, pack=2)
    return value


@triton.jit
def quantize(x, SMALLEST: tl.constexpr):
    """float32 [heads, blocks, 32] -> (codes, scales) with GGUF's arithmetic, as write.py has it. Bit for bit only
    where a kernel is compiled without fused multiply-add."""
    scale = tl.div_rn(tl.max(tl.abs(x), 2), tl.full([x.shape[0], x.shape[1]], 127.0, tl.float32))
    usable = (scale >= SMALLEST) & (scale < float("inf"))
    inverse = tl.div_rn(tl.full([x.shape[0], x.shape[1]], 1.0, tl.float32), tl.where(usable, scale, 1.0))
    ratio = tl.where(usable[:, :, None], x * inverse[:, :, None], 0.0)
    size = tl.abs(ratio)
    whole = tl.floor(size)
    code = tl.minimum(whole + tl.floor((size - whole) * 2.0), 127.0)
    return tl.where(ratio < 0.0, -code, code).to(tl.int8), scale.to(tl.float16)


@triton.jit
def as_float16(q, scale):
    """bfloat16 query rows in float16, each brought into [1, 2) by a power of two, and the scale that undoes it."""
    q = q.to(tl.float32)
    top = tl.max(tl.abs(q), 1)
    exponent = top.to(tl.int32, bitcast=True) >> 23
    usable = (exponent > 0) & (exponent < 254)
    down = tl.where(usable, ((254 - exponent) << 23).to(tl.float32, bitcast=True), 1.0)
    up = tl.where(usable, (exponent << 23).to(tl.float32, bitcast=True), 1.0)
    return (q * down[:, None]).to(tl.float16), scale * up[:, None]


@triton.jit
def bent(s, scale, softcap, unit: tl.constexpr, CAPPED: tl.constexpr):
    """q k^T -> scores: times the scale, capped where asked, in units of 1 / unit."""
    if CAPPED:
        s = s * (scale / softcap)
        y = s * s  # tanh: near 0, where 1 - 2 / (exp(2 s) + 1) loses all digits, by its series
        series = s * (1.0 - y * (1.0 / 3.0 - y * (2.0 / 15.0 - y * (17.0 / 315.0))))
        s = (softcap * unit) * tl.where(y < 0.03, series, 1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E)) + 1.0))
    else:
        s = s * (scale * unit)
    return s


@triton.jit
def scores(q, k, scale, softcap, CAPPED: tl.constexpr):
    """scale q k^T, capped where asked; in units of log 2, but for float32, where the rounding that costs shows."""
    unit: tl.constexpr = 1.0 if q.dtype == tl.float32 else LOG2E
    return bent(dot(q, tl.trans(k)), scale, softcap, unit, CAPPED)


@triton.jit
def power(x, dtype: tl.constexpr):
    """exp of a difference of what `scores` makes of operands of `dtype`."""
    return tl.exp2(x * LOG2E) if dtype == tl.float32 else tl.exp2(x)


@triton.jit
def reach(first, prefix, start, left, t_low, t_high, Tq, Tk, N: tl.constexpr, WINDOW: tl.constexpr):
    """Keys that a tile of query rows t_low to t_high sees: of the prefix (from, the same rounded down to whole blocks,
    to), of the new keys (from, to)."""
    low = first * 0
    new_low = first * 0
    if WINDOW:
        low = tl.maximum(start + Tk - Tq + t_low - left, 0)
        new_low = tl.maximum(Tk - Tq + t_low - left, 0)
    high = tl.minimum(prefix, start + Tk - Tq + t_high + 1)
    return low, low // N * N, high, new_low, tl.minimum(Tk, Tk - Tq + t_high + 1)


@triton.jit
def _of_head(
    slot, kh, rows_ptr, scale_ptr, stride_page, stride_row, stride_head, stride_scale_page, stride_scale_row,
    stride_scale_head, PAGED: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """One head's cached rows, as `fetch` takes them; without pages, one slot's."""
    rows_ptr += kh.to(tl.int64) * stride_head
    if QUANTIZED:
        scale_ptr += kh.to(tl.int64) * stride_scale_head
    if not PAGED:
        rows_ptr += slot.to(tl.int64) * stride_page
        if QUANTIZED:
            scale_ptr += slot.to(tl.int64) * stride_scale_page
    if not QUANTIZED:
        scale_ptr = rows_ptr
    return rows_ptr, stride_page, stride_row, scale_ptr, stride_scale_page, stride_scale_row


@triton.jit
def cache_of(
    slot, kh, kc_ptr, vc_ptr, ks_ptr, vs_ptr, table_ptr, slots_ptr, page_size, n_pages, stride_kcp, stride_kcr,
    stride_kch, stride_vcp, stride_vcr, stride_vch, stride_ksp, stride_ksr, stride_ksh, stride_vsp, stride_vsr,
    stride_vsh, stride_table, PAGED: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """(keys, values, table) of a slot and a key head, as `fetch` and `cached_at` take them."""
    keys = _of_head(
        slot, kh, kc_ptr, ks_ptr, stride_kcp, stride_kcr, stride_kch, stride_ksp, stride_ksr, stride_ksh, PAGED,
        QUANTIZED,
    )  # fmt: skip
    values = _of_head(
        slot, kh, vc_ptr, vs_ptr, stride_vcp, stride_vcr, stride_vch, stride_vsp, stride_vsr, stride_vsh, PAGED,
        QUANTIZED,
    )  # fmt: skip
    if PAGED:
        table_ptr += slot.to(tl.int64) * stride_table
    else:
        table_ptr = slots_ptr  # not read
    return keys, values, (table_ptr, page_size, n_pages)
