"""One launch for a decoding step of a layer: rotation, attention over the cache and the new rows, and their storing.

A program takes the query rows of one run and one key head over one piece of the prefix. The last to arrive of a run and
head joins what they have made, in the order of the pieces; rotates the new keys, attends to them and stores them: after
all others have read, so that a new row may take the place of one that the run sees (a ring).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import next_power_of_2, on
from . import compose, route
from .arguments import Inputs
from .forward import over_prefix
from .tiles import LOG2E, as_float16, bent, cache_of, load_heads, power, quantize, store_heads
from .write import SMALLEST

JOINED = 8192  # elements of partial results that a program joins at once


@triton.jit
def _turned(x, ptr, ok, cos_ptr, sin_ptr, half, stride, PAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows x [n, PAD] that were loaded at `ptr` [n], turned by the rows of cos and sin at their pointers [n]:
    (a cos - b sin, b cos + a sin) in float32, rounded once; columns behind the pairs stay."""
    col = tl.arange(0, PAD)
    if INTERLEAVED:
        other = col ^ 1
        pair = col // 2
        first = col % 2 == 0
    else:
        first = col < half
        other = tl.where(first, col + half, col - half)
        pair = tl.where(first, col, other)
    turns = (col < 2 * half)[None, :]
    mask = ok[:, None] & turns
    y = tl.load(ptr[:, None] + other[None, :] * stride, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos_ptr[:, None] + pair[None, :], mask=mask, other=0.0)
    s = tl.load(sin_ptr[:, None] + pair[None, :], mask=mask, other=0.0)
    turned = x.to(tl.float32) * c + tl.where(first[None, :], -y, y) * s
    return tl.where(turns, turned.to(x.dtype), x)


