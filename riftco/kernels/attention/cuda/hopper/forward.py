"""Forward attention on Hopper: persistent programs of one producer warp and consumer warpgroups of 64 query rows each.

The producer takes tiles from a counter in device memory, hands each one's coordinates to the consumers through a small
ring in shared memory, and streams Q, K and V by TMA across tile borders: the next tile's loads run under the epilogue of
the last. A consumer issues S of block j before P V of block j - 1, so that its softmax runs under its own products, and
the warpgroups take turns at the tensor cores (TURNS). Blocks of keys are walked from the last that the tile sees to the
first; masks are applied in the blocks that cross a border of the mask only.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
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

from ...._launch import on
from ...spec import softmax_scale
from . import schedule
from .descriptors import TYPES, describe, load_expected, store, width

LOG2E = 1.4426950408889634
LN2 = gl.constexpr(0.6931471805599453)
LOW = gl.constexpr(-1.0e30)  # a maximum before any key: finite, so that differences with it are not NaN
NONE = 1 << 30  # an unlimited window
ROWS = gl.constexpr(64)  # query rows of a warpgroup: the M of wgmma
FIELDS = gl.constexpr(8)  # int32 of a tile in the ring
RING = gl.constexpr(2)


class Config(NamedTuple):
    """BN keys a block, STAGES of K and V each, WG consumer warpgroups with REGISTERS a thread."""

    BN: int
    STAGES: int
    WG: int
    REGISTERS: int
    TURNS: int  # hand the tensor cores over 1: once S is done, 2: once both products are issued, 0: never
    STAGED: bool  # O leaves through a buffer of its own, so that the next Q is loaded meanwhile
    GROUP: int  # heads whose tiles are worked on together


CONFIGS = {
    64: Config(128, 2, 3, 160, 1, True, 8),
    128: Config(128, 2, 2, 240, 2, True, 8),
    256: Config(64, 2, 2, 240, 2, False, 8),
}


# ---------------------------------------------------------------------------------------------- tiles and their blocks
@gluon.jit
def _uniform(x):
    """x, equal in all threads, through lane 0 of each warp: the compiler may then keep it in uniform registers."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _take(counter_ptr):
    """counter++ by one lane of the calling warp; all get the old value."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first atom.global.add.u32 $0, [$1], 1;
        shfl.sync.idx.b32 $0, $0, 0, 0x1f, 0xffffffff;
        }""",
        "=r,l", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _blocks(m0, len_q, len_k, left, right, BM: gl.constexpr, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """(lo, a, b, hi): the rows m0.. of a tile see keys in the blocks lo..hi-1, and all of them in a..b-1.

    At least one block: a tile without keys gets the one past the end, which is loaded as zeros and masked.
    """
    shift = len_k - len_q
    last = gl.minimum(m0 + BM, len_q) - 1
    end, full = len_k, len_k
    if RIGHT:
        end = gl.minimum(len_k, last + shift + right + 1)
        full = gl.minimum(len_k, m0 + shift + right + 1)
    start = 0
    own = 0
    if LEFT:
        start = gl.maximum(0, m0 + shift - left)
        own = gl.maximum(0, last + shift - left)
    if end > start:
        lo = start // BN
        hi = (end + BN - 1) // BN
    else:
        lo = (len_k + BN - 1) // BN
        hi = lo + 1
    b = gl.maximum(gl.minimum(gl.maximum(full, 0) // BN, hi), lo)
    a = gl.maximum(gl.minimum((own + BN - 1) // BN, b), lo)
    return lo, a, b, hi


@gluon.jit
def _put(ring, slot, field: gl.constexpr, value):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ring.index(slot * FIELDS + field).store(gl.full([1], value, gl.int32, L))


@gluon.jit
def _get(ring, slot, field: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return _uniform(gl.max(ring.index(slot * FIELDS + field).load(L), axis=0))


# ------------------------------------------------------------------------------------------------------------ producer
@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, shared, pointers, sizes, GROUP: gl.constexpr, WG: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr, K_LENS: gl.constexpr,
):  # fmt: skip
    (
        q_smem, k_smem, v_smem, o_smem, ring, q_full, q_empty, k_full, k_empty, v_full, v_empty, ring_full, ring_empty,
        turn,
    ) = shared  # fmt: skip
    table_ptr, k_lens_ptr, counter_ptr = pointers
    slots, heads, H, G, T, S, docs, k_step, v_step, left, right = sizes
    BM: gl.constexpr = WG * ROWS
    number = gl.program_id(0)
    tiles = 0
    c = 0
    while number < slots * heads:
        following = gl.num_programs(0) + _take(counter_ptr)
        slot, head = schedule.place(number, slots, heads, GROUP)
        if PACKED:
            doc, tile, at_q, len_q, at_k, len_k = schedule.entry(table_ptr, slot)
            at_v = at_k
            inside = (doc < docs).to(gl.int32)
            if doc >= docs:
                len_k = 0
        else:
            doc = head // H  # the batch index
            head = head % H
            tile = slots - 1 - slot if RIGHT else slot
            at_q, len_q, at_k, at_v, len_k = doc, T, doc, doc, S
            inside = 1
            if K_LENS:
                at_k = doc * k_step
                at_v = doc * v_step
                len_k = gl.minimum(gl.maximum(gl.load(k_lens_ptr + doc).to(gl.int32), 0), S)
        if doc >= 0:
            m0 = tile * BM
            s = tiles % RING
            mbarrier.wait(ring_empty.index(s), ((tiles // RING) & 1) ^ 1)
            _put(ring, s, 0, 1 + inside)
            _put(ring, s, 1, m0)
            _put(ring, s, 2, head)
            _put(ring, s, 3, at_q)
            _put(ring, s, 4, len_q)
            _put(ring, s, 5, len_k)
            mbarrier.arrive(ring_full.index(s), count=1)
            lo, _, _, hi = _blocks(m0, len_q, len_k, left, right, BM, BN, LEFT, RIGHT)
            kv = head // G
            for j in range(hi - 1, lo - 1, -1):
                st = c % STAGES
                ph = ((c // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(st), ph)
                load_expected(k_desc, k_smem.index(st), k_full.index(st), kv, at_k, len_k, j * BN)
                if j == hi - 1:
                    for w in gl.static_range(WG):
                        mbarrier.wait(q_empty.index(w), (tiles & 1) ^ 1)
                        load_expected(q_desc, q_smem.index(w), q_full.index(w), head, at_q, len_q, m0 + w * ROWS)
                mbarrier.wait(v_empty.index(st), ph)
                load_expected(v_desc, v_smem.index(st), v_full.index(st), kv, at_v, len_k, j * BN)
                c += 1
            tiles += 1
        number = following
    s = tiles % RING
    mbarrier.wait(ring_empty.index(s), ((tiles // RING) & 1) ^ 1)
    _put(ring, s, 0, 0)
    mbarrier.arrive(ring_full.index(s), count=1)


# ----------------------------------------------------------------------------------------------------------- consumers
@gluon.jit
def _row_sums(p, BN: gl.constexpr):
    """Sums over the registers of one thread only: [ROWS, BN] -> [ROWS, 4]; the 4 lanes of a row are added at the end."""
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, BN // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def _packed(e, dt: gl.constexpr, BN: gl.constexpr):
    """P as 16-bit pairs in int32 [ROWS, BN / 2]: halves carried over a loop's back edge one by one cost a move each."""
    first, second = gl.split(gl.reshape(e, [ROWS, BN // 2, 2]))
    asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dt == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _operand(pairs, dt: gl.constexpr, layout: gl.constexpr, BN: gl.constexpr):
    """The pairs as the left operand of P V: no instruction at all."""
    first = pairs.to(gl.int16).to(dt, bitcast=True)
    second = (pairs >> 16).to(gl.int16).to(dt, bitcast=True)
    p = gl.reshape(gl.join(first, second), [ROWS, BN])
    return gl.convert_layout(p, layout, assert_trivial=True)


@gluon.jit
def _capped(x, cap):
    """cap * tanh(x) as cap - 2 cap / (1 + exp(2 x)), to float32's accuracy; x comes times 2 log2(e)."""
    r = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + gl.exp2(x)], dtype=gl.float32, is_pure=True, pack=1
    )
    return cap - 2.0 * cap * r


@gluon.jit
def _softmax(s, m, scale, cap, low, high, col0, MASK: gl.constexpr, LEFT: gl.constexpr, CAP: gl.constexpr, BN: gl.constexpr):
    """P of a block, not divided by its sum; the new row maxima; and the factor for what was summed before."""
    if CAP:
        s = _capped(s * scale, cap)
    if MASK:
        cols = gl.arange(0, BN, gl.SliceLayout(0, s.type.layout))
        seen = cols[None, :] < (high - col0)[:, None]
        if LEFT:
            seen = seen & (cols[None, :] >= (low - col0)[:, None])
        s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, axis=1))
    if CAP:
        p = gl.exp2(s - m_new[:, None])
        alpha = gl.exp2(m - m_new)
    else:
        scaled = m_new * scale
        p = gl.exp2(s * scale - scaled[:, None])
        alpha = gl.exp2(m * scale - scaled)
    return p, m_new, alpha


@gluon.jit
def _steps(
    j0, j1, c, o, p, m, l, wg: gl.constexpr, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn, low, high, scale,
    cap, BN: gl.constexpr, STAGES: gl.constexpr, WG: gl.constexpr, TURNS: gl.constexpr, MASK: gl.constexpr,
    LEFT: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """Blocks j0 down to j1 + 1, steps c..: S of block j, then O += P V of the block before; softmax under the second."""
    D: gl.constexpr = v_smem.shape[v_smem.rank - 1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    zero = gl.zeros([ROWS, BN], gl.float32, s_layout)
    for j in range(j0, j1, -1):
        st = c % STAGES
        before = (c - 1) % STAGES
        mbarrier.wait(k_full.index(st), (c // STAGES) & 1)
        if TURNS > 0:
            mbarrier.wait(turn.index(wg), c & 1)
        s_token = warpgroup_mma(
            q, k_smem.index(st).reshape((BN, D)).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), ((c - 1) // STAGES) & 1)
        operand = _operand(p, q.dtype, gl.DotOperandLayout(0, o_layout, 2), BN)
        o_token = warpgroup_mma(operand, v_smem.index(before).reshape((BN, D)), o, is_async=True)
        if TURNS == 2:
            mbarrier.arrive(turn.index((wg + 1) % WG), count=1)
        s = warpgroup_mma_wait(1, deps=[s_token])
        if TURNS == 1:
            mbarrier.arrive(turn.index((wg + 1) % WG), count=1)
        mbarrier.arrive(k_empty.index(st), count=1)
        e, m, alpha = _softmax(s, m, scale, cap, low, high, j * BN, MASK, LEFT, CAP, BN)
        o = warpgroup_mma_wait(0, deps=[o_token])
        mbarrier.arrive(v_empty.index(before), count=1)
        sums = _row_sums(e, BN)
        l = l * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)[:, None] + sums
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
        p = _packed(e, q.dtype, BN)
        c += 1
    return c, o, p, m, l


@gluon.jit
def _consume(
    wg: gl.constexpr, o_desc, shared, values, WG: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr, STAGED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr,
    SINKS: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    (
        q_smem, k_smem, v_smem, o_smem, ring, q_full, q_empty, k_full, k_empty, v_full, v_empty, ring_full, ring_empty,
        turn,
    ) = shared  # fmt: skip
    lse_ptr, sinks_ptr, H, T, left, right, scale, cap = values
    BM: gl.constexpr = WG * ROWS
    dt: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([ROWS, BN], gl.float32, s_layout)
    q = q_smem.index(wg).reshape((ROWS, D))
    out = o_smem.index(wg)
    c = 0
    tiles = 0
    mbarrier.wait(ring_full.index(0), 0)
    kind = _get(ring, 0, 0)
    while kind > 0:
        at = tiles % RING
        m0 = _get(ring, at, 1)
        head = _get(ring, at, 2)
        at_q = _get(ring, at, 3)
        len_q = _get(ring, at, 4)
        len_k = _get(ring, at, 5)
        mbarrier.arrive(ring_empty.index(at), count=1)
        lo, a, b, hi = _blocks(m0, len_q, len_k, left, right, BM, BN, LEFT, RIGHT)
        row = m0 + wg * ROWS + gl.arange(0, ROWS, row_layout)
        high = gl.full([ROWS], len_k, gl.int32, row_layout)
        low = gl.full([ROWS], 0, gl.int32, row_layout)
        if RIGHT:
            high = gl.minimum(high, row + (len_k - len_q + right + 1))
        if LEFT:
            low = row + (len_k - len_q - left)

        st = c % STAGES
        mbarrier.wait(q_full.index(wg), tiles & 1)
        mbarrier.wait(k_full.index(st), (c // STAGES) & 1)
        if TURNS > 0:
            mbarrier.wait(turn.index(wg), c & 1)
        s_token = warpgroup_mma(
            q, k_smem.index(st).reshape((BN, D)).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[s_token])
        if TURNS > 0:
            mbarrier.arrive(turn.index((wg + 1) % WG), count=1)
        mbarrier.arrive(k_empty.index(st), count=1)
        m = gl.full([ROWS], LOW, gl.float32, row_layout)
        e, m, _ = _softmax(s, m, scale, cap, low, high, (hi - 1) * BN, True, LEFT, CAP, BN)
        l = _row_sums(e, BN)
        p = _packed(e, dt, BN)
        o = gl.zeros([ROWS, D], gl.float32, o_layout)
        c += 1

        c, o, p, m, l = _steps(
            hi - 2, b - 1, c, o, p, m, l, wg, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn, low, high,
            scale, cap, BN, STAGES, WG, TURNS, True, LEFT, CAP,
        )  # fmt: skip
        c, o, p, m, l = _steps(
            gl.minimum(b, hi - 1) - 1, a - 1, c, o, p, m, l, wg, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
            turn, low, high, scale, cap, BN, STAGES, WG, TURNS, False, LEFT, CAP,
        )  # fmt: skip
        if LEFT:
            c, o, p, m, l = _steps(
                gl.minimum(a, hi - 1) - 1, lo - 1, c, o, p, m, l, wg, q, k_smem, v_smem, k_full, k_empty, v_full,
                v_empty, turn, low, high, scale, cap, BN, STAGES, WG, TURNS, True, LEFT, CAP,
            )  # fmt: skip
        if STAGED:
            mbarrier.arrive(q_empty.index(wg), count=1)

        st = (c - 1) % STAGES
        mbarrier.wait(v_full.index(st), ((c - 1) // STAGES) & 1)
        operand = _operand(p, dt, gl.DotOperandLayout(0, o_layout, 2), BN)
        o_token = warpgroup_mma(operand, v_smem.index(st).reshape((BN, D)), o, is_async=True)
        total = gl.convert_layout(gl.sum(l, axis=1), row_layout)
        m = m if CAP else m * scale
        if SINKS:
            sink = gl.load(sinks_ptr + head).to(gl.float32) * 1.4426950408889634
            top = gl.maximum(m, sink)
            down = gl.exp2(m - top)
            total = total * down + gl.exp2(sink - top)
            m = top
        some = total > 0.0
        lse = (m + gl.log2(total)) * LN2
        inverse = gl.where(some, 1.0 / total, 0.0)
        if SINKS:
            inverse = inverse * down
            some = some & (kind == 2)
        lse = gl.where(some, lse, float("-inf"))
        if PACKED:
            start = head.to(gl.int64) * T + at_q
        else:
            start = (at_q.to(gl.int64) * H + head) * T
        gl.store(lse_ptr + start + row, lse, mask=row < len_q)
        o = warpgroup_mma_wait(0, deps=[o_token])
        mbarrier.arrive(v_empty.index(st), count=1)
        o = o * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
        if STAGED:
            tma.store_wait(pendings=0)
        out.reshape((ROWS, D)).store(o.to(dt))
        fence_async_shared()
        store(o_desc, out, head, at_q, len_q, m0 + wg * ROWS)
        if not STAGED:
            tma.store_wait(pendings=0)
            mbarrier.arrive(q_empty.index(wg), count=1)

        tiles += 1
        at = tiles % RING
        mbarrier.wait(ring_full.index(at), (tiles // RING) & 1)
        kind = _get(ring, at, 0)
    tma.store_wait(pendings=0)


# -------------------------------------------------------------------------------------------------------------- kernel
@gluon.jit
def attention_forward(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, sinks_ptr, table_ptr, k_lens_ptr, counter_ptr, slots, heads, H, G, T, S,
    docs, k_step, v_step, left, right, scale, cap, BN: gl.constexpr, STAGES: gl.constexpr, WG: gl.constexpr,
    REGISTERS: gl.constexpr, TURNS: gl.constexpr, STAGED: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, PACKED: gl.constexpr, K_LENS: gl.constexpr, SINKS: gl.constexpr, CAP: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[len(q_desc.block_type.shape) - 1]
    q_smem = gl.allocate_shared_memory(dt, [WG] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(dt, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(dt, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    if STAGED:
        o_smem = gl.allocate_shared_memory(dt, [WG] + o_desc.block_type.shape, o_desc.layout)
    else:
        o_smem = q_smem
    ring_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(gl.int32, [RING * FIELDS, 1], ring_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [WG, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [WG, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    ring_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [WG, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=WG)
        mbarrier.init(v_empty.index(i), count=WG)
    for i in gl.static_range(WG):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(RING):
        mbarrier.init(ring_full.index(i), count=1)
        mbarrier.init(ring_empty.index(i), count=WG)
    fence_async_shared()
    if TURNS > 0:
        mbarrier.arrive(turn.index(0), count=1)

    shared = (
        q_smem, k_smem, v_smem, o_smem, ring, q_full, q_empty, k_full, k_empty, v_full, v_empty, ring_full, ring_empty,
        turn,
    )  # fmt: skip
    sizes = (slots, heads, H, G, T, S, docs, k_step, v_step, left, right)
    values = (lse_ptr, sinks_ptr, H, T, left, right, scale, cap)
    pointers = (table_ptr, k_lens_ptr, counter_ptr)
    if WG == 2:
        gl.warp_specialize(
            [
                (_consume, (0, o_desc, shared, values, WG, BN, D, STAGES, TURNS, STAGED, LEFT, RIGHT, PACKED, SINKS, CAP)),
                (_consume, (1, o_desc, shared, values, WG, BN, D, STAGES, TURNS, STAGED, LEFT, RIGHT, PACKED, SINKS, CAP)),
                (_produce, (q_desc, k_desc, v_desc, shared, pointers, sizes, GROUP, WG, BN, STAGES, LEFT, RIGHT, PACKED, K_LENS)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, o_desc, shared, values, WG, BN, D, STAGES, TURNS, STAGED, LEFT, RIGHT, PACKED, SINKS, CAP)),
                (_consume, (1, o_desc, shared, values, WG, BN, D, STAGES, TURNS, STAGED, LEFT, RIGHT, PACKED, SINKS, CAP)),
                (_consume, (2, o_desc, shared, values, WG, BN, D, STAGES, TURNS, STAGED, LEFT, RIGHT, PACKED, SINKS, CAP)),
                (_produce, (q_desc, k_desc, v_desc, shared, pointers, sizes, GROUP, WG, BN, STAGES, LEFT, RIGHT, PACKED, K_LENS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


@functools.cache
def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    sinks: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out like q and lse [B, H, T] or [H, total] float32; see spec.py. Needs descriptors.why_not() == "" for q, k, v."""
    D, H, K = q.shape[-1], q.shape[-2], k.shape[-2]
    T, S = q.shape[-3], k.shape[-3]
    B = 1 if cu_q is not None else q.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((H, T) if cu_q is not None else (B, H, T), dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, lse
    if k.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks.float()[:, None].expand_as(lse))
    config = config or CONFIGS[width(D)]
    BM = config.WG * ROWS.value
    factor = softmax_scale(q, scale)
    factor, cap = (2 * LOG2E * factor / softcap, softcap * LOG2E) if softcap else (factor * LOG2E, 0.0)
    table = None
    if cu_q is not None:
        cu_k = cu_q if cu_k is None else cu_k
        table = schedule.table(cu_q, cu_k, T, S, BM, right is not None)
        slots, docs = table.shape[0], cu_q.shape[0] - 1
    else:
        slots, docs = triton.cdiv(T, BM), 0
    k_step, v_step = 0, 0
    k_rows, v_rows = k, v
    if k_lens is not None:
        k_rows, k_step = _joined(k)
        v_rows, v_step = _joined(v)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    programs = min(slots * B * H, _programs(q.device))
    with on(q):
        attention_forward[(programs,)](
            describe(q, ROWS.value), describe(k_rows, config.BN), describe(v_rows, config.BN),
            describe(out, ROWS.value), lse, lse if sinks is None else sinks, counter if table is None else table,
            counter if k_lens is None else k_lens, counter, slots, B * H, H, H // K, T, S, docs, k_step,
            v_step, NONE if left is None else min(left, NONE), NONE if right is None else min(right, NONE), factor, cap,
            *config[:6], config.GROUP, left is not None, right is not None, cu_q is not None, k_lens is not None,
            sinks is not None, softcap > 0, num_warps=4,
        )  # fmt: skip
    return out, lse


def _joined(t: Tensor) -> tuple[Tensor, int]:
    """[B, S, K, D] as packed rows, and how many of them one batch index steps over."""
    B, S, K, D = t.shape
    step = 0 if B == 1 else t.stride(0) // t.stride(1)
    return t.as_strided(((B - 1) * step + S, K, D), t.stride()[1:]), step
