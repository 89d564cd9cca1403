"""Forward over the cached prefix, then over the new keys; split along the prefix where rows do not fill the GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dot import dot
from .._launch import on
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

JOINED = 4096  # elements of partial results that a program joins at once


@triton.jit
def _weigh(total, m, q, k, see, scale, softcap, CAPPED: tl.constexpr, MASK: tl.constexpr):
    """One block of keys of the online softmax: (its weights, by how much what came before shrinks, total, m)."""
    s = scores(q, k, scale, softcap, CAPPED)
    if MASK:
        s = tl.where(see, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(m_new == -float("inf"), 0.0, m_new) if MASK else m_new
    p = power(s - shift[:, None], q.dtype)
    shrink = power(m - shift, q.dtype)
    return p, shrink, total * shrink + tl.sum(p, 1), m_new


@triton.jit
def over_prefix(
    acc, total, m, q, at, first, last, keys, values, table, options,
    D: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr, PAGED: tl.constexpr, QUANTIZED: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Float rows go through the compiler's pipeline. Codes are fetched a block ahead into registers instead: what it
    would leave in shared memory as bytes can only be transposed byte by byte."""
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
            k, k_scale = fetch(keys, page, row, ok, D, PAD, True)
            p, shrink, total, m = _weigh(total, m, q, k_now, see, scale, softcap, CAPPED, MASK)
            v_now = dequantize(v, v_scale, q.dtype, PAD, True)
            v, v_scale = fetch(values, page, row, ok, D, PAD, True)
            acc = acc * shrink[:, None] + dot(p.to(q.dtype), v_now)
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
            p, shrink, total, m = _weigh(total, m, q, k.to(q.dtype), see, scale, softcap, CAPPED, MASK)
            acc = acc * shrink[:, None] + dot(p.to(q.dtype), v.to(q.dtype))
    return acc, total, m


