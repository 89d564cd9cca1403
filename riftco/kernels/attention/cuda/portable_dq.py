"""dQ in Triton: a tile of query rows of one head walks the keys it sees."""

import triton
import triton.language as tl

from ..._dot import dot
from . import masks, scores
from .portable_launch import SIZES


@triton.jit
def _dq_keys(
    d_q, q, g, lse, delta, row_scale, k_ptr, v_ptr, bias_ptr, k_at, v_at, i, lo, hi, first, blocks, gap_at, gap, least,
    last, T, S, scale, cap, seed_ptr, threshold, inv_keep, head, stride_ks, stride_vs, stride_bt, stride_bs,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    for n in range(blocks):
        start = first + n * N
        if MASK:
            start += tl.where(n >= gap_at, gap, 0) * N
        j = start + tl.arange(0, N)
        ok = (j >= least) & (j < last)
        k = scores.load(k_ptr, start, k_at, stride_ks, ok, D, PAD, UNIT, MASK)
        v = scores.load(v_ptr, start, v_at, stride_vs, ok, DV, PAD_V, UNIT, MASK)
        s = dot(q, tl.trans(k))
        d_p = dot(g, tl.trans(v))  # under way while the exponentials are taken
        s *= scale
        if cap is not None:
            t = scores.tanh(s)
            s = t * cap
        if bias_ptr is not None:
            s = scores.add_bias(s, bias_ptr, stride_bt, stride_bs, i[:, None], j[None, :], T, S)
        p = tl.exp2(s - lse[:, None])
        if MASK:
            p = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), p, 0.0)
        if seed_ptr is not None:
            d_p = tl.where(scores.kept(seed_ptr, threshold, head, i, start, N), d_p * inv_keep, 0.0)
        if row_scale is not None:  # a power of two a row keeps dS in float16's range; delta has it already
            d_s = p * (d_p * row_scale[:, None] - delta[:, None])
        else:
            d_s = p * (d_p - delta[:, None])
        if cap is not None:
            d_s *= 1.0 - t * t
        d_q += dot(d_s.to(k.dtype), k)
    return d_q


@triton.jit(do_not_specialize=SIZES)
def attention_dq(
    q_ptr, k_ptr, v_ptr, g_ptr, d_q_ptr, lse_ptr, delta_ptr, row_scale_ptr, softmax_scale, cu_q_ptr, cu_k_ptr,
    k_lens_ptr, bias_ptr, seed_ptr, B, T, S, H, G, n_tiles, group, n_docs, steps, left, right, scale, cap, threshold,
    inv_keep, stride_qb, stride_qt: tl.constexpr, stride_qh, stride_qd, stride_kb, stride_ks: tl.constexpr, stride_kh,
    stride_kd, stride_vb, stride_vs: tl.constexpr, stride_vh, stride_vd, stride_gb, stride_gt: tl.constexpr, stride_gh,
    stride_gd, stride_bb, stride_bh, stride_bt, stride_bs, D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr,
    PAD_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """In the forward's order."""
    tile, head = masks.place(tl.program_id(0), n_tiles, B * H, group)
    tile = n_tiles - 1 - tile
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    i = tile * M + tl.arange(0, M)
    exists, lo, hi = masks.keys_of(
        i, T, S, cu_q_ptr, cu_k_ptr, k_lens_ptr, n_docs, steps, (head // H).to(tl.int32), left, right
    )
    ALIGN: tl.constexpr = 1 if seed_ptr is None else 4
    first, blocks, gap_at, gap, least, last = masks.span(lo, hi, exists, N, ALIGN)
    live = hi > lo
    q_at = scores.offsets(M, stride_qt, stride_qd, PAD, UNIT, WIDE)
    g_at = scores.offsets(M, stride_gt, stride_gd, PAD_V, UNIT, WIDE)
    q = scores.load(q_ptr + (b * stride_qb + h * stride_qh) * UNIT, tile * M, q_at, stride_qt, live, D, PAD, UNIT, True)
    g = scores.load(
        g_ptr + (b * stride_gb + h * stride_gh) * UNIT, tile * M, g_at, stride_gt, live, DV, PAD_V, UNIT, True
    )
    at = head.to(tl.int64) * T
    lse = scores.load_lse(lse_ptr + at, i, live)
    delta = tl.load(delta_ptr + at + i, mask=live, other=0.0)
    unit = tl.full([M], 1.0, tl.float32)
    row_scale = None
    if row_scale_ptr is not None:
        unit = tl.load(row_scale_ptr + at + i, mask=live, other=1.0)
        row_scale = unit
        delta *= unit
    k_ptr += (b * stride_kb + h // G * stride_kh) * UNIT
    v_ptr += (b * stride_vb + h // G * stride_vh) * UNIT
    if bias_ptr is not None:
        bias_ptr += b * stride_bb + h * stride_bh
    k_at = scores.offsets(N, stride_ks, stride_kd, PAD, UNIT, WIDE)
    v_at = scores.offsets(N, stride_vs, stride_vd, PAD_V, UNIT, WIDE)
    d_q = tl.zeros([M, PAD], tl.float32)
    d_q = _dq_keys(
        d_q, q, g, lse, delta, row_scale, k_ptr, v_ptr, bias_ptr, k_at, v_at, i, lo, hi, first + gap_at * N, gap, 0, 0,
        least, last, T, S, scale, cap, seed_ptr, threshold, inv_keep, head, stride_ks, stride_vs, stride_bt, stride_bs,
        D, DV, PAD, PAD_V, N, UNIT, False,
    )  # fmt: skip
    d_q = _dq_keys(
        d_q, q, g, lse, delta, row_scale, k_ptr, v_ptr, bias_ptr, k_at, v_at, i, lo, hi, first, blocks, gap_at, gap,
        least, last, T, S, scale, cap, seed_ptr, threshold, inv_keep, head, stride_ks, stride_vs, stride_bt, stride_bs,
        D, DV, PAD, PAD_V, N, UNIT, True,
    )  # fmt: skip
    d_q = tl.where(live[:, None], d_q * (softmax_scale / unit)[:, None], 0.0)
    scores.store(d_q_ptr + (b * T * H + h) * D, i, H * D, i < T, d_q, D, PAD)
