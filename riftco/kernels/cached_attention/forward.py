"""Forward over the cached prefix, then over the new keys; split along the prefix where rows do not fill the GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dot import dot
from .._launch import on
from .arguments import Inputs
from .tiles import (
    LN2,
    LOG2E,
    cached_at,
    find_run,
    load_cached,
    load_heads,
    load_rows,
    place,
    reach,
    scores,
    store_heads,
)

JOINED = 4096  # elements of partial results that a program joins at once


@triton.jit
def _attend(acc, total, m, q, k, v, see, scale, softcap, CAPPED: tl.constexpr, MASK: tl.constexpr):
    """One block of keys of the online softmax."""
    s = scores(q, k, scale, softcap, CAPPED)
    if MASK:
        s = tl.where(see, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(m_new == -float("inf"), 0.0, m_new) if MASK else m_new
    p = tl.exp2(s - shift[:, None])
    shrink = tl.exp2(m - shift)
    acc = acc * shrink[:, None] + dot(p.to(v.dtype), v)
    return acc, total * shrink + tl.sum(p, 1), m_new


@triton.jit
def _over_prefix(
    acc, total, m, q, at, first, last, kc_ptr, vc_ptr, ks_ptr, vs_ptr, table_ptr, page_size, n_pages,
    stride_kp, stride_kr, stride_vp, stride_vr, stride_ksp, stride_ksr, stride_vsp, stride_vsr, left, scale, softcap,
    D: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr, PAGED: tl.constexpr, QUANTIZED: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    for begin in range(first, last, N):
        j = begin + tl.arange(0, N)
        ok = j < last
        page, row = cached_at(j, ok, table_ptr, page_size, n_pages, PAGED)
        k = load_cached(
            kc_ptr, ks_ptr, page, row, ok, stride_kp, stride_kr, stride_ksp, stride_ksr, q.dtype, D, PAD, QUANTIZED
        )
        v = load_cached(
            vc_ptr, vs_ptr, page, row, ok, stride_vp, stride_vr, stride_vsp, stride_vsr, q.dtype, D, PAD, QUANTIZED
        )
        see = ok[None, :] & (j[None, :] <= at[:, None])
        if WINDOW:
            see = see & (j[None, :] >= at[:, None] - left)
        acc, total, m = _attend(acc, total, m, q, k, v, see, scale, softcap, CAPPED, MASK)
    return acc, total, m


@triton.jit
def _over_new(
    acc, total, m, q, at, first, last, k_ptr, v_ptr, stride_ks, stride_kd, stride_vs, stride_vd, left, scale, softcap,
    D: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """`at` counts from the first new key."""
    for begin in range(first, last, N):
        j = begin + tl.arange(0, N)
        k = load_rows(k_ptr, j, stride_ks, stride_kd, j < last, D, PAD)
        v = load_rows(v_ptr, j, stride_vs, stride_vd, j < last, D, PAD)
        see = (j[None, :] < last) & (j[None, :] <= at[:, None])
        if WINDOW:
            see = see & (j[None, :] >= at[:, None] - left)
        acc, total, m = _attend(acc, total, m, q, k, v, see, scale, softcap, CAPPED, MASK)
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
    low, high, new_low, new_high = reach(first, prefix, start, left, first // G, t_high, Tq, Tk, N, WINDOW)
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

    kc_ptr += kh.to(tl.int64) * stride_kch
    vc_ptr += kh.to(tl.int64) * stride_vch
    if QUANTIZED:
        ks_ptr += kh.to(tl.int64) * stride_ksh
        vs_ptr += kh.to(tl.int64) * stride_vsh
    if PAGED:
        table_ptr += slot.to(tl.int64) * stride_table
    else:
        kc_ptr += slot.to(tl.int64) * stride_kcp
        vc_ptr += slot.to(tl.int64) * stride_vcp
        if QUANTIZED:
            ks_ptr += slot.to(tl.int64) * stride_ksp
            vs_ptr += slot.to(tl.int64) * stride_vsp
    shared = high if WINDOW else tl.minimum(high, start + Tk - Tq + first // G + 1)  # every row sees the keys below
    middle = low if WINDOW else tl.maximum(shared, 0) // N * N
    acc, norm, m = _over_prefix(
        acc, norm, m, q, start + at, low, middle, kc_ptr, vc_ptr, ks_ptr, vs_ptr, table_ptr, page_size, n_pages,
        stride_kcp, stride_kcr, stride_vcp, stride_vcr, stride_ksp, stride_ksr, stride_vsp, stride_vsr, left, scale,
        softcap, D, PAD, N, PAGED, QUANTIZED, WINDOW, CAPPED, False,
    )  # fmt: skip
    acc, norm, m = _over_prefix(
        acc, norm, m, q, start + at, tl.maximum(middle, low), high, kc_ptr, vc_ptr, ks_ptr, vs_ptr, table_ptr,
        page_size, n_pages, stride_kcp, stride_kcr, stride_vcp, stride_vcr, stride_ksp, stride_ksr, stride_vsp,
        stride_vsr, left, scale, softcap, D, PAD, N, PAGED, QUANTIZED, WINDOW, CAPPED, True,
    )  # fmt: skip

    k_ptr += k0.to(tl.int64) * stride_ks + kh.to(tl.int64) * stride_kh
    v_ptr += k0.to(tl.int64) * stride_vs + kh.to(tl.int64) * stride_vh
    shared = tl.minimum(new_high, Tk - Tq + first // G + 1)
    middle = new_low if WINDOW else tl.maximum(shared, 0) // N * N
    acc, norm, m = _over_new(
        acc, norm, m, q, at, new_low, middle, k_ptr, v_ptr, stride_ks, stride_kd, stride_vs, stride_vd, left, scale,
        softcap, D, PAD, N, WINDOW, CAPPED, False,
    )  # fmt: skip
    acc, norm, m = _over_new(
        acc, norm, m, q, at, middle, new_high, k_ptr, v_ptr, stride_ks, stride_kd, stride_vs, stride_vd, left, scale,
        softcap, D, PAD, N, WINDOW, CAPPED, True,
    )  # fmt: skip

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h, mask=inside & live & (piece == 0), other=-float("inf")) * LOG2E
        m_new = tl.maximum(m, sink)
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        shrink = tl.exp2(m - shift)
        acc *= shrink[:, None]
        norm = norm * shrink + tl.exp2(sink - shift)
        m = m_new
    some = norm > 0.0
    acc = tl.where(some[:, None], acc / tl.where(some, norm, 1.0)[:, None], 0.0)
    lse = tl.where(some, m * LN2 + tl.log(tl.where(some, norm, 1.0)), -float("inf"))
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
        some = part_lse > -float("inf")
        part = tl.load(part_ptr + row[:, None] * D + col[None, :], mask=some[:, None] & (col < D)[None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(part_lse, 0))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2((part_lse - shift) * LOG2E)
        shrink = tl.exp2((m - shift) * LOG2E)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        norm = norm * shrink + tl.sum(weight, 0)
        m = m_new
    some = norm > 0.0
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
            **inputs.arguments(plan), sinks_ptr=inputs.sinks, out_ptr=to, lse_ptr=to_lse, SPLIT=plan.pieces > 1
        )
        if plan.pieces > 1:
            block = max(1, min(16, JOINED // inputs.PAD))
            _cached_join[(total * H,)](to, to_lse, out, lse, total, H, plan.pieces, D=D, PAD=inputs.PAD, P=block)
    return out, lse