@triton.jit
def _over_new(
    acc, total, m, q, at, first, last, keys, values, options, D: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`at` counts from the first new key; keys and values are (pointer, row stride, column stride)."""
    left, _, scale, softcap = options
    for begin in tl.range(first, last, N, num_stages=STAGES):
        j = begin + tl.arange(0, N)
        k = load_rows(keys[0], j, keys[1], keys[2], j < last, D, PAD).to(q.dtype)
        v = load_rows(values[0], j, values[1], values[2], j < last, D, PAD).to(q.dtype)
        see = (j[None, :] < last) & (j[None, :] <= at[:, None])
        if WINDOW:
            see = see & (j[None, :] >= at[:, None] - left)
        p, shrink, total, m = _weigh(total, m, q, k, see, scale, softcap, CAPPED, MASK)
        acc = acc * shrink[:, None] + dot(p.to(v.dtype), v)
    return acc, total, m


@triton.jit(do_not_specialize=["total", "total_k", "n", "n_slots", "each", "each_k", "capacity", "left", "n_tiles"])
def _cached_fwd(
    q_ptr, k_ptr, v_ptr, kc_ptr, vc_ptr, ks_ptr, vs_ptr, table_ptr, slots_ptr, positions_ptr, cu_q_ptr, cu_k_ptr,
    sinks_ptr, out_ptr, lse_ptr, total, total_k, n, n_slots, each, each_k, capacity, page_size, n_pages, left, K, G,
    n_tiles, pieces, chunk, scale, softcap, stride_qt, stride_qh, stride_qd, stride_ks, stride_kh, stride_kd,
    stride_vs, stride_vh, stride_vd, stride_kcp, stride_kcr, stride_kch, stride_vcp, stride_vcr, stride_vch,
    stride_ksp, stride_ksr, stride_ksh, stride_vsp, stride_vsr, stride_vsh, stride_table,
    D: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PAGED: tl.constexpr,
    QUANTIZED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr,
    DECODE: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one key head, over every key (or SPLIT: piece 0 the new keys, the others a chunk of
    the prefix each; what they make is normalised and joined by _cached_join). Longest tiles of a run start first."""
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
    g = f % G
    inside = (t < Tq) & (run <= n)
    h = kh * G + g
    H = K * G
    t_high = tl.minimum((first + M - 1) // G, Tq - 1)
    least, low, high, new_low, new_high = reach(first, prefix, start, left, first // G, t_high, Tq, Tk, N, WINDOW)
    if SPLIT:
        low_piece = low // chunk * chunk + (piece - 1) * chunk
        end = tl.where(piece < pieces - 1, tl.minimum(high, low_piece + chunk), high)  # the last takes what is left
        high = tl.where(piece > 0, end, 0)
        low = tl.maximum(low, low_piece)
        new_high = tl.where(piece == 0, new_high, 0)
    high = tl.where(live, high, 0)
    new_high = tl.where(live, new_high, 0)
    q = load_heads(
        q_ptr + q0.to(tl.int64) * stride_qt + kh.to(tl.int64) * G * stride_qh, t, g, stride_qt, stride_qh, stride_qd,
        inside & live, D, PAD,
    )  # fmt: skip
    acc = tl.zeros([M, PAD], tl.float32)
    norm = tl.zeros([M], tl.float32)
    m = tl.full([M], -float("inf"), tl.float32)
    at = Tk - Tq + t

    keys, values, table = cache_of(
        slot, kh, kc_ptr, vc_ptr, ks_ptr, vs_ptr, table_ptr, slots_ptr, page_size, n_pages, stride_kcp, stride_kcr,
        stride_kch, stride_vcp, stride_vcr, stride_vch, stride_ksp, stride_ksr, stride_ksh, stride_vsp, stride_vsr,
        stride_vsh, stride_table, PAGED, QUANTIZED,
    )  # fmt: skip
    if QUANTIZED and q.dtype == tl.bfloat16:  # codes become float16 at far less cost, and more exactly
        q, scale = as_float16(q, scale)
    options = (left, least, scale, softcap)
    middle = low  # every row of the tile sees the keys below
    if not WINDOW and not DECODE:
        middle = tl.maximum(low, tl.minimum(high, start + Tk - Tq + first // G + 1) // N * N)
        acc, norm, m = over_prefix(
            acc, norm, m, q, start + at, low, middle, keys, values, table, options, D, PAD, N, PAGED, QUANTIZED, WINDOW,
            CAPPED, False,
        )  # fmt: skip
    acc, norm, m = over_prefix(
        acc, norm, m, q, start + at, middle, high, keys, values, table, options, D, PAD, N, PAGED, QUANTIZED, WINDOW,
        CAPPED, True,
    )  # fmt: skip

    keys = (k_ptr + k0.to(tl.int64) * stride_ks + kh.to(tl.int64) * stride_kh, stride_ks, stride_kd)
    values = (v_ptr + k0.to(tl.int64) * stride_vs + kh.to(tl.int64) * stride_vh, stride_vs, stride_vd)
    middle = new_low
    if not WINDOW and not DECODE:
        middle = tl.maximum(tl.minimum(new_high, Tk - Tq + first // G + 1), 0) // N * N
        acc, norm, m = _over_new(
            acc, norm, m, q, at, new_low, middle, keys, values, options, D, PAD, N, WINDOW, CAPPED, False, None
        )
    acc, norm, m = _over_new(
        acc, norm, m, q, at, middle, new_high, keys, values, options, D, PAD, N, WINDOW, CAPPED, True,
        1 if DECODE else None,
    )  # fmt: skip

    unit: tl.constexpr = 1.0 if q.dtype == tl.float32 else LOG2E
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h, mask=inside & live & (piece == 0), other=-float("inf")) * unit
        m_new = tl.maximum(m, sink)
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        shrink = power(m - shift, q.dtype)
        acc *= shrink[:, None]
        norm = norm * shrink + power(sink - shift, q.dtype)
        m = m_new
    some = norm != 0.0  # a NaN norm is a NaN result
    acc = tl.where(some[:, None], acc / tl.where(some, norm, 1.0)[:, None], 0.0)
    lse = tl.where(some, m / unit + tl.log(tl.where(some, norm, 1.0)), -float("inf"))
    i = q0 + t
    if SPLIT:
        row = (piece.to(tl.int64) * total + i) * H + h
        store_heads(out_ptr, row, inside & some, acc, D, PAD)
        tl.store(lse_ptr + row, lse, mask=inside)
    else:
        store_heads(out_ptr, i.to(tl.int64) * H + h, inside, acc, D, PAD)
        tl.store(lse_ptr + h.to(tl.int64) * total + i, lse, mask=inside)


@triton.jit(do_not_specialize=["total"])
def _cached_join(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, total, H, pieces, D: tl.constexpr, PAD: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """One row and head: pieces in order, weighted by what each is of the softmax. Pieces that saw nothing hold -inf."""
    pid = tl.program_id(0)
    h = pid % H
    i = (pid // H).to(tl.int64)
    col = tl.arange(0, PAD)
    acc = tl.zeros([PAD], tl.float32)
    norm = tl.sum(tl.zeros([P], tl.float32), 0)
    m = norm - float("inf")
    for begin in range(0, pieces, P):
        piece = begin + tl.arange(0, P)
        row = (piece.to(tl.int64) * total + i) * H + h
        part_lse = tl.load(part_lse_ptr + row, mask=piece < pieces, other=-float("inf"))
        some = part_lse != -float("inf")
        part = tl.load(part_ptr + row[:, None] * D + col[None, :], mask=some[:, None] & (col < D)[None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(part_lse, 0))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2((part_lse - shift) * LOG2E)
        shrink = tl.exp2((m - shift) * LOG2E)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        norm = norm * shrink + tl.sum(weight, 0)
        m = m_new
    some = norm != 0.0  # a NaN norm is a NaN result
    acc = tl.where(some, acc / tl.where(some, norm, 1.0), 0.0)
    tl.store(out_ptr + (i * H + h) * D + col, acc.to(out_ptr.dtype.element_ty), mask=col < D)
    tl.store(lse_ptr + h.to(tl.int64) * total + i, tl.where(some, m + tl.log(tl.where(some, norm, 1.0)), -float("inf")))


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, (total, H, D) = inputs.q, inputs.q.shape
    out = torch.empty((total, H, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((H, total), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    plan = inputs.plan("fwd")
    to, to_lse = out, lse
    if plan.pieces > 1:
        to = torch.empty((plan.pieces, total, H, D), dtype=torch.float32, device=q.device)
        to_lse = torch.empty((plan.pieces, total, H), dtype=torch.float32, device=q.device)
    with on(q):
        _cached_fwd[(plan.programs,)](
            **inputs.arguments(plan),
            sinks_ptr=None if inputs.sinks is None else inputs.sinks.contiguous(),
            out_ptr=to,
            lse_ptr=to_lse,
            SPLIT=plan.pieces > 1,
            DECODE=plan.decode,
        )
        if plan.pieces > 1:
            block = max(1, min(16, JOINED // inputs.PAD))
            _cached_join[(total * H,)](to, to_lse, out, lse, total, H, plan.pieces, D=D, PAD=inputs.PAD, P=block)
    return out, lse
