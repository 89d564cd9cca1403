"""The bias's gradient in Triton: a tile of the bias walks every score that it was added to, so no sum needs atomics."""

import triton
import triton.language as tl

from ..._dot import dot
from . import masks, scores
from .portable_launch import SIZES


@triton.jit(do_not_specialize=SIZES)
def attention_dbias(
    q_ptr, k_ptr, v_ptr, g_ptr, d_bias_ptr, lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, k_lens_ptr, bias_ptr, seed_ptr,
    B, T, S, H, G, n_tiles, n_docs, steps, left, right, scale, cap, threshold, inv_keep,
    stride_qb, stride_qt, stride_qh, stride_qd, stride_kb, stride_ks, stride_kh, stride_kd,
    stride_vb, stride_vs, stride_vh, stride_vd, stride_gb, stride_gt, stride_gh, stride_gd,
    stride_bb, stride_bh, stride_bt, stride_bs, D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr,
    PAD_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    ALL_B: tl.constexpr, ALL_H: tl.constexpr, ALL_T: tl.constexpr,
):  # fmt: skip
    """ALL_*: the bias is broadcast along that dimension and the program walks all of it. Never along the keys."""
    pid = tl.program_id(0)
    high: tl.constexpr = 1 if ALL_T else M
    tiles_s = tl.cdiv(S, N)
    tiles_t = tl.cdiv(T, M)
    own_t = 1 if ALL_T else tiles_t
    own_h = 1 if ALL_H else H
    tile_s = pid % tiles_s
    tile_t = pid // tiles_s % own_t
    head = pid // tiles_s // own_t % own_h
    batch = pid // tiles_s // own_t // own_h
    key = tile_s * N
    j = key + tl.arange(0, N)
    k_at = scores.offsets(N, stride_ks, stride_kd, PAD, UNIT, WIDE)
    v_at = scores.offsets(N, stride_vs, stride_vd, PAD_V, UNIT, WIDE)
    q_at = scores.offsets(M, stride_qt, stride_qd, PAD, UNIT, WIDE)
    g_at = scores.offsets(M, stride_gt, stride_gd, PAD_V, UNIT, WIDE)
    acc = tl.zeros([M, N], tl.float32)
    walk_h = H if ALL_H else 1
    for outer in range((B if ALL_B else 1) * walk_h):
        b32 = batch + outer // walk_h
        h32 = head + outer % walk_h
        b = tl.cast(b32, tl.int64)
        h = tl.cast(h32, tl.int64)
        at = (b * H + h) * T
        k_head = k_ptr + (b * stride_kb + h // G * stride_kh) * UNIT
        v_head = v_ptr + (b * stride_vb + h // G * stride_vh) * UNIT
        for down in range(tiles_t if ALL_T else 1):
            row = (tile_t + down) * M
            i = row + tl.arange(0, M)
            _, lo, hi = masks.keys_of(i, T, S, cu_q_ptr, cu_k_ptr, k_lens_ptr, n_docs, steps, b32, left, right)
            live = hi > lo
            q = scores.load(
                q_ptr + (b * stride_qb + h * stride_qh) * UNIT, row, q_at, stride_qt, live, D, PAD, UNIT, True
            )
            g = scores.load(
                g_ptr + (b * stride_gb + h * stride_gh) * UNIT, row, g_at, stride_gt, live, DV, PAD_V, UNIT, True
            )
            lse = scores.load_lse(lse_ptr + at, i, live)
            delta = tl.load(delta_ptr + at + i, mask=live, other=0.0)
            see = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
            ok = tl.max(see.to(tl.int32), 0) > 0
            k = scores.load(k_head, key, k_at, stride_ks, ok, D, PAD, UNIT, True)
            v = scores.load(v_head, key, v_at, stride_vs, ok, DV, PAD_V, UNIT, True)
            s = dot(q, tl.trans(k)) * scale
            if cap is not None:
                s = scores.tanh(s) * cap
            bias = bias_ptr + b * stride_bb + h * stride_bh
            s = scores.add_bias(s, bias, stride_bt, stride_bs, i[:, None], j[None, :], T, S)
            d_p = dot(g, tl.trans(v))
            if seed_ptr is not None:
                d_p = tl.where(scores.kept(seed_ptr, threshold, b * H + h, i, key, N), d_p * inv_keep, 0.0)
            acc += tl.where(see, tl.exp2(s - lse[:, None]) * (d_p - delta[:, None]), 0.0)
    if ALL_T:
        acc = tl.sum(acc, 0, keep_dims=True)
    i = tile_t * M + tl.arange(0, high)
    height = 1 if ALL_T else T
    base = (tl.cast(batch, tl.int64) * own_h + head) * height
    at = d_bias_ptr + (base + i)[:, None] * S + j[None, :]
    tl.store(at, acc.to(d_bias_ptr.dtype.element_ty), mask=(i < height)[:, None] & (j < S)[None, :])
