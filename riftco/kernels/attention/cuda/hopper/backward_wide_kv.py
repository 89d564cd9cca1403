"""dK and dV of the Hopper backward for head dims above 128: a CTA owns 64 keys of one key head.

dK and dV [64, 256] in float32 fill 128 registers a thread of one warpgroup each, so the warpgroups share the work by
role. One makes S = K Q^T, P = exp(S - lse) and dV += P dO, the other dP = V dO^T, dS = P (dP - delta) and dK += dS Q.
P crosses once, in 16 bits, through shared memory; P and dS enter their products from registers. All query heads of the
key head are walked, so dK and dV need no atomics.
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

from .descriptors import load_expected, store
from .schedule import entry, place

LOG2E = gl.constexpr(1.4426950408889634)
INF = gl.constexpr(float("inf"))
LIFT = gl.constexpr(15.0)  # P crosses as float16 times 2^15: 11 bits of it down to 2^-29
DROP = gl.constexpr(2.0**-15)
TILE = gl.constexpr(64)
WIDTH = gl.constexpr(256)
HALF = gl.constexpr(128)
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
D_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
A_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]), 2))
INTS = ("tiles", "docs", "B", "T", "S", "H", "K", "k_step", "v_step", "kv_grad_start", "left", "right", "group")
H_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def tile_of(ring, slot):
    """The matrix [64, width] in a slot of a ring of TMA boxes."""
    return ring.index(slot).reshape([TILE, ring.shape[-1]])


@gluon.jit
def _product(half, left, right, zero, HELD: gl.constexpr):
    """left @ right^T [64, 64]. HELD: as two products, the first with half of left in registers, because wgmma of this
    shape with both sides in shared memory takes all of its bandwidth."""
    if not HELD:
        return warpgroup_mma(left, right.permute((1, 0)), zero, use_acc=False, is_async=True)
    token = warpgroup_mma(half, right.slice(0, HALF, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
    rest = left.slice(HALF, HALF, 1)
    return warpgroup_mma(rest, right.slice(HALF, HALF, 1).permute((1, 0)), token, is_async=True)


@gluon.jit
def scores(qk, scale, cap, SOFTCAP: gl.constexpr):
    """(scores in base 2, their derivative by scale * qk) of products qk; `scale` is in base 2 without a soft cap."""
    if SOFTCAP:
        t = 1.0 - 2.0 / (gl.exp2(qk * (2.0 * LOG2E * scale / cap)) + 1.0)
        s = t * (cap * LOG2E)
        slope = 1.0 - t * t
    else:
        s = qk * scale
        slope = 1.0
    return s, slope


@gluon.jit
def pairs(x, dt: gl.constexpr):
    """[64, 64] float32 rounded to 16 bits, as int32 [64, 32] of two columns each: 16-bit values carried over a loop's
    back edge one by one would cost moves."""
    first, second = gl.split(gl.reshape(x, [TILE, TILE // 2, 2]))
    asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dt == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def operand(p, dt: gl.constexpr, layout: gl.constexpr):
    """Pairs as a left operand of wgmma in registers: no instruction at all."""
    first = p.to(gl.int16).to(dt, bitcast=True)
    second = (p >> 16).to(gl.int16).to(dt, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(first, second), [TILE, TILE]), layout, assert_trivial=True)


@gluon.jit
def no_pairs():
    return pairs(gl.zeros([TILE, TILE], gl.float32, S_LAYOUT), gl.float16)


@gluon.jit
def _by_thread(p):
    """Pairs [64, 32] as [2048] in which 4 of a thread lie together and neighbours follow: 16-byte accesses to shared
    memory without bank conflicts, and no value changes its thread."""
    y = gl.reshape(p, [4, 2, 8, 4, 2, 4])
    return gl.reshape(gl.permute(y, [3, 0, 2, 5, 4, 1]), [2048])


@gluon.jit
def _halves(p):
    """The inverse of _by_thread and of pairs, in float32 again."""
    y = gl.reshape(p, [4, 4, 8, 4, 2, 2])
    y = gl.reshape(gl.permute(y, [1, 5, 2, 0, 4, 3]), [TILE, TILE // 2])
    first, second = gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }", "=r,=r,r", [y],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.convert_layout(gl.reshape(gl.join(first, second), [TILE, TILE]), S_LAYOUT, assert_trivial=True)


@gluon.jit
def _cut(p, n0, first, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Zero where key n0 + i is not seen from position first + j."""
    key = n0 + gl.arange(0, TILE, gl.SliceLayout(1, S_LAYOUT))
    pos = first + gl.arange(0, TILE, gl.SliceLayout(0, S_LAYOUT))
    if RIGHT:
        p = gl.where(key[:, None] <= pos[None, :] + right, p, 0.0)
    if LEFT:
        p = gl.where(key[:, None] >= pos[None, :] - left, p, 0.0)
    return p


