"""dQ of the Hopper backward in a pass of its own: a CTA owns 128 query rows of one head, 64 a warpgroup.

S and dP are made again, 7 products in all instead of 5: at head dim 256 a fused kernel would send 64 KiB of float32
reduce-adds of dQ to L2 for every 64 x 64 tile, more than L2 takes. And dQ is bit-equal between runs. Any width.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_wide_kv import INF, LOG2E, S_LAYOUT, TILE, no_pairs, operand, pairs, power, scores, tile_of
from .descriptors import load, load_expected, store
from .schedule import entry, place

INTS = ("tiles", "docs", "B", "T", "S", "H", "K", "k_step", "v_step", "left", "right", "group")


@gluon.jit
def _key_tiles(m0, rows: gl.constexpr, q_len, k_len, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """The rows m0 .. m0 + rows - 1 see keys in the tiles lo .. hi - 1."""
    pos = m0 + k_len - q_len
    end = k_len
    lo = m0 >> 30
    if RIGHT:
        end = gl.minimum(k_len, gl.maximum(pos + rows + right, 0))
    hi = gl.cdiv(end, TILE)
    if LEFT:
        lo = gl.minimum(gl.maximum(pos - left, 0) // TILE, hi)
    return lo, hi


@gluon.jit
def _pass_by(n, t, k_full, k_empty, v_full, v_empty):
    """Let n tiles go that only the other warpgroup needs."""
    for _ in range(n):
        mbarrier.wait(k_full.index(t % 2), (t // 2) & 1)
        mbarrier.arrive(k_empty.index(t % 2), count=1)
        mbarrier.wait(v_full, t & 1)
        mbarrier.arrive(v_empty, count=1)
        t += 1
    return t


@gluon.jit
def _rows(
    wg: gl.constexpr, q_smem, do_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, dq_desc, lse_ptr,
    delta_ptr, exponent, head, at_q, q_len, k_len, m0, lo, hi, row0, left, right, scale, scale2, cap,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = q_smem.dtype
    WIDTH: gl.constexpr = q_smem.shape[-1]
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    first = m0 + wg * TILE
    my_lo, my_hi = _key_tiles(first, TILE, q_len, k_len, left, right, LEFT, RIGHT)
    if first >= q_len:
        my_lo = my_hi
    row = first + gl.arange(0, TILE, gl.SliceLayout(1, S_LAYOUT))
    lse = gl.load(lse_ptr + row0 + row, mask=row < q_len, other=INF)
    lse = gl.where(lse == -INF, INF, lse * LOG2E)
    delta = gl.load(delta_ptr + row0 + row, mask=row < q_len, other=0.0)
    if SCALED:
        up = power(exponent)
        scale /= up
    dq = gl.zeros([TILE, WIDTH], gl.float32, d_layout)
    a = no_pairs()
    zero = gl.zeros([TILE, TILE], gl.float32, S_LAYOUT)
    mbarrier.wait(q_full, 0)
    t0 = _pass_by(hi - my_hi, my_hi * 0, k_full, k_empty, v_full, v_empty)
    t = t0
    if my_lo < my_hi:
        mbarrier.wait(k_full.index(t % 2), (t // 2) & 1)
    pos = first + k_len - q_len
    for i in range(my_lo, my_hi):
        n0 = (my_hi - 1 - (i - my_lo)) * TILE
        st = t % 2
        last = gl.maximum(t - 1, t0)  # the first trip adds 0 times its own tile
        q = tile_of(q_smem, wg + (t >> 30))  # opaque: descriptors must not stay in registers
        do = tile_of(do_smem, wg + (t >> 30))
        dq_token = warpgroup_mma(operand(a, dt, a_layout), tile_of(k_smem, last % 2), dq, is_async=True)
        mbarrier.wait(k_full.index(st), (t // 2) & 1)
        s_token = warpgroup_mma(q, tile_of(k_smem, st).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full, t & 1)
        dp_token = warpgroup_mma(do, tile_of(v_smem, t >> 30).permute((1, 0)), zero, use_acc=False, is_async=True)
        dq, s = warpgroup_mma_wait(1, deps=[dq_token, s_token])
        mbarrier.arrive(k_empty.index(last % 2), count=1, pred=t > t0)
        s, slope = scores(s, scale2, cap, SOFTCAP)
        p = gl.exp2(s - lse[:, None])
        crosses = n0 + TILE > k_len
        if RIGHT:
            crosses = crosses | (n0 + TILE - 1 > pos + right)
        if LEFT:
            crosses = crosses | (n0 < pos + TILE - 1 - left)
        if crosses:
            key = n0 + gl.arange(0, TILE, gl.SliceLayout(0, S_LAYOUT))
            end = k_len - 1 + row * 0
            if RIGHT:
                end = gl.minimum(end, row + (k_len - q_len + right))
            p = gl.where(key[None, :] <= end[:, None], p, 0.0)
            if LEFT:
                p = gl.where(key[None, :] >= (row + (k_len - q_len - left))[:, None], p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp_token])
        mbarrier.arrive(v_empty, count=1)
        ds = p * slope * (dp - delta[:, None])
        if SCALED:
            ds *= up
        a = pairs(ds, dt)
        t += 1
    if my_lo < my_hi:
        dq = warpgroup_mma(operand(a, dt, a_layout), tile_of(k_smem, (t - 1) % 2), dq)
        mbarrier.arrive(k_empty.index((t - 1) % 2), count=1)
    _pass_by(my_lo - lo, t, k_full, k_empty, v_full, v_empty)
    out = q_smem.index(wg)  # only this warpgroup reads these rows of Q: dQ leaves through their buffer
    out.reshape([TILE, WIDTH]).store((dq * scale).to(dt))
    fence_async_shared()
    store(dq_desc, out, head, at_q, q_len, first)
    tma.store_wait(pendings=0)


@gluon.jit
def _producer(k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, kv_head, at_k, at_v, k_len, lo, hi):
    t = hi * 0
    for i in range(lo, hi):
        n0 = (hi - 1 - (i - lo)) * TILE
        st = t % 2
        mbarrier.wait(k_empty.index(st), ((t // 2) & 1) ^ 1)
        load_expected(k_desc, k_smem.index(st), k_full.index(st), kv_head, at_k, k_len, n0)
        mbarrier.wait(v_empty, (t & 1) ^ 1)
        load_expected(v_desc, v_smem.index(0), v_full, kv_head, at_v, k_len, n0)
        t += 1


@gluon.jit(do_not_specialize=INTS)
def dq_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, lse_ptr, delta_ptr, exponents, k_lens_ptr, table_ptr,
    tiles, docs, B, T, S, H, K, k_step, v_step, left, right, scale, scale2, cap, group,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, SCALED: gl.constexpr, LENS: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = q_desc.dtype
    one: gl.constexpr = [1] + k_desc.block_type.shape
    two: gl.constexpr = [2] + q_desc.block_type.shape
    two_k: gl.constexpr = [2] + k_desc.block_type.shape
    if PACKED:
        slot, head = place(gl.program_id(0), tiles, H, group)
        seq, tile, at_q, q_len, at_k, k_len = entry(table_ptr, slot)
        if seq < 0:
            return
        at_v = at_k
        row0 = head.to(gl.int64) * T + at_q
    else:
        tile, h = place(gl.program_id(0), tiles, B * H, group)
        seq = h // H
        head = h % H
        if RIGHT:
            tile = tiles - 1 - tile  # the last rows see the most keys
        at_q = seq
        at_k = seq
        at_v = seq
        q_len = T
        k_len = S
        if LENS:
            k_len = gl.minimum(gl.maximum(gl.load(k_lens_ptr + seq).to(gl.int32), 0), S)
            at_k = seq * k_step
            at_v = seq * v_step
        row0 = h.to(gl.int64) * T
    m0 = tile * 2 * TILE
    kv_head = head // (H // K)
    lo, hi = _key_tiles(m0, 2 * TILE, q_len, k_len, left, right, LEFT, RIGHT)
    exponent = exponents
    if SCALED:
        exponent = exponents + gl.minimum(seq, docs - 1) * H + head

    q_smem = gl.allocate_shared_memory(dt, two, q_desc.layout)
    do_smem = gl.allocate_shared_memory(dt, two, do_desc.layout)
    k_smem = gl.allocate_shared_memory(dt, two_k, k_desc.layout)
    v_smem = gl.allocate_shared_memory(dt, one, v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=2)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    fence_async_shared()
    mbarrier.expect(q_full, 4 * q_desc.block_type.nbytes)
    for i in gl.static_range(2):
        load(q_desc, q_smem.index(i), q_full, head, at_q, q_len, m0 + i * TILE)
        load(do_desc, do_smem.index(i), q_full, head, at_q, q_len, m0 + i * TILE)
    gl.warp_specialize([
        (_rows, (
            0, q_smem, do_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, dq_desc, lse_ptr, delta_ptr,
            exponent, head, at_q, q_len, k_len, m0, lo, hi, row0, left, right, scale, scale2, cap, LEFT, RIGHT,
            SOFTCAP, SCALED)),
        (_rows, (
            1, q_smem, do_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, dq_desc, lse_ptr, delta_ptr,
            exponent, head, at_q, q_len, k_len, m0, lo, hi, row0, left, right, scale, scale2, cap, LEFT, RIGHT,
            SOFTCAP, SCALED)),
        (_producer, (
            k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, kv_head, at_k, at_v, k_len, lo, hi)),
    ], [4, 1], [240, 24])  # fmt: skip