@triton.jit
def _store_row(
    x, to_ptr, scale_ptr, ok, D: tl.constexpr, PAD: tl.constexpr, QUANTIZED: tl.constexpr, SMALLEST: tl.constexpr
):
    """One head of one row [1, PAD], at pointers [1]."""
    if QUANTIZED:
        x = tl.where(ok[:, None], x.to(tl.float32), 0.0)
        code, scale = quantize(tl.reshape(x, [1, PAD // 32, 32]), SMALLEST)
        block = tl.arange(0, PAD // 32)[None, :]
        col = block[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
        tl.store(to_ptr[:, None, None] + col, code, mask=ok[:, None, None] & (col < D))
        tl.store(scale_ptr[:, None] + block, scale, mask=ok[:, None] & (block * 32 < D))
    else:
        col = tl.arange(0, PAD)[None, :]
        tl.store(to_ptr[:, None] + col, x.to(to_ptr.dtype.element_ty), mask=ok[:, None] & (col < D))


@triton.jit
def _joined(acc, total, m, part, part_total, part_m, dtype: tl.constexpr):
    """The running softmax (acc [M, PAD], total and m [M]) with the first dimension of `part` .. added to it."""
    m_new = tl.maximum(m, tl.max(part_m, 0))
    shift = tl.where(m_new == -float("inf"), 0.0, m_new)
    weight = power(part_m - shift[None, :], dtype)
    shrink = power(m - shift, dtype)
    acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
    return acc, total * shrink + tl.sum(part_total * weight, 0), m_new


@triton.jit
def _join(
    at, inside, pieces, plane, part_ptr, part_total_ptr, part_m_ptr, dtype: tl.constexpr, D: tl.constexpr,
    PAD: tl.constexpr, R: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """What other programs have stored (past this processor's first cache), pieces in order."""
    acc = tl.zeros([R, PAD], tl.float32)
    total = tl.zeros([R], tl.float32)
    m = tl.full([R], -float("inf"), tl.float32)
    col = tl.arange(0, PAD)[None, None, :]
    for begin in range(0, pieces, JOINED):
        p = begin + tl.arange(0, JOINED)
        row = p.to(tl.int64)[:, None] * plane + at[None, :]
        ok = (p < pieces)[:, None] & inside[None, :]
        part = tl.load(
            part_ptr + row[:, :, None] * D + col, mask=ok[:, :, None] & (col < D), other=0.0, cache_modifier=".cg"
        )
        part_total = tl.load(part_total_ptr + row, mask=ok, other=0.0, cache_modifier=".cg")
        part_m = tl.load(part_m_ptr + row, mask=ok, other=-float("inf"), cache_modifier=".cg")
        acc, total, m = _joined(acc, total, m, part, part_total, part_m, dtype)
    return acc, total, m


@triton.jit
def _end(
    acc, total, m, q, scale, f, k, v, row0, kh, live, k_ptr, v_ptr, cos_ptr, sin_ptr, kc_ptr, vc_ptr, ks_ptr, vs_ptr,
    rows_ptr, sinks_ptr, out_ptr, page_size, left, K, G, half, n_rows, softcap, stride_ks, stride_kh, stride_kd,
    stride_vs, stride_vh, stride_vd, stride_cos, stride_sin, stride_kcp, stride_kcr, stride_kch, stride_vcp, stride_vcr,
    stride_vch, stride_ksp, stride_ksr, stride_ksh, stride_vsp, stride_vsr, stride_vsh,
    EACH: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, R: tl.constexpr, LOADS: tl.constexpr,
    QUANTIZED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, TURNS: tl.constexpr,
    INTERLEAVED: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """The new keys one by one, into the softmax of query rows f [R] and into the cache; sinks; the result. k and v are
    the new row, unless it LOADS them."""
    unit: tl.constexpr = 1.0 if q.dtype == tl.float32 else LOG2E
    t = f // G
    h = kh * G + f % G
    inside = t < EACH
    wide = q.to(tl.float32)
    for new in tl.static_range(EACH):
        r = row0 + new + tl.zeros([1], tl.int64)
        to = tl.load(rows_ptr + r).to(tl.int64)
        if LOADS:
            k, v = _new_row(
                r, kh, k_ptr, v_ptr, cos_ptr, sin_ptr, half, stride_ks, stride_kh, stride_kd, stride_vs, stride_vh,
                stride_vd, stride_cos, stride_sin, D, PAD, TURNS, INTERLEAVED,
            )  # fmt: skip
        see = (t >= new) & inside & live
        if WINDOW:
            see = see & (t - new <= left)
        score = tl.sum(wide * k.to(tl.float32), 1, keep_dims=True)
        score = tl.reshape(bent(score, scale, softcap, unit, CAPPED), [R])
        score = tl.where(see, score, -float("inf"))
        m_new = tl.maximum(m, score)
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = power(score - shift, q.dtype)
        shrink = power(m - shift, q.dtype)
        seen = tl.where(see[:, None], v.to(tl.float32), 0.0)  # what nobody sees may hold NaN
        acc = acc * shrink[:, None] + p[:, None] * seen
        total = total * shrink + p
        m = m_new
        stored = (to >= 0) & (to < n_rows)
        to = tl.where(stored, to, 0)
        page = to // page_size
        line = to % page_size
        k_to = kc_ptr + page * stride_kcp + line * stride_kcr + kh.to(tl.int64) * stride_kch
        v_to = vc_ptr + page * stride_vcp + line * stride_vcr + kh.to(tl.int64) * stride_vch
        if QUANTIZED:
            k_scale = ks_ptr + page * stride_ksp + line * stride_ksr + kh.to(tl.int64) * stride_ksh
            v_scale = vs_ptr + page * stride_vsp + line * stride_vsr + kh.to(tl.int64) * stride_vsh
        else:
            k_scale = k_to  # not read
            v_scale = v_to
        tl.debug_barrier()  # the program's own reads of the prefix are done
        _store_row(k, k_to, k_scale, stored, D, PAD, QUANTIZED, SMALLEST)
        _store_row(v, v_to, v_scale, stored, D, PAD, QUANTIZED, SMALLEST)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h, mask=inside & live, other=-float("inf")) * unit
        m_new = tl.maximum(m, sink)
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        shrink = power(m - shift, q.dtype)
        acc *= shrink[:, None]
        total = total * shrink + power(sink - shift, q.dtype)
    some = total != 0.0  # a NaN total is a NaN result
    acc = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
    store_heads(out_ptr, (row0 + t) * (K * G) + h, inside, acc, D, PAD)


@triton.jit
def _queries(
    f, row0, kh, q_ptr, cos_ptr, sin_ptr, G, half, stride_qt, stride_qh, stride_qd, stride_cos, stride_sin,
    EACH: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, TURNS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Head f % G of the group at row f // G, turned, for all f. Of no slot yet: nothing here waits for one."""
    t = f // G
    g = f % G
    ok = t < EACH
    at = q_ptr + row0 * stride_qt + kh.to(tl.int64) * G * stride_qh
    q = load_heads(at, t, g, stride_qt, stride_qh, stride_qd, ok, D, PAD)
    if TURNS:
        at += t.to(tl.int64) * stride_qt + g.to(tl.int64) * stride_qh
        i = row0 + t
        q = _turned(q, at, ok, cos_ptr + i * stride_cos, sin_ptr + i * stride_sin, half, stride_qd, PAD, INTERLEAVED)
    return q


@triton.jit
def _new_row(
    r, kh, k_ptr, v_ptr, cos_ptr, sin_ptr, half, stride_ks, stride_kh, stride_kd, stride_vs, stride_vh, stride_vd,
    stride_cos, stride_sin, D: tl.constexpr, PAD: tl.constexpr, TURNS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Key (turned) and value [1, PAD] of row r [1]."""
    col = tl.arange(0, PAD)[None, :]
    k_at = k_ptr + r * stride_ks + kh.to(tl.int64) * stride_kh
    v_at = v_ptr + r * stride_vs + kh.to(tl.int64) * stride_vh
    k = tl.load(k_at[:, None] + col * stride_kd, mask=col < D, other=0.0)
    v = tl.load(v_at[:, None] + col * stride_vd, mask=col < D, other=0.0)
    if TURNS:
        k = _turned(
            k, k_at, r >= 0, cos_ptr + r * stride_cos, sin_ptr + r * stride_sin, half, stride_kd, PAD, INTERLEAVED
        )
    return k, v


@triton.jit(do_not_specialize=["n", "n_slots", "capacity", "n_pages", "left", "n_rows"])
def _cached_decode(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, kc_ptr, vc_ptr, ks_ptr, vs_ptr, table_ptr, slots_ptr, positions_ptr,
    rows_ptr, sinks_ptr, out_ptr, part_ptr, part_total_ptr, part_m_ptr, arrived_ptr, n, n_slots, capacity, page_size,
    n_pages, left, K, G, chunk, half, n_rows, scale, softcap, stride_qt, stride_qh, stride_qd,
    stride_ks, stride_kh, stride_kd, stride_vs, stride_vh, stride_vd, stride_cos, stride_sin, stride_kcp, stride_kcr,
    stride_kch, stride_vcp, stride_vcr, stride_vch, stride_ksp, stride_ksr, stride_ksh, stride_vsp, stride_vsr,
    stride_vsh, stride_table,
    EACH: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    JOINED: tl.constexpr, SPLIT: tl.constexpr, PAGED: tl.constexpr, QUANTIZED: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, TURNS: tl.constexpr, INTERLEAVED: tl.constexpr,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    """Pieces that all slots have come first: a piece behind its slot's end has nothing to do."""
    pid = tl.program_id(0)
    kh = pid % K
    run = pid // K % n
    piece = pid // K // n
    slot = tl.load(slots_ptr + run).to(tl.int32)
    start = tl.load(positions_ptr + run).to(tl.int32)
    row0 = run.to(tl.int64) * EACH
    f = tl.arange(0, M)
    q = _queries(
        f, row0, kh, q_ptr, cos_ptr, sin_ptr, G, half, stride_qt, stride_qh, stride_qd, stride_cos, stride_sin, EACH, D,
        PAD, TURNS, INTERLEAVED,
    )  # fmt: skip
    if EACH == 1 and not SPLIT:  # asked for now, used at the end
        k, v = _new_row(
            row0 + tl.zeros([1], tl.int64), kh, k_ptr, v_ptr, cos_ptr, sin_ptr, half, stride_ks, stride_kh, stride_kd,
            stride_vs, stride_vh, stride_vd, stride_cos, stride_sin, D, PAD, TURNS, INTERLEAVED,
        )  # fmt: skip
    else:
        k = 0
        v = 0

    live = (slot >= 0) & (slot < n_slots)
    slot = tl.where(live, slot, 0)
    high = tl.where(live, tl.minimum(tl.maximum(start, 0), capacity), 0)
    low = high * 0
    least = low
    if WINDOW:
        least = tl.maximum(start - left, 0)
        low = tl.minimum(least, high) // N * N
    there = low * 0 + 1  # pieces of this run
    if SPLIT:
        there = tl.maximum((high - low + chunk // 2) // chunk, 1)
        if piece >= there:
            return
        size = tl.cdiv(tl.cdiv(high - low, there), N) * N
        low += piece * size
        high = tl.minimum(high, low + size)

    keys, values, table = cache_of(
        slot, kh, kc_ptr, vc_ptr, ks_ptr, vs_ptr, table_ptr, slots_ptr, page_size, n_pages, stride_kcp, stride_kcr,
        stride_kch, stride_vcp, stride_vcr, stride_vch, stride_ksp, stride_ksr, stride_ksh, stride_vsp, stride_vsr,
        stride_vsh, stride_table, PAGED, QUANTIZED,
    )  # fmt: skip
    by = scale
    if QUANTIZED and q.dtype == tl.bfloat16:  # codes become float16 at far less cost, and more exactly
        q, by = as_float16(q, scale)
    options = (left, least, by, softcap)
    acc = tl.zeros([M, PAD], tl.float32)
    total = tl.zeros([M], tl.float32)
    m = tl.full([M], -float("inf"), tl.float32)
    acc, total, m = over_prefix(
        acc, total, m, q, start + f // G, low, high, keys, values, table, options, D, PAD, N, PAGED, QUANTIZED, WINDOW,
        CAPPED, True,
    )  # fmt: skip

    if SPLIT:
        H = K * G
        plane = n.to(tl.int64) * EACH * H
        at = (row0 + f // G) * H + kh * G + f % G
        inside = f // G < EACH
        store_heads(part_ptr, piece * plane + at, inside, acc, D, PAD)
        tl.store(part_total_ptr + piece * plane + at, total, mask=inside)
        tl.store(part_m_ptr + piece * plane + at, m, mask=inside)
        tl.debug_barrier()  # all of the program's stores come before its arrival
        last = there == 1
        if there > 1:
            arrived = arrived_ptr + slot * K + kh
            last = tl.atomic_add(arrived, 1, sem="acq_rel") == there - 1
            if last:
                tl.store(arrived, 0)
        if last:
            rows = tl.arange(0, R)
            few = _queries(
                rows, row0, kh, q_ptr, cos_ptr, sin_ptr, G, half, stride_qt, stride_qh, stride_qd, stride_cos,
                stride_sin, EACH, D, PAD, TURNS, INTERLEAVED,
            )  # fmt: skip
            few_by = scale
            if QUANTIZED and few.dtype == tl.bfloat16:
                few, few_by = as_float16(few, scale)
            sum_acc, sum_total, sum_m = _join(
                (row0 + rows // G) * H + kh * G + rows % G, rows // G < EACH, there, plane, part_ptr, part_total_ptr,
                part_m_ptr, q.dtype, D, PAD, R, JOINED,
            )  # fmt: skip
            _end(
                sum_acc, sum_total, sum_m, few, few_by, rows, k, v, row0, kh, live, k_ptr, v_ptr, cos_ptr, sin_ptr,
                kc_ptr, vc_ptr, ks_ptr, vs_ptr, rows_ptr, sinks_ptr, out_ptr, page_size, left, K, G, half, n_rows,
                softcap, stride_ks, stride_kh, stride_kd, stride_vs, stride_vh, stride_vd, stride_cos, stride_sin,
                stride_kcp, stride_kcr, stride_kch, stride_vcp, stride_vcr, stride_vch, stride_ksp, stride_ksr,
                stride_ksh, stride_vsp, stride_vsr, stride_vsh, EACH, D, PAD, R, True, QUANTIZED, WINDOW, CAPPED, TURNS,
                INTERLEAVED, SMALLEST,
            )  # fmt: skip
    else:
        _end(
            acc, total, m, q, by, f, k, v, row0, kh, live, k_ptr, v_ptr, cos_ptr, sin_ptr, kc_ptr, vc_ptr, ks_ptr,
            vs_ptr, rows_ptr, sinks_ptr, out_ptr, page_size, left, K, G, half, n_rows, softcap, stride_ks, stride_kh,
            stride_kd, stride_vs, stride_vh, stride_vd, stride_cos, stride_sin, stride_kcp, stride_kcr, stride_kch,
            stride_vcp, stride_vcr, stride_vch, stride_ksp, stride_ksr, stride_ksh, stride_vsp, stride_vsr, stride_vsh,
            EACH, D, PAD, M, EACH > 1, QUANTIZED, WINDOW, CAPPED, TURNS, INTERLEAVED, SMALLEST,
        )  # fmt: skip


def decode(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, k_cache: Tensor, v_cache: Tensor,
    k_scale: Tensor | None, v_scale: Tensor | None, arrived: Tensor | None, block_table: Tensor | None, slots: Tensor,
    positions: Tensor, rows: Tensor, sinks: Tensor | None, interleaved: bool, scale: float | None, left: int | None,
    softcap: float,
) -> Tensor:  # fmt: skip
    """Tiles that do not fit (route.decode_plan) take one launch for each of the three."""
    (T, H, D), K, runs = q.shape, k.shape[1], len(slots)
    of = Inputs(
        q, k, v, k_cache, v_cache, k_scale, v_scale, block_table, slots, positions, None, None, sinks, scale, left,
        softcap, -(-T // max(runs, 1)),
    )  # fmt: skip
    plan = route.decode_plan(
        q.dtype, D, runs=runs, each=of.longest, K=K, G=H // K, prefix=of.capacity, left=left,
        quantized=k_scale is not None,
    )  # fmt: skip
    if plan is None:
        return compose.decode(
            q, k, v, cos, sin, k_cache, v_cache, k_scale, v_scale, arrived, block_table, slots, positions, rows, sinks,
            interleaved, scale, left, softcap,
        )  # fmt: skip
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    split, part, real = plan.pieces > 1, None, next_power_of_2(of.longest * H // K)
    sums: tuple[Tensor | None, ...] = (None, None)
    if split:
        part = torch.empty((plan.pieces, T, H, D), dtype=torch.float32, device=q.device)
        sums = torch.empty((2, plan.pieces, T, H), dtype=torch.float32, device=q.device).unbind()
        if arrived is None:
            arrived = torch.zeros((of.n_slots, K), dtype=torch.int32, device=q.device)
    scales = [(0, 0, 0) if s is None else s.stride()[:3] for s in (k_scale, v_scale)]
    turns = () if cos is None or sin is None else (cos.stride(0), sin.stride(0))
    with on(q):
        _cached_decode[(plan.programs,)](
            q, k, v, cos, sin, k_cache, v_cache, k_scale, v_scale, block_table, slots.contiguous(),
            positions.contiguous(), rows.contiguous(), None if sinks is None else sinks.contiguous(), out, part, *sums,
            arrived if split else None, runs, of.n_slots, of.capacity, k_cache.shape[1], len(k_cache),
            0 if left is None else left, K, H // K, plan.chunk, 0 if cos is None else cos.shape[1],
            k_cache.shape[0] * k_cache.shape[1], of.softmax_scale, float(softcap), *q.stride(), *k.stride(),
            *v.stride(), *(turns or (0, 0)), *k_cache.stride()[:3], *v_cache.stride()[:3], *scales[0], *scales[1],
            0 if block_table is None else block_table.stride(0),
            EACH=of.longest, D=D, PAD=of.PAD, M=plan.tile.M, N=plan.tile.N, R=real,
            JOINED=max(1, min(16, JOINED // (real * of.PAD))), SPLIT=split, PAGED=block_table is not None,
            QUANTIZED=k_scale is not None, WINDOW=left is not None, CAPPED=softcap > 0, TURNS=bool(turns),
            INTERLEAVED=interleaved, SMALLEST=SMALLEST, num_warps=plan.tile.warps, num_stages=plan.tile.stages,
            enable_fp_fusion=k_scale is None,  # codes are GGUF's, bit for bit
        )  # fmt: skip
    return out
