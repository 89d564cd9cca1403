"""Backward: dQ over prefix and new keys, dK and dV of the new keys alone; nothing of the prefix has a gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dot import dot
from .._launch import cdiv, on
from . import route, spec
from .arguments import Inputs
from .tiles import (
    LOG2E,
    as_float16,
    cache_of,
    cached_at,
    dequantize,
    fetch,
    find_run,
    load_heads,
    load_rows,
    place,
    power,
    reach,
    scores,
    store_heads,
)


@triton.jit
def _cached_rows(
    d_out_ptr, out_ptr, d_lse_ptr, delta_ptr, largest_ptr, total, H, stride_gt, stride_gh, stride_gd,
    stride_lh, stride_lt, D: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """delta = sum(dO O) - d_lse and, for float16 products, max |dO| of each row."""
    pid = tl.program_id(0)
    h = (pid % H).to(tl.int64)
    i = pid // H * M + tl.arange(0, M)
    ok = i < total
    g = load_rows(d_out_ptr + h * stride_gh, i, stride_gt, stride_gd, ok, D, PAD).to(tl.float32)
    o = load_rows(out_ptr + h * D, i, H * D, 1, ok, D, PAD).to(tl.float32)
    delta = tl.sum(g * o, 1)
    if d_lse_ptr is not None:
        delta -= tl.load(d_lse_ptr + h * stride_lh + i.to(tl.int64) * stride_lt, mask=ok, other=0.0)
    tl.store(delta_ptr + h * total + i, delta, mask=ok)
    if SCALED:
        tl.store(largest_ptr + h * total + i, tl.max(tl.abs(g), 1), mask=ok)


@triton.jit(do_not_specialize=["total", "each"])
def _cached_range(largest_ptr, row_scale_ptr, run_scale_ptr, cu_q_ptr, total, each, H, BLOCK: tl.constexpr):
    """The power of two that brings max |dO| of a run and head into [4, 8), for the run and for its rows."""
    pid = tl.program_id(0)
    h = (pid % H).to(tl.int64)
    run = pid // H
    if cu_q_ptr is None:
        begin = run * each
        end = begin + each
    else:
        begin = tl.minimum(tl.maximum(tl.load(cu_q_ptr + run).to(tl.int32), 0), total)
        end = tl.minimum(tl.maximum(tl.load(cu_q_ptr + run + 1).to(tl.int32), 0), total)
    top = tl.zeros([BLOCK], tl.float32)
    for at in range(begin, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(largest_ptr + h * total + i, mask=i < end, other=0.0))
    largest = tl.max(top, 0)
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    scale = ((256 - exponent) << 23).to(tl.float32, bitcast=True)  # 2 ** (2 - floor(log2(largest)))
    scale = tl.where((largest > 0.0) & (largest < float("inf")), scale, 1.0)
    tl.store(run_scale_ptr + run.to(tl.int64) * H + h, scale)
    for at in range(begin, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(row_scale_ptr + h * total + i, tl.zeros([BLOCK], tl.float32) + scale, mask=i < end)


@triton.jit
def _slope(s, softcap, dtype: tl.constexpr, CAPPED: tl.constexpr):
    """d(capped score) / d(score), from the capped score as `scores` gives it."""
    if CAPPED:
        ratio = s / (softcap * (1.0 if dtype == tl.float32 else LOG2E))
        slope = 1.0 - ratio * ratio
    else:
        slope = 1.0
    return slope


@triton.jit
def _dq_block(d_q, q, g, lse, delta, k, v, see, scale, softcap, CAPPED: tl.constexpr, MASK: tl.constexpr):
    s = scores(q, k, scale, softcap, CAPPED)
    p = power(s - lse[:, None], q.dtype)
    if MASK:
        p = tl.where(see, p, 0.0)
    d_s = p * (dot(g, tl.trans(v)) - delta[:, None]) * _slope(s, softcap, q.dtype, CAPPED)
    return d_q + dot(d_s.to(k.dtype), k)


@triton.jit
def _dq_prefix(
    d_q, q, g, lse, delta, at, first, last, keys, values, table, options,
    D: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr, PAGED: tl.constexpr, QUANTIZED: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Codes are fetched a block ahead into registers, as in the forward."""
    left, least, scale, softcap = options
    if QUANTIZED:
        j = first + tl.arange(0, N)
        ok = (j >= least) & (j < last)
        if not MASK:
            j, ok = tl.maximum(tl.minimum(j, last - 1), 0), None
        page, row = cached_at(j, ok, table, PAGED)
        k, k_scale = fetch(keys, page, row, ok, D, PAD, True)
        v, v_scale = fetch(values, page, row, ok, D, PAD, True)
        for begin in tl.range(first, last, N, num_stages=1):
            j = begin + tl.arange(0, N)
            see = (j[None, :] < last) & (j[None, :] <= at[:, None])
            if WINDOW:
                see = see & (j[None, :] >= at[:, None] - left)
            j += N
            ok = j < last
            if not MASK:  # every row of the block is there; of the one after the last, any will do
                j, ok = tl.minimum(j, last - 1), None
            page, row = cached_at(j, ok, table, PAGED)
            k_now = dequantize(k, k_scale, q.dtype, PAD, True)
            v_now = dequantize(v, v_scale, q.dtype, PAD, True)
            k, k_scale = fetch(keys, page, row, ok, D, PAD, True)
            v, v_scale = fetch(values, page, row, ok, D, PAD, True)
            d_q = _dq_block(d_q, q, g, lse, delta, k_now, v_now, see, scale, softcap, CAPPED, MASK)
    else:
        for begin in range(first, last, N):
            j = begin + tl.arange(0, N)
            ok = (j >= least) & (j < last)
            page, row = cached_at(j, ok, table, PAGED)
            k, _ = fetch(keys, page, row, ok, D, PAD, False)
            v, _ = fetch(values, page, row, ok, D, PAD, False)
            see = ok[None, :] & (j[None, :] <= at[:, None])
            if WINDOW:
                see = see & (j[None, :] >= at[:, None] - left)
            d_q = _dq_block(d_q, q, g, lse, delta, k.to(q.dtype), v.to(q.dtype), see, scale, softcap, CAPPED, MASK)
    return d_q


