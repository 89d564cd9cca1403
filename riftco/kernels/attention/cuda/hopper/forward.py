"""Forward attention on Hopper: persistent programs of one producer warp and consumer warpgroups of 64 query rows each.

The producer (tiles.py) streams Q, K and V by TMA across tile borders: the next tile's loads run under the epilogue of
the last. A consumer issues S of block j before P V of block j - 1, so that its softmax runs under its own products, and
the warpgroups take turns at the tensor cores. Blocks of keys are walked from the last that the tile sees to the first;
masks are applied in the first block and in those that cross a border of the mask.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...._launch import cdiv, on
from ...spec import softmax_scale
from . import schedule
from .descriptors import as_packed, describe, store, width
from .softmax import LOW, ROWS, operand, packed, row_sums, softmax
from .tiles import FIELDS, RING, blocks, get, produce
from .variant import TILES, Tiles, Variant, group

LOG2E = 1.4426950408889634
_LOG2E, LN2 = gl.constexpr(LOG2E), gl.constexpr(1 / LOG2E)
FAR = 1 << 30  # a window that ends nowhere


@gluon.jit
def _scores(c, wg: gl.constexpr, shared, V: gl.constexpr):
    """Issues S of step c once its K is there and it is this warpgroup's turn."""
    BN: gl.constexpr = V.value.tiles.BN
    STAGES: gl.constexpr = V.value.tiles.STAGES
    q_smem, k_smem, _, _, _, _, _, k_bars, _, turn = shared
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    zero = gl.zeros([ROWS, BN], gl.float32, layout)
    st = c % STAGES
    mbarrier.wait(k_bars.index(st), (c // STAGES) & 1)
    if V.value.tiles.TURNS:
        mbarrier.wait(turn.index(wg), c & 1)
    at = wg
    if V.value.D > 128:  # c >> 30 is 0, which the compiler cannot see: the 16 addresses of Q would stay in registers
        at = wg + (c >> 30)
    q = q_smem.index(at).reshape((ROWS, V.value.D))
    k = k_smem.index(st).reshape((BN, V.value.D))
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _add_values(c, p, o, shared, V: gl.constexpr):
    """Issues O += P V of step c once its V is there."""
    BN: gl.constexpr = V.value.tiles.BN
    STAGES: gl.constexpr = V.value.tiles.STAGES
    q_smem, _, v_smem, _, _, _, _, _, v_bars, _ = shared
    layout: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    st = c % STAGES
    mbarrier.wait(v_bars.index(st), (c // STAGES) & 1)
    v = v_smem.index(st).reshape((BN, V.value.D))
    return warpgroup_mma(operand(p, q_smem.dtype, layout, BN), v, o, is_async=True)


@gluon.jit
def _pass_on(wg: gl.constexpr, turn, V: gl.constexpr):
    mbarrier.arrive(turn.index((wg + 1) % V.value.tiles.WG), count=1)


@gluon.jit
def _steps(first, last, c, state, wg: gl.constexpr, shared, keys, scale, cap, MASK: gl.constexpr, V: gl.constexpr):
    """Blocks first down to last, steps c..: S of a block, then O += P V of the one before; softmax under the second."""
    BN: gl.constexpr = V.value.tiles.BN
    STAGES: gl.constexpr = V.value.tiles.STAGES
    q_smem, _, _, _, _, _, _, k_bars, v_bars, turn = shared
    low, high = keys
    o, p, m, l = state
    for j in range(first, last - 1, -1):
        s_token = _scores(c, wg, shared, V)
        o_token = _add_values(c - 1, p, o, shared, V)
        s = warpgroup_mma_wait(1, deps=[s_token])
        if V.value.tiles.TURNS:
            _pass_on(wg, turn, V)
        mbarrier.arrive(k_bars.index(STAGES + c % STAGES), count=1)
        e, m, alpha = softmax(s, m, scale, cap, low, high, j * BN, MASK, V)
        o = warpgroup_mma_wait(0, deps=[o_token])
        mbarrier.arrive(v_bars.index(STAGES + (c - 1) % STAGES), count=1)
        sums = row_sums(e, BN)
        l = l * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)[:, None] + sums
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None]
        p = packed(e, q_smem.dtype, BN)
        c += 1
    return c, (o, p, m, l)


@gluon.jit
def _consume(wg: gl.constexpr, o_desc, shared, pointers, sizes, scale, cap, V: gl.constexpr):
    """One warpgroup's rows of every tile of the program."""
    BN: gl.constexpr = V.value.tiles.BN
    D: gl.constexpr = V.value.D
    STAGES: gl.constexpr = V.value.tiles.STAGES
    WG: gl.constexpr = V.value.tiles.WG
    q_smem, _k_smem, _v_smem, o_smem, ring, ring_bars, q_bars, k_bars, v_bars, turn = shared
    lse_ptr, sinks_ptr = pointers
    H, T, left, right = sizes
    dt: gl.constexpr = q_smem.dtype
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]))
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    c = 0
    tiles = 0
    mbarrier.wait(ring_bars.index(0), 0)
    kind = get(ring, 0, 0)
    while kind > 0:
        at = tiles % RING
        m0 = get(ring, at, 1)
        head = get(ring, at, 2)
        at_q = get(ring, at, 3)
        len_q = get(ring, at, 4)
        len_k = get(ring, at, 5)
        mbarrier.arrive(ring_bars.index(RING + at), count=1)
        lo, a, b, hi = blocks(m0, len_q, len_k, left, right, V)
        row = m0 + wg * ROWS + gl.arange(0, ROWS, row_layout)
        low = gl.full([ROWS], 0, gl.int32, row_layout)
        high = gl.full([ROWS], len_k, gl.int32, row_layout)
        if V.value.LEFT:
            low = row + (len_k - len_q - left)
        if V.value.RIGHT:
            high = gl.minimum(high, row + (len_k - len_q + right + 1))
        keys = (low, high)

        mbarrier.wait(q_bars.index(wg), tiles & 1)
        s_token = _scores(c, wg, shared, V)
        s = warpgroup_mma_wait(0, deps=[s_token])
        if V.value.tiles.TURNS:
            _pass_on(wg, turn, V)
        mbarrier.arrive(k_bars.index(STAGES + c % STAGES), count=1)
        m = gl.full([ROWS], LOW, gl.float32, row_layout)
        e, m, _alpha = softmax(s, m, scale, cap, low, high, (hi - 1) * BN, True, V)
        state = (gl.zeros([ROWS, D], gl.float32, o_layout), packed(e, dt, BN), m, row_sums(e, BN))
        c += 1
        c, state = _steps(hi - 2, b, c, state, wg, shared, keys, scale, cap, True, V)
        c, state = _steps(gl.minimum(b, hi - 1) - 1, a, c, state, wg, shared, keys, scale, cap, False, V)
        if V.value.LEFT:
            c, state = _steps(gl.minimum(a, hi - 1) - 1, lo, c, state, wg, shared, keys, scale, cap, True, V)
        o, p, m, l = state
        if V.value.tiles.STAGED:
            mbarrier.arrive(q_bars.index(WG + wg), count=1)

        o_token = _add_values(c - 1, p, o, shared, V)
        total = gl.convert_layout(gl.sum(l, axis=1), row_layout)
        if not V.value.CAP:
            m = m * scale
        if V.value.SINKS:
            sink = gl.load(sinks_ptr + head).to(gl.float32) * _LOG2E
            top = gl.maximum(m, sink)
            down = gl.exp2(m - top)
            total = total * down + gl.exp2(sink - top)
            m = top
        some = total > 0.0
        lse = (m + gl.log2(total)) * LN2
        inverse = gl.where(some, 1.0 / total, 0.0)
        if V.value.SINKS:
            inverse = inverse * down
            some = some & (kind == 2)
        if V.value.PACKED:
            start = head.to(gl.int64) * T + at_q
        else:
            start = (at_q.to(gl.int64) * H + head) * T
        # not "is 0": a NaN total is a NaN result
        gl.store(lse_ptr + start + row, gl.where(some | (total != total), lse, float("-inf")), mask=row < len_q)
        o = warpgroup_mma_wait(0, deps=[o_token])
        mbarrier.arrive(v_bars.index(STAGES + (c - 1) % STAGES), count=1)
        o = o * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
        out = o_smem.index(wg)
        if V.value.tiles.STAGED:
            tma.store_wait(pendings=0)
        out.reshape((ROWS, D)).store(o.to(dt))
        fence_async_shared()
        store(o_desc, out, head, at_q, len_q, m0 + wg * ROWS)
        if not V.value.tiles.STAGED:
            tma.store_wait(pendings=0)
            mbarrier.arrive(q_bars.index(WG + wg), count=1)

        tiles += 1
        mbarrier.wait(ring_bars.index(tiles % RING), (tiles // RING) & 1)
        kind = get(ring, tiles % RING, 0)
    tma.store_wait(pendings=0)


@gluon.jit
def _barriers(full: gl.constexpr, empty: gl.constexpr, readers: gl.constexpr):
    """`full` barriers that one arrival completes, then `empty` ones that all `readers` must arrive at."""
    bars = gl.allocate_shared_memory(gl.int64, [full + empty, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(full):
        mbarrier.init(bars.index(i), count=1)
    for i in gl.static_range(empty):
        mbarrier.init(bars.index(full + i), count=readers)
    return bars


NUMBERS = ("slots", "heads", "group", "H", "G", "T", "S", "docs", "k_step", "v_step", "left", "right")


@gluon.jit(do_not_specialize=NUMBERS)  # one kernel for all sizes
def attention_forward(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, sinks_ptr, table_ptr, k_lens_ptr, counter_ptr, slots, heads, group, H, G,
    T, S, docs, k_step, v_step, left, right, scale, cap, V: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = q_desc.dtype
    WG: gl.constexpr = V.value.tiles.WG
    STAGES: gl.constexpr = V.value.tiles.STAGES
    REGISTERS: gl.constexpr = V.value.tiles.REGISTERS
    q_smem = gl.allocate_shared_memory(dt, [WG] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(dt, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(dt, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    if V.value.tiles.STAGED:
        o_smem = gl.allocate_shared_memory(dt, [WG] + o_desc.block_type.shape, o_desc.layout)
    else:
        o_smem = q_smem
    ring = gl.allocate_shared_memory(gl.int32, [RING * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring_bars = _barriers(RING, RING, WG)
    q_bars = _barriers(WG, WG, 1)
    k_bars = _barriers(STAGES, STAGES, WG)
    v_bars = _barriers(STAGES, STAGES, WG)
    turn = _barriers(WG, 0, 1)
    fence_async_shared()
    if V.value.tiles.TURNS:
        mbarrier.arrive(turn.index(0), count=1)

    shared = (q_smem, k_smem, v_smem, o_smem, ring, ring_bars, q_bars, k_bars, v_bars, turn)
    to_write = (lse_ptr, sinks_ptr)
    to_read = (table_ptr, k_lens_ptr, counter_ptr)
    sizes = (slots, heads, group, H, G, T, S, docs, k_step, v_step, left, right)
    outer = (H, T, left, right)
    if WG == 2:
        gl.warp_specialize(
            [
                (_consume, (0, o_desc, shared, to_write, outer, scale, cap, V)),
                (_consume, (1, o_desc, shared, to_write, outer, scale, cap, V)),
                (produce, (q_desc, k_desc, v_desc, shared, to_read, sizes, V)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, o_desc, shared, to_write, outer, scale, cap, V)),
                (_consume, (1, o_desc, shared, to_write, outer, scale, cap, V)),
                (_consume, (2, o_desc, shared, to_write, outer, scale, cap, V)),
                (produce, (q_desc, k_desc, v_desc, shared, to_read, sizes, V)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


@functools.cache
def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None,
    right: int | None, softcap: float, dropout_p: float, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out like q, and lse [B, H, T] or [H, total] float32, for calls of route "hopper": neither bias nor dropout."""
    (T, H, D), (S, K) = q.shape[-3:], k.shape[-3:-1]
    B = q.shape[0] if cu_q is None else 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, T) if cu_q is None else (H, T), dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, lse
    if k.numel() == 0:  # a descriptor needs a row, which the mask hides
        k = v = q.new_zeros(*k.shape[:-3], 1, K, D)
    tiles = tiles or TILES[width(D)]
    variant = Variant(
        width(D), tiles, LEFT=left is not None, RIGHT=right is not None, PACKED=cu_q is not None,
        K_LENS=k_lens is not None, SINKS=sinks is not None, CAP=softcap > 0,
    )  # fmt: skip
    factor, cap = softmax_scale(q, scale) * LOG2E, 0.0
    if softcap > 0:
        factor, cap = 2 * factor / softcap, softcap * LOG2E
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    table, docs, slots = counter, 0, cdiv(T, tiles.BM)
    if cu_q is not None:
        table = schedule.table(cu_q, cu_q if cu_k is None else cu_k, T, S, tiles.BM, right is not None)
        docs, slots = cu_q.shape[0] - 1, table.shape[0]
    k_step, v_step = 0, 0
    if k_lens is not None:
        (k, k_step), (v, v_step) = as_packed(k), as_packed(v)
    together = group(B * H, H // K, S // max(docs, 1), D, right is not None)
    left, right = (FAR if w is None else min(w, FAR) for w in (left, right))
    with on(q):
        attention_forward[(min(slots * B * H, _programs(q.device)),)](
            describe(q, ROWS.value), describe(k, tiles.BN), describe(v, tiles.BN), describe(out, ROWS.value), lse,
            lse if sinks is None else sinks, table, counter if k_lens is None else k_lens, counter, slots, B * H,
            together, H, H // K, T, S, docs, k_step, v_step, left, right, factor, cap, variant, num_warps=4,
        )  # fmt: skip
    return out, lse