@gluon.jit
def power(exponent):
    """2 to the power found at a pointer, exactly."""
    return ((gl.load(exponent) + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _finish(acc, a, dt: gl.constexpr, ring, full, t, factor, rows, out, LENS: gl.constexpr):
    """The last product, the factor, zeros in the rows that do not exist; out is shared memory."""
    if t > 0:
        mbarrier.wait(full.index((t - 1) % 2), ((t - 1) // 2) & 1)
        acc = warpgroup_mma(operand(a, dt, A_LAYOUT), tile_of(ring, (t - 1) % 2), acc)
    acc = acc * factor
    if LENS:  # noqa: SIM102
        if rows < TILE:
            ok = gl.arange(0, TILE, gl.SliceLayout(1, D_LAYOUT)) < rows
            acc = gl.where(ok[:, None], acc, 0.0)
    out.reshape([TILE, WIDTH]).store(acc.to(out.dtype))
    fence_async_shared()


@gluon.jit
def _value_side(
    k_smem, q_smem, do_smem, lse_smem, p_smem, k_full, q_full, q_empty, do_full, do_empty, p_full, p_empty, turn,
    dv_desc, kv_head, at_out, len_out, row_out, n0, rows, shift, m_lo, m_hi, G, left, right, scale, cap,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, LENS: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = q_smem.dtype
    dv = gl.zeros([TILE, WIDTH], gl.float32, D_LAYOUT)
    a = no_pairs()
    zero = gl.zeros([TILE, TILE], gl.float32, S_LAYOUT)
    mbarrier.wait(k_full, 0)
    k_half = tile_of(k_smem, 0).slice(0, HALF, 1).load(H_LAYOUT)
    t = m_lo * 0
    for _ in range(G):
        for m in range(m_lo, m_hi):
            st = t % 2
            ph = (t // 2) & 1
            last = gl.maximum(t - 1, 0)  # the first trip adds 0 times its own tile
            k = tile_of(k_smem, t >> 30)  # 0, opaque: descriptors of K must not stay in registers
            mbarrier.wait(do_full.index(last % 2), (last // 2) & 1)
            dv_token = warpgroup_mma(operand(a, dt, A_LAYOUT), tile_of(do_smem, last % 2), dv, is_async=True)
            mbarrier.wait(q_full.index(st), ph)
            s_token = _product(k_half, k, tile_of(q_smem, st), zero, not SOFTCAP)
            lse = lse_smem.index(st).load(gl.SliceLayout(0, S_LAYOUT))
            dv = warpgroup_mma_wait(1 if SOFTCAP else 2, deps=[dv_token])
            mbarrier.arrive(turn, count=1)
            mbarrier.arrive(do_empty.index(last % 2), count=1, pred=t > 0)
            s = warpgroup_mma_wait(0, deps=[s_token])
            mbarrier.arrive(q_empty.index(st), count=1)
            s, slope = scores(s, scale, cap, SOFTCAP)
            p = gl.exp2(s - lse[None, :])
            if LEFT or RIGHT:
                first = m * TILE + shift
                crosses = m < 0  # no
                if RIGHT:
                    crosses = crosses | (first + right < n0 + TILE - 1)
                if LEFT:
                    crosses = crosses | (first + TILE - 1 - left > n0)
                if crosses:
                    p = _cut(p, n0, first, left, right, LEFT, RIGHT)
            a = pairs(p, dt)
            mbarrier.wait(p_empty.index(st), ph ^ 1)
            p_smem.index(st).store(_by_thread(pairs(p * slope, gl.float16)))
            mbarrier.arrive(p_full.index(st), count=1)
            t += 1
    # only this warpgroup reads K: the tile leaves through its buffer
    _finish(dv, a, dt, do_smem, do_full, t, DROP, rows, k_smem.index(0), LENS)
    store(dv_desc, k_smem.index(0), kv_head, at_out, len_out, row_out)
    tma.store_wait(pendings=0)


@gluon.jit
def _key_side(
    v_smem, q_smem, do_smem, delta_smem, p_smem, v_full, q_full, q_empty, do_full, do_empty, p_full, p_empty, turn,
    dk_desc, exponents, kv_head, at_out, len_out, row_out, rows, m_lo, m_hi, G, scale,
    SCALED: gl.constexpr, LENS: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = q_smem.dtype
    dk = gl.zeros([TILE, WIDTH], gl.float32, D_LAYOUT)
    a = no_pairs()
    zero = gl.zeros([TILE, TILE], gl.float32, S_LAYOUT)
    t_layout: gl.constexpr = _by_thread(a).type.layout
    mbarrier.wait(v_full, 0)
    v_half = tile_of(v_smem, 0).slice(0, HALF, 1).load(H_LAYOUT)
    t = m_lo * 0
    up = 1.0 + t.to(gl.float32)  # what P, as it crosses, is multiplied by; float16: and by the head's power of two
    unit = up  # its inverse
    for g in range(G):
        if SCALED:
            up = power(exponents + g) * DROP
            if t > 0:  # bring in the last product of the head before, then pass to this head's unit
                dk = warpgroup_mma(operand(a, dt, A_LAYOUT), tile_of(q_smem, (t - 1) % 2), dk)
                dk = dk * (up * unit)
                a = no_pairs()
            unit = 1.0 / up
        for _ in range(m_lo, m_hi):
            st = t % 2
            ph = (t // 2) & 1
            last = gl.maximum(t - 1, 0)
            v = tile_of(v_smem, t >> 30)
            mbarrier.wait(q_full.index(last % 2), (last // 2) & 1)
            mbarrier.wait(turn, t & 1)
            dk_token = warpgroup_mma(operand(a, dt, A_LAYOUT), tile_of(q_smem, last % 2), dk, is_async=True)
            mbarrier.wait(do_full.index(st), ph)
            dp_token = _product(v_half, v, tile_of(do_smem, st), zero, HELD)
            delta = delta_smem.index(st).load(gl.SliceLayout(0, S_LAYOUT))
            dk = warpgroup_mma_wait(2 if HELD else 1, deps=[dk_token])
            mbarrier.arrive(q_empty.index(last % 2), count=1, pred=t > 0)
            dp = warpgroup_mma_wait(0, deps=[dp_token])
            mbarrier.arrive(do_empty.index(st), count=1)
            mbarrier.wait(p_full.index(st), ph)
            p = p_smem.index(st).load(t_layout)
            mbarrier.arrive(p_empty.index(st), count=1)
            ds = _halves(p) * (dp - delta[None, :])
            if SCALED:
                ds *= up
            a = pairs(ds, dt)
            t += 1
    _finish(dk, a, dt, q_smem, q_full, t, scale * unit * DROP, rows, v_smem.index(0), LENS)
    store(dk_desc, v_smem.index(0), kv_head, at_out, len_out, row_out)
    tma.store_wait(pendings=0)


@gluon.jit
def _producer(
    q_desc, do_desc, lse_ptr, delta_ptr, q_smem, do_smem, lse_smem, delta_smem, q_full, q_empty, do_full, do_empty,
    at_q, q_len, head0, row0, T, m_lo, m_hi, G,
):  # fmt: skip
    """Streams Q, dO, lse and delta. Rows that do not exist get lse = inf, hence P = 0, like rows that see nothing."""
    lanes: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    t = m_lo * 0
    for g in range(G):
        at = row0 + g * T
        for m in range(m_lo, m_hi):
            st = t % 2
            ph = ((t // 2) & 1) ^ 1
            row = m * TILE + gl.arange(0, TILE, lanes)
            lse = gl.load(lse_ptr + at + row, mask=row < q_len, other=INF)
            delta = gl.load(delta_ptr + at + row, mask=row < q_len, other=0.0)
            mbarrier.wait(q_empty.index(st), ph)
            load_expected(q_desc, q_smem.index(st), q_full.index(st), head0 + g, at_q, q_len, m * TILE)
            lse_smem.index(st).store(gl.where(lse == -INF, INF, lse * LOG2E - LIFT))
            mbarrier.arrive(q_full.index(st), count=1)
            mbarrier.wait(do_empty.index(st), ph)
            load_expected(do_desc, do_smem.index(st), do_full.index(st), head0 + g, at_q, q_len, m * TILE)
            delta_smem.index(st).store(delta)
            mbarrier.arrive(do_full.index(st), count=1)
            t += 1


@gluon.jit(do_not_specialize=INTS)
def dkdv_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, lse_ptr, delta_ptr, exponents, k_lens_ptr, table_ptr,
    tiles, docs, B, T, S, H, K, k_step, v_step, kv_grad_start, left, right, scale, scale2, cap, group,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, SCALED: gl.constexpr, LENS: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """dK gets `scale`, the products that make scores `scale2`; tiles: of a sequence, packed: the table's slots."""
    dt: gl.constexpr = q_desc.dtype
    one: gl.constexpr = [1] + k_desc.block_type.shape
    two: gl.constexpr = [2] + q_desc.block_type.shape
    G = H // K
    if PACKED:
        slot, kv_head = place(gl.program_id(0), tiles, K, group)
        seq, tile, at_k, k_len, at_q, q_len = entry(table_ptr, slot)
        skipped = gl.maximum(kv_grad_start - at_k, 0)  # keys of this document that get no gradient
        n0 = skipped + tile * TILE
        if (seq < 0) | (n0 >= k_len):
            return
        at_v = at_k
        at_out = at_k + skipped - kv_grad_start
        row0 = (kv_head * G).to(gl.int64) * T + at_q
        keys = k_len
    else:
        tile, h = place(gl.program_id(0), tiles, B * K, group)
        seq = h // K
        kv_head = h % K
        skipped = kv_grad_start
        n0 = skipped + tile * TILE
        at_q = seq
        at_k = seq
        at_v = seq
        at_out = seq
        q_len = T
        k_len = S
        keys = S
        if LENS:
            k_len = gl.minimum(gl.maximum(gl.load(k_lens_ptr + seq).to(gl.int32), 0), S)
            at_k = seq * k_step
            at_v = seq * v_step
        row0 = (seq * H + kv_head * G).to(gl.int64) * T
    shift = k_len - q_len
    m_lo = n0 >> 30
    m_hi = gl.cdiv(q_len, TILE)
    if RIGHT:
        m_lo = gl.maximum(n0 - right - shift, 0) // TILE
    if LEFT:
        m_hi = gl.minimum(m_hi, (gl.maximum(n0 + TILE + left - shift, 0) + TILE - 1) // TILE)
    if LENS:  # noqa: SIM102
        if n0 >= k_len:
            m_hi = m_lo
    of_seq = exponents
    if SCALED:
        of_seq = exponents + gl.minimum(seq, docs - 1) * H + kv_head * G

    k_smem = gl.allocate_shared_memory(dt, one, k_desc.layout)
    v_smem = gl.allocate_shared_memory(dt, one, v_desc.layout)
    q_smem = gl.allocate_shared_memory(dt, two, q_desc.layout)
    do_smem = gl.allocate_shared_memory(dt, two, do_desc.layout)
    p_smem = gl.allocate_shared_memory(gl.int32, [2, 2048], FLAT)
    lse_smem = gl.allocate_shared_memory(gl.float32, [2, TILE], FLAT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [2, TILE], FLAT)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(turn, count=1)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=2)  # the copy and the row statistics beside it
        mbarrier.init(do_full.index(i), count=2)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_empty.index(i), count=2)
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=1)
    fence_async_shared()
    load_expected(k_desc, k_smem.index(0), k_full, kv_head, at_k, k_len, n0)
    load_expected(v_desc, v_smem.index(0), v_full, kv_head, at_v, k_len, n0)
    gl.warp_specialize([
        (_value_side, (
            k_smem, q_smem, do_smem, lse_smem, p_smem, k_full, q_full, q_empty, do_full, do_empty, p_full, p_empty,
            turn, dv_desc, kv_head, at_out, keys - skipped, n0 - skipped, n0, k_len - n0, shift, m_lo, m_hi, G,
            left, right, scale2, cap, LEFT, RIGHT, SOFTCAP, LENS)),
        (_key_side, (
            v_smem, q_smem, do_smem, delta_smem, p_smem, v_full, q_full, q_empty, do_full, do_empty, p_full, p_empty,
            turn, dk_desc, of_seq, kv_head, at_out, keys - skipped, n0 - skipped, k_len - n0, m_lo, m_hi, G, scale,
            SCALED, LENS, not SOFTCAP)),
        (_producer, (
            q_desc, do_desc, lse_ptr, delta_ptr, q_smem, do_smem, lse_smem, delta_smem, q_full, q_empty, do_full,
            do_empty, at_q, q_len, kv_head * G, row0, T, m_lo, m_hi, G)),
    ], [4, 1], [240, 24])  # fmt: skip
