"""The programs of the Hopper backward. Persistent: each takes tiles of 128 keys of one key head from a counter until
none is left, and walks the query tiles of every query head of the group, so that dK and dV need no atomics.

Two consumer warpgroups own 64 keys each (their rows of dK and dV, and half of every dQ tile). A producer takes the
tiles, hands their coordinates round through a small ring in shared memory and brings K, V, and a step at a time Q, dO
and the rows' lse and delta (backward_tiles.py). A consumer's step t:

    S(t) = K Q^T, then dQ(t - 1) behind it; P from S under the tensor cores' work; dQ(t - 1) is added to its float32
    scratch; dP(t) = V dO^T; dV += P dO with P in registers; dS to shared memory, where both warpgroups' rows meet for
    dQ(t); dK += dS Q with dS in registers.

K and V have two buffers, so the steps of one tile of keys run into those of the next: the last dQ of a tile is made in
the first step of its successor, and the loads of the successor lie under the end of the tile.

Three rules keep ptxas from serialising the tensor cores or spilling (README.md): every product that ordinary
instructions read is issued and awaited in one trip of the loop; step counters stay uniform; buffers are indexed with
counters, or their wgmma descriptors are hoisted into registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import descriptors
from .backward_tiles import KEYS, RING, get, next_tile

LOG2E = gl.constexpr(1.4426950408889634)
FAR = gl.constexpr(1 << 30)
WN = gl.constexpr(64)  # keys of a warpgroup


@gluon.jit
def fragments(x, R: gl.constexpr, C: gl.constexpr):
    """[R, C] accumulator of 4 warps -> [R * C] in the order (repeat, column octet, thread, 4 registers).

    No value moves, and each thread's 4 neighbours become 16 contiguous bytes.
    """
    y = gl.reshape(x, [R // 64, 4, 2, 8, C // 8, 4, 2])
    y = gl.permute(y, [0, 4, 1, 3, 5, 2, 6])
    return gl.reshape(y, [R * C])


@gluon.jit
def _issue_dq(wg: gl.constexpr, t, k, sh, F):
    """Start this warpgroup's half of dQ from dS number t: 64 columns, as dQ^T (D 128), or 32 columns (D 64)."""
    M: gl.constexpr = F.M
    N: gl.constexpr = M * F.D // 128
    zero = gl.zeros([64, N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))
    b = t % F.DS
    mbarrier.wait(sh.ds_full.index(b), (t // F.DS) & 1)
    if F.D == 128:
        x = k.slice(wg * 64, 64, 1).permute((1, 0))
        y = sh.ds.index(b)
    else:
        x = sh.ds.index(b).permute((1, 0))
        y = k.slice(wg * 32, 32, 1)
    return warpgroup_mma(x, y, zero, use_acc=False, is_async=True)


@gluon.jit
def _add_dq(wg: gl.constexpr, dq, tile, acc_ptr, F):
    """This warpgroup's half of a tile's dQ into the scratch."""
    N: gl.constexpr = F.M * F.D // 2
    x = fragments(dq, 64, N // 64)
    at = acc_ptr + tile.to(gl.int64) * (2 * N) + wg * N
    gl.atomic_add(at + gl.arange(0, N, x.type.layout), x, sem="relaxed")


@gluon.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + gl.exp2(x * (2.0 * LOG2E)))


@gluon.jit
def _steps(
    wg: gl.constexpr, start, stop, t, tile, base, dk, dv, kv, before, acc_ptr, sh, w, unit, scale, softcap, left, right,
    F, MASK: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Query tiles start..stop-1 of one head as steps t...; `tile` is where dQ of step t - 1 belongs, `before` its K."""
    M: gl.constexpr = F.M
    D: gl.constexpr = F.D
    dt: gl.constexpr = sh.q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    c_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    DS: gl.constexpr = F.NEED_Q or F.NEED_K
    zero = gl.zeros([WN, M], gl.float32, s_layout)
    for at in range(base + start, base + stop):
        z = t >> 30
        k = sh.k.index(kv + z).reshape((KEYS, D))
        v = sh.v.index(kv + z).reshape((KEYS, D))
        k_before = sh.k.index(before + z).reshape((KEYS, D)) if FIRST else k
        st = t % F.STAGES
        phase = (t // F.STAGES) & 1
        q = sh.q.index(st).reshape((M, D))
        do = sh.do.index(st).reshape((M, D))
        mbarrier.wait(sh.q_full.index(st), phase)
        s_ = warpgroup_mma(k.slice(wg * WN, WN, 0), q.permute((1, 0)), zero, use_acc=False, is_async=True)
        if F.NEED_Q:
            dq_ = _issue_dq(wg, t, k_before, sh, F)
        lse = sh.stats.index(2 * st).load(c_layout)
        s = warpgroup_mma_wait(1 if F.NEED_Q else 0, deps=[s_])
        if F.SOFTCAP:
            th = _tanh(s * scale)
            p = gl.exp2(th * softcap - lse[None, :])
        else:
            p = gl.exp2(s * scale - lse[None, :])
        if MASK:
            j = w.key + wg * WN + gl.arange(0, WN, gl.SliceLayout(1, s_layout))
            i = (at - base) * M + gl.arange(0, M, c_layout)
            if F.RIGHT:
                from_row = gl.where(j < w.key_stop, j - w.shift - right, FAR)
            else:
                from_row = gl.where(j < w.key_stop, 0, FAR)
            p = gl.where(i[None, :] >= from_row[:, None], p, 0.0)
            if F.LEFT:
                p = gl.where(i[None, :] <= (j - w.shift + left)[:, None], p, 0.0)
        pb = p.to(dt)
        if F.SOFTCAP:
            p = p * (1.0 - th * th)
        if F.NEED_Q:
            dq = warpgroup_mma_wait(0, deps=[dq_])
            mbarrier.arrive(sh.ds_empty.index(t % F.DS), count=1)
            _add_dq(wg, dq, tile, acc_ptr, F)
        mbarrier.wait(sh.do_full.index(st), phase)
        if DS:
            dp_ = warpgroup_mma(v.slice(wg * WN, WN, 0), do.permute((1, 0)), zero, use_acc=False, is_async=True)
        if F.NEED_V:
            dv_ = warpgroup_mma(gl.convert_layout(pb, a_layout), do, dv, is_async=True)
        if DS:
            delta = sh.stats.index(2 * st + 1).load(c_layout)
            dp = warpgroup_mma_wait(1 if F.NEED_V else 0, deps=[dp_])
            if F.SCALED:
                ds = p * (dp * unit - (delta * unit)[None, :])
            else:
                ds = p * (dp - delta[None, :])
            dsb = ds.to(dt)
            if F.NEED_K:
                dk_ = warpgroup_mma(gl.convert_layout(dsb, a_layout), q, dk, is_async=True)
            if F.NEED_Q:
                b = (t + 1) % F.DS
                mbarrier.wait(sh.ds_empty.index(b), (((t + 1) // F.DS) & 1) ^ 1)
                sh.ds.index(b).slice(wg * WN, WN, 0).store(dsb)
                fence_async_shared()
                mbarrier.arrive(sh.ds_full.index(b), count=1)
        if F.NEED_V and F.NEED_K:
            dv, dk = warpgroup_mma_wait(0, deps=[dv_, dk_])
        elif F.NEED_V:
            dv = warpgroup_mma_wait(0, deps=[dv_])
        elif F.NEED_K:
            dk = warpgroup_mma_wait(0, deps=[dk_])
        mbarrier.arrive(sh.empty.index(st), count=1)
        tile = at
        t += 1
    return t, tile, dk, dv


@gluon.jit
def _blind_step(wg: gl.constexpr, t, tile, before, acc_ptr, sh, F):
    """Step t of a warpgroup whose keys no row of the step sees: only dQ of step t - 1, and a dS of zeros."""
    dt: gl.constexpr = sh.q.dtype
    st = t % F.STAGES
    phase = (t // F.STAGES) & 1
    if F.NEED_Q:
        dq_ = _issue_dq(wg, t, sh.k.index(before).reshape((KEYS, F.D)), sh, F)
        dq = warpgroup_mma_wait(0, deps=[dq_])
        mbarrier.arrive(sh.ds_empty.index(t % F.DS), count=1)
        _add_dq(wg, dq, tile, acc_ptr, F)
        b = (t + 1) % F.DS
        mbarrier.wait(sh.ds_empty.index(b), (((t + 1) // F.DS) & 1) ^ 1)
        s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.M, 16])
        sh.ds.index(b).slice(wg * WN, WN, 0).store(gl.zeros([WN, F.M], dt, s_layout))
        fence_async_shared()
        mbarrier.arrive(sh.ds_full.index(b), count=1)
    mbarrier.wait(sh.q_full.index(st), phase)
    mbarrier.wait(sh.do_full.index(st), phase)
    mbarrier.arrive(sh.empty.index(st), count=1)


@gluon.jit
def _unit(top_ptr, F):
    """The power of two that brings the largest |dO|, whose bits lie at top_ptr, into [4, 8)."""
    unit = 1.0
    if F.SCALED:
        bits = gl.load(top_ptr)
        usable = (bits > 0) & (bits < 0x7F800000)
        bits = gl.where(usable, (256 - (bits >> 23)) << 23, 0x3F800000)
        unit = bits.to(gl.float32, bitcast=True)
    return unit


@gluon.jit
def consumer(
    wg: gl.constexpr, dk_desc, dv_desc, acc_ptr, top_ptr, sh, G, head_tiles, spare, softmax_scale, scale, softcap,
    right, left, F,
):  # fmt: skip
    """A warpgroup's 64 keys of dK and dV, and half of every dQ tile."""
    D: gl.constexpr = F.D
    dt: gl.constexpr = sh.q.dtype
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.M, 16])
    n = 0
    t = 0
    tile = spare
    if F.NEED_Q:  # dS of no step: its dQ goes to the spare scratch
        sh.ds.index(0).slice(wg * WN, WN, 0).store(gl.zeros([WN, F.M], dt, s_layout))
        fence_async_shared()
        mbarrier.arrive(sh.ds_full.index(0), count=1)
    more, w = next_tile(sh, n, G, spare, right, left, F)
    while more > 0:
        top = top_ptr
        if F.SCALED:
            top = top_ptr + get(sh, n, 10)
        kv = n % 2
        before = gl.maximum(n - 1, 0) % 2
        dk = gl.zeros([WN, D], gl.float32, d_layout)
        dv = gl.zeros([WN, D], gl.float32, d_layout)
        unit = _unit(top, F)
        mbarrier.wait(sh.kv_full.index(kv), (n // 2) & 1)
        if F.RIGHT and wg == 1:
            if (w.first + 1) * F.M - 1 + w.shift + right < w.key + WN:
                _blind_step(wg, t, tile, before, acc_ptr, sh, F)
                t += 1
                tile = w.scratch + w.first
            else:
                t, tile, dk, dv = _steps(
                    wg, w.first, w.first + 1, t, tile, w.scratch, dk, dv, kv, before, acc_ptr, sh, w, unit, scale,
                    softcap, left, right, F, True, True,
                )  # fmt: skip
        else:
            t, tile, dk, dv = _steps(
                wg, w.first, w.first + 1, t, tile, w.scratch, dk, dv, kv, before, acc_ptr, sh, w, unit, scale,
                softcap, left, right, F, True, True,
            )  # fmt: skip
        tma.store_wait(pendings=0)
        if n > 0:
            mbarrier.arrive(sh.kv_empty.index(before), count=1)
        start = w.first + 1
        for g in range(w.heads):
            base = w.scratch + g * head_tiles
            if F.SCALED:
                next_unit = _unit(top + g, F)
                if F.NEED_K:
                    dk = dk * (next_unit / unit)
                unit = next_unit
            t, tile, dk, dv = _steps(
                wg, start, w.plain_from, t, tile, base, dk, dv, kv, kv, acc_ptr, sh, w, unit, scale, softcap, left,
                right, F, True, False,
            )  # fmt: skip
            t, tile, dk, dv = _steps(
                wg, gl.maximum(start, w.plain_from), w.plain_to, t, tile, base, dk, dv, kv, kv, acc_ptr, sh, w, unit,
                scale, softcap, left, right, F, False, False,
            )  # fmt: skip
            if F.LEFT:
                t, tile, dk, dv = _steps(
                    wg, gl.maximum(start, w.plain_to), w.last, t, tile, base, dk, dv, kv, kv, acc_ptr, sh, w, unit,
                    scale, softcap, left, right, F, True, False,
                )  # fmt: skip
            start = w.first
        kv_head = get(sh, n, 6)
        out_at = get(sh, n, 7)
        out_length = get(sh, n, 8)
        out_key = get(sh, n, 9)
        mbarrier.arrive(sh.ring_empty.index(n % RING), count=1)
        rows = sh.v.index(kv).slice(wg * WN, WN, len(sh.v.shape) - 3)  # only this warpgroup reads these rows of V
        view = sh.v.index(kv).reshape((KEYS, D)).slice(wg * WN, WN, 0)
        if F.NEED_V:
            view.store(dv.to(dt))
            fence_async_shared()
            descriptors.store(dv_desc, rows, kv_head, out_at, out_length, out_key + wg * WN)
            if F.NEED_K:
                tma.store_wait(pendings=0)
        if F.NEED_K:
            view.store((dk * (softmax_scale / unit)).to(dt))
            fence_async_shared()
            descriptors.store(dk_desc, rows, kv_head, out_at, out_length, out_key + wg * WN)
        n += 1
        more, w = next_tile(sh, n, G, spare, right, left, F)
    if F.NEED_Q:
        dq_ = _issue_dq(wg, t, sh.k.index(gl.maximum(n - 1, 0) % 2).reshape((KEYS, D)), sh, F)
        dq = warpgroup_mma_wait(0, deps=[dq_])
        _add_dq(wg, dq, tile, acc_ptr, F)
    tma.store_wait(pendings=0)
