"""dK and dV in Triton: a tile of keys of one key head walks the query rows that see it, head after head."""

import triton
import triton.language as tl

from ..._dot import dot
from . import masks, scores
from .portable_launch import SIZES


@triton.jit
def _dkdv_rows(
    d_k, d_v, k, v, q_ptr, g_ptr, lse_ptr, delta_ptr, row_scale_ptr, bias_ptr, q_at, g_at, j, lo, hi, first, blocks,
    gap_at, gap, least, last, T, S, scale, cap, seed_ptr, threshold, inv_keep, head, key, stride_qt, stride_gt,
    stride_bt, stride_bs, D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, UNIT: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    for n in range(blocks):
        start = first + n * M
        if MASK:
            start += tl.where(n >= gap_at, gap, 0) * M
        i = start + tl.arange(0, M)
        ok = (i >= least) & (i < last)
        q = scores.load(q_ptr, start, q_at, stride_qt, ok, D, PAD, UNIT, MASK)
        lse = scores.load_lse(lse_ptr, i, ok)
        g = scores.load(g_ptr, start, g_at, stride_gt, ok, DV, PAD_V, UNIT, MASK)
        s = dot(k, tl.trans(q))
        if NEED_K:  # both products are under way while the exponentials are taken
            d_p = dot(v, tl.trans(g))
        s *= scale
        if cap is not None:
            t = scores.tanh(s)
            s = t * cap
        if bias_ptr is not None:
            s = scores.add_bias(s, bias_ptr, stride_bt, stride_bs, i[None, :], j[:, None], T, S)
        p = tl.exp2(s - lse[None, :])
        if MASK:
            p = tl.where((i[None, :] >= lo[:, None]) & (i[None, :] < hi[:, None]), p, 0.0)
        if seed_ptr is not None:
            keep = tl.trans(scores.kept(seed_ptr, threshold, head, i, key, N))
        if NEED_V:
            weight = p
            if seed_ptr is not None:
                weight = tl.where(keep, p, 0.0)
            d_v += dot(weight.to(g.dtype), g)
        if NEED_K:
            delta = tl.load(delta_ptr + i, mask=ok, other=0.0)
            if seed_ptr is not None:
                d_p = tl.where(keep, d_p * inv_keep, 0.0)
            if row_scale_ptr is not None:  # a power of two a row keeps dS in float16's range
                row_scale = tl.load(row_scale_ptr + i, mask=ok, other=1.0)
                d_s = p * (d_p * row_scale[None, :] - (delta * row_scale)[None, :])
            else:
                d_s = p * (d_p - delta[None, :])
            if cap is not None:
                d_s *= 1.0 - t * t
            d_k += dot(d_s.to(q.dtype), q)
    return d_k, d_v


@triton.jit(do_not_specialize=(*SIZES, "key_start"))
def attention_dkdv(
    q_ptr, k_ptr, v_ptr, g_ptr, d_k_ptr, d_v_ptr, lse_ptr, delta_ptr, row_scale_ptr, exponent_ptr, softmax_scale,
    key_start, cu_q_ptr, cu_k_ptr, k_lens_ptr, bias_ptr, seed_ptr, B, T, S, H, K, n_tiles, group, n_docs, steps, left,
    right, scale, cap, threshold, inv_keep, stride_qb, stride_qt: tl.constexpr, stride_qh, stride_qd,
    stride_kb, stride_ks: tl.constexpr, stride_kh, stride_kd, stride_vb, stride_vs: tl.constexpr, stride_vh, stride_vd,
    stride_gb, stride_gt: tl.constexpr, stride_gh, stride_gd, stride_bb, stride_bh, stride_bt, stride_bs,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr,
):  # fmt: skip
    """Gradients of the key rows from key_start on; all heads of a group in one program, so that no sum needs atomics.
    The first keys of a causal mask are seen by the most rows and start first."""
    tile, head = masks.place(tl.program_id(0), n_tiles, B * K, group)
    b = (head // K).to(tl.int64)
    kh = (head % K).to(tl.int64)
    key = key_start // 4 * 4 + tile * N
    j = key + tl.arange(0, N)
    doc, exists, lo, hi = masks.rows_of(
        j, T, S, cu_q_ptr, cu_k_ptr, k_lens_ptr, n_docs, steps, (head // K).to(tl.int32), left, right
    )
    exists &= j >= key_start
    hi = tl.where(exists, hi, lo)
    seen = hi > lo
    first, blocks, gap_at, gap, least, last = masks.span(lo, hi, exists, M, 1)
    k_at = scores.offsets(N, stride_ks, stride_kd, PAD, UNIT, WIDE)
    v_at = scores.offsets(N, stride_vs, stride_vd, PAD_V, UNIT, WIDE)
    k = scores.load(k_ptr + (b * stride_kb + kh * stride_kh) * UNIT, key, k_at, stride_ks, seen, D, PAD, UNIT, True)
    v = scores.load(v_ptr + (b * stride_vb + kh * stride_vh) * UNIT, key, v_at, stride_vs, seen, DV, PAD_V, UNIT, True)
    q_at = scores.offsets(M, stride_qt, stride_qd, PAD, UNIT, WIDE)
    g_at = scores.offsets(M, stride_gt, stride_gd, PAD_V, UNIT, WIDE)
    d_k = tl.zeros([N, PAD], tl.float32)
    d_v = tl.zeros([N, PAD_V], tl.float32)
    unit = tl.full([N], 1.0, tl.float32)  # the power of two that d_k carries at the moment
    for g in range(H // K):
        h = kh * (H // K) + g
        at = (b * H + h) * T
        q_head = q_ptr + (b * stride_qb + h * stride_qh) * UNIT
        g_head = g_ptr + (b * stride_gb + h * stride_gh) * UNIT
        bias_head = None
        if bias_ptr is not None:
            bias_head = bias_ptr + b * stride_bb + h * stride_bh
        row_scale_head = None
        if row_scale_ptr is not None:
            row_scale_head = row_scale_ptr + at
            next_unit = scores.power_of_two(tl.load(exponent_ptr + doc * H + h, mask=seen, other=0))
            d_k *= (next_unit / unit)[:, None]
            unit = next_unit
        d_k, d_v = _dkdv_rows(
            d_k, d_v, k, v, q_head, g_head, lse_ptr + at, delta_ptr + at, row_scale_head, bias_head, q_at, g_at, j,
            lo, hi, first, blocks, gap_at, gap, least, last, T, S, scale, cap, seed_ptr, threshold, inv_keep,
            b * H + h, key, stride_qt, stride_gt, stride_bt, stride_bs, D, DV, PAD, PAD_V, M, N, UNIT, NEED_K, NEED_V,
            True,
        )  # fmt: skip
        d_k, d_v = _dkdv_rows(
            d_k, d_v, k, v, q_head, g_head, lse_ptr + at, delta_ptr + at, row_scale_head, bias_head, q_at, g_at, j,
            lo, hi, first + gap_at * M, gap, 0, 0, least, last, T, S, scale, cap, seed_ptr, threshold, inv_keep,
            b * H + h, key, stride_qt, stride_gt, stride_bt, stride_bs, D, DV, PAD, PAD_V, M, N, UNIT, NEED_K, NEED_V,
            False,
        )  # fmt: skip
    row = j - key_start
    ok = (j >= key_start) & (j < S)
    rows = b * (S - key_start) * K + kh
    if NEED_K:
        d_k = tl.where(seen[:, None], d_k * (softmax_scale / unit)[:, None], 0.0)
        scores.store(d_k_ptr + rows * D, row, K * D, ok, d_k, D, PAD)
    if NEED_V:
        if seed_ptr is not None:
            d_v *= inv_keep
        d_v = tl.where(seen[:, None], d_v, 0.0)
        scores.store(d_v_ptr + rows * DV, row, K * DV, ok, d_v, DV, PAD_V)