@triton.jit
def _dq_new(
    d_q, q, g, lse, delta, at, first, last, keys, values, options, D: tl.constexpr, PAD: tl.constexpr,
    N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    left, _, scale, softcap = options
    for begin in range(first, last, N):
        j = begin + tl.arange(0, N)
        k = load_rows(keys[0], j, keys[1], keys[2], j < last, D, PAD).to(q.dtype)
        v = load_rows(values[0], j, values[1], values[2], j < last, D, PAD).to(q.dtype)
        see = (j[None, :] < last) & (j[None, :] <= at[:, None])
        if WINDOW:
            see = see & (j[None, :] >= at[:, None] - left)
        d_q = _dq_block(d_q, q, g, lse, delta, k, v, see, scale, softcap, CAPPED, MASK)
    return d_q


@triton.jit(do_not_specialize=["total", "total_k", "n", "n_slots", "each", "each_k", "capacity", "left", "n_tiles"])
def _cached_dq(
    q_ptr, k_ptr, v_ptr, g_ptr, kc_ptr, vc_ptr, ks_ptr, vs_ptr, table_ptr, slots_ptr, positions_ptr, cu_q_ptr,
    cu_k_ptr, d_q_ptr, lse_ptr, delta_ptr, row_scale_ptr, total, total_k, n, n_slots, each, each_k, capacity,
    page_size, n_pages, left, K, G, n_tiles, pieces, chunk, scale, softcap, stride_qt, stride_qh, stride_qd,
    stride_ks, stride_kh, stride_kd, stride_vs, stride_vh, stride_vd, stride_gt, stride_gh, stride_gd, stride_kcp,
    stride_kcr, stride_kch, stride_vcp, stride_vcr, stride_vch, stride_ksp, stride_ksr, stride_ksh, stride_vsp,
    stride_vsr, stride_vsh, stride_table, D: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PAGED: tl.constexpr, QUANTIZED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """The forward's tiles and pieces; the pieces' float32 sums are added up afterwards."""
    pid = tl.program_id(0)
    kh = pid % K
    piece = pid // K % pieces
    tile = n_tiles - 1 - pid // (K * pieces)
    run, first = find_run(tile, cu_q_ptr, n, total, each, G, M)
    live, slot, start, prefix, q0, Tq, k0, Tk = place(
        run, slots_ptr, positions_ptr, cu_q_ptr, cu_k_ptr, n, n_slots, total, total_k, each, each_k, capacity
    )
    f = first + tl.arange(0, M)
    t = f // G
    group = f % G
    inside = (t < Tq) & (run <= n)
    h = kh * G + group
    H = K * G
    t_high = tl.minimum((first + M - 1) // G, Tq - 1)
    least, low, high, new_low, new_high = reach(first, prefix, start, left, first // G, t_high, Tq, Tk, N, WINDOW)
    if SPLIT:
        low_piece = low // chunk * chunk + (piece - 1) * chunk
        end = tl.where(piece < pieces - 1, tl.minimum(high, low_piece + chunk), high)
        high = tl.where(piece > 0, end, 0)
        low = tl.maximum(low, low_piece)
        new_high = tl.where(piece == 0, new_high, 0)
    high = tl.where(live, high, 0)
    new_high = tl.where(live, new_high, 0)
    mine = inside & live
    head = kh.to(tl.int64) * G
    q = load_heads(
        q_ptr + q0.to(tl.int64) * stride_qt + head * stride_qh, t, group, stride_qt, stride_qh, stride_qd, mine, D, PAD
    )
    g = load_heads(
        g_ptr + q0.to(tl.int64) * stride_gt + head * stride_gh, t, group, stride_gt, stride_gh, stride_gd, mine, D, PAD
    )
    row = h.to(tl.int64) * total + q0 + t
    lse = tl.load(lse_ptr + row, mask=mine, other=0.0)
    units: tl.constexpr = 1.0 if q.dtype == tl.float32 else LOG2E
    lse = tl.where(lse == -float("inf"), 0.0, lse) * units  # a row that sees nothing: every block masks it
    delta = tl.load(delta_ptr + row, mask=mine, other=0.0)
    unit = tl.full([M], 1.0, tl.float32)
    if SCALED:
        unit = tl.load(row_scale_ptr + row, mask=mine, other=1.0)
        g = (g.to(tl.float32) * unit[:, None]).to(tl.float16)
        delta *= unit
    d_q = tl.zeros([M, PAD], tl.float32)
    at = Tk - Tq + t

    keys, values, table = cache_of(
        slot, kh, kc_ptr, vc_ptr, ks_ptr, vs_ptr, table_ptr, slots_ptr, page_size, n_pages, stride_kcp, stride_kcr,
        stride_kch, stride_vcp, stride_vcr, stride_vch, stride_ksp, stride_ksr, stride_ksh, stride_vsp, stride_vsr,
        stride_vsh, stride_table, PAGED, QUANTIZED,
    )  # fmt: skip
    options = (left, least, scale, softcap)
    if QUANTIZED and q.dtype == tl.bfloat16:
        q, q_scale = as_float16(q, scale)
        options = (left, least, q_scale, softcap)
    middle = low
    if not WINDOW:
        middle = tl.maximum(low, tl.minimum(high, start + Tk - Tq + first // G + 1) // N * N)
        d_q = _dq_prefix(
            d_q, q, g, lse, delta, start + at, low, middle, keys, values, table, options, D, PAD, N, PAGED, QUANTIZED,
            WINDOW, CAPPED, False,
        )  # fmt: skip
    d_q = _dq_prefix(
        d_q, q, g, lse, delta, start + at, middle, high, keys, values, table, options, D, PAD, N, PAGED, QUANTIZED,
        WINDOW, CAPPED, True,
    )  # fmt: skip
    keys = (k_ptr + k0.to(tl.int64) * stride_ks + kh.to(tl.int64) * stride_kh, stride_ks, stride_kd)
    values = (v_ptr + k0.to(tl.int64) * stride_vs + kh.to(tl.int64) * stride_vh, stride_vs, stride_vd)
    middle = new_low
    if not WINDOW:
        middle = tl.maximum(tl.minimum(new_high, Tk - Tq + first // G + 1), 0) // N * N
        d_q = _dq_new(
            d_q, q, g, lse, delta, at, new_low, middle, keys, values, options, D, PAD, N, WINDOW, CAPPED, False
        )
    d_q = _dq_new(d_q, q, g, lse, delta, at, middle, new_high, keys, values, options, D, PAD, N, WINDOW, CAPPED, True)
    to = (q0 + t).to(tl.int64) * H + h
    if SPLIT:
        to += piece.to(tl.int64) * total * H
    store_heads(d_q_ptr, to, inside, d_q * (scale / unit)[:, None], D, PAD)


@triton.jit
def _dkdv_rows(
    d_k, d_v, k, v, j, q_ptr, g_ptr, lse_ptr, delta_ptr, row_scale_ptr, first, last, offset, left, scale, softcap,
    stride_qt, stride_qd, stride_gt, stride_gd, D: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr, SCALED: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    for begin in range(first, last, M):
        t = begin + tl.arange(0, M)
        ok = t < last
        q = load_rows(q_ptr, t, stride_qt, stride_qd, ok, D, PAD)
        lse = tl.load(lse_ptr + t, mask=ok, other=0.0) * (1.0 if k.dtype == tl.float32 else LOG2E)
        s = scores(k, q, scale, softcap, CAPPED)
        p = power(s - lse[None, :], q.dtype)
        if MASK:
            see = ok[None, :] & (j[:, None] <= t[None, :] + offset)
            if WINDOW:
                see = see & (j[:, None] >= t[None, :] + offset - left)
            p = tl.where(see, p, 0.0)
        g = load_rows(g_ptr, t, stride_gt, stride_gd, ok, D, PAD)
        if SCALED:
            unit = tl.load(row_scale_ptr + t, mask=ok, other=1.0)
            g = (g.to(tl.float32) * unit[:, None]).to(q.dtype)
        if NEED_V:
            d_v += dot(p.to(g.dtype), g)
        if NEED_K:
            delta = tl.load(delta_ptr + t, mask=ok, other=0.0)
            if SCALED:
                delta *= unit
            d_s = p * (dot(v, tl.trans(g)) - delta[None, :]) * _slope(s, softcap, q.dtype, CAPPED)
            d_k += dot(d_s.to(q.dtype), q)
    return d_k, d_v


@triton.jit(do_not_specialize=["total", "total_k", "n", "n_slots", "each", "each_k", "capacity", "left"])
def _cached_dkdv(
    q_ptr, k_ptr, v_ptr, g_ptr, slots_ptr, positions_ptr, cu_q_ptr, cu_k_ptr, d_k_ptr, d_v_ptr, lse_ptr, delta_ptr,
    row_scale_ptr, run_scale_ptr, total, total_k, n, n_slots, each, each_k, capacity, left, K, G, scale,
    softcap, stride_qt, stride_qh, stride_qd, stride_ks, stride_kh, stride_kd, stride_vs, stride_vh, stride_vd,
    stride_gt, stride_gh, stride_gd, D: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One tile of a run's new keys of one key head: all query heads of its group in turn, so without atomics."""
    pid = tl.program_id(0)
    kh = pid % K
    run, first = find_run(pid // K, cu_k_ptr, n, total_k, each_k, 1, N)
    live, _, _, _, q0, Tq, k0, Tk = place(
        run, slots_ptr, positions_ptr, cu_q_ptr, cu_k_ptr, n, n_slots, total, total_k, each, each_k, capacity
    )
    j = first + tl.arange(0, N)
    inside = (j < Tk) & (run <= n)
    offset = Tk - Tq  # query row t sits at new key t + offset
    t_low = tl.maximum(first - offset, 0)
    t_high = Tq
    if WINDOW:
        t_high = tl.minimum(Tq, first + N - 1 - offset + left + 1)
    t_high = tl.where(live, t_high, 0)
    middle = t_low + tl.cdiv(tl.maximum(first + N - 1 - offset - t_low, 0), M) * M  # from here every row sees every key
    middle = t_high if WINDOW else tl.minimum(middle, t_high)
    k_ptr += k0.to(tl.int64) * stride_ks + kh.to(tl.int64) * stride_kh
    v_ptr += k0.to(tl.int64) * stride_vs + kh.to(tl.int64) * stride_vh
    k = load_rows(k_ptr, j, stride_ks, stride_kd, inside & live, D, PAD)
    v = load_rows(v_ptr, j, stride_vs, stride_vd, inside & live, D, PAD)
    d_k = tl.zeros([N, PAD], tl.float32)
    d_v = tl.zeros([N, PAD], tl.float32)
    unit = tl.sum(tl.zeros([N], tl.float32), 0) + 1.0  # the power of two that d_k and d_v carry at the moment
    for group in range(G):
        h = (kh * G + group).to(tl.int64)
        if SCALED:
            next_unit = tl.load(run_scale_ptr + run.to(tl.int64) * K * G + h, mask=run < n, other=1.0)
            d_k *= next_unit / unit
            d_v *= next_unit / unit
            unit = next_unit
        qs_ptr = q_ptr + q0.to(tl.int64) * stride_qt + h * stride_qh
        gs_ptr = g_ptr + q0.to(tl.int64) * stride_gt + h * stride_gh
        at = h * total + q0
        d_k, d_v = _dkdv_rows(
            d_k, d_v, k, v, j, qs_ptr, gs_ptr, lse_ptr + at, delta_ptr + at, row_scale_ptr + at, t_low, middle, offset,
            left, scale, softcap, stride_qt, stride_qd, stride_gt, stride_gd, D, PAD, M, WINDOW, CAPPED, NEED_K,
            NEED_V, SCALED, True,
        )  # fmt: skip
        d_k, d_v = _dkdv_rows(
            d_k, d_v, k, v, j, qs_ptr, gs_ptr, lse_ptr + at, delta_ptr + at, row_scale_ptr + at, middle, t_high,
            offset, left, scale, softcap, stride_qt, stride_qd, stride_gt, stride_gd, D, PAD, M, WINDOW, CAPPED,
            NEED_K, NEED_V, SCALED, False,
        )  # fmt: skip
    to = (k0 + j).to(tl.int64) * K + kh
    if NEED_K:
        store_heads(d_k_ptr, to, inside, d_k * (scale / unit), D, PAD)
    if NEED_V:
        store_heads(d_v_ptr, to, inside, d_v / unit, D, PAD)


def backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, inputs: Inputs, need_q: bool, need_k: bool,
    need_v: bool, need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, sinks = inputs.q, inputs.k, inputs.v, inputs.sinks
    (total, H, D), PAD = q.shape, inputs.PAD
    shapes = ((q, need_q), (k, need_k), (v, need_v))
    d_q, d_k, d_v = (torch.empty(t.shape if need else 0, dtype=t.dtype, device=t.device) for t, need in shapes)
    if lse.numel() == 0:
        return d_q, d_k.zero_(), d_v.zero_(), lse.new_empty(0) if sinks is None else torch.zeros_like(sinks)
    out, lse = out.contiguous(), lse.contiguous()
    delta = torch.empty_like(lse)
    scaled = q.dtype == torch.float16 or (q.dtype == torch.bfloat16 and inputs.k_scale is not None)
    row_scale = largest = run_scale = delta  # only float16 products read them
    if scaled:
        row_scale, largest = torch.empty_like(lse), torch.empty_like(lse)
        run_scale = lse.new_empty((max(inputs.runs, 1), H))
    places = inputs.places()
    upstream = {"g_ptr": d_out, **dict(zip(("stride_gt", "stride_gh", "stride_gd"), d_out.stride()))}
    saved = dict(lse_ptr=lse, delta_ptr=delta, row_scale_ptr=row_scale, SCALED=scaled)
    with on(q):
        rows = max(1, min(64, route.ROW_PRODUCTS // PAD))
        strides = (0, 0) if d_lse is None else d_lse.stride()
        _cached_rows[(cdiv(total, rows) * H,)](
            d_out, out, d_lse, delta, largest, total, H, *d_out.stride(), *strides, D=D, PAD=PAD, M=rows, SCALED=scaled
        )
        if scaled and inputs.runs:
            _cached_range[(inputs.runs * H,)](
                largest, row_scale, run_scale, places["cu_q_ptr"], total, places["each"], H, BLOCK=1024
            )
        if (need_k or need_v) and len(k):
            cut = route.tile("dkdv", q.dtype, D)
            each = -(-places["each_k"] // cut.N)
            tiles = inputs.runs * each if inputs.cu_q is None else -(-len(k) // cut.N) + inputs.runs + 1
            _cached_dkdv[(tiles * inputs.K,)](
                **places, **inputs.options(), **inputs.new_rows(), **upstream, **saved, run_scale_ptr=run_scale,
                d_k_ptr=d_k, d_v_ptr=d_v, K=inputs.K, G=H // inputs.K, M=cut.M, N=cut.N, NEED_K=need_k,
                NEED_V=need_v, num_warps=cut.warps, num_stages=cut.stages,
            )  # fmt: skip
        if need_q:
            plan = inputs.plan("dq")
            to = d_q
            if plan.pieces > 1:
                to = torch.empty((plan.pieces, *d_q.shape), dtype=torch.float32, device=q.device)
            _cached_dq[(plan.programs,)](
                **inputs.arguments(plan), **upstream, **saved, d_q_ptr=to, SPLIT=plan.pieces > 1
            )
            if plan.pieces > 1:
                d_q.copy_(to.sum(0))
    d_sinks = lse.new_empty(0)
    if sinks is not None:
        d_sinks = spec.sink_gradient(sinks, lse, delta) if need_sinks else sinks.new_empty(0)
    return d_q, d_k, d_v, d_sinks
