"""Attention forward in Triton: a tile of query rows of one head walks the keys it sees with an online softmax."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._dot import dot
from ..._launch import on
from . import masks, scores
from .portable_launch import SIZES, Call

# A score at or below it counts as hidden; finite, so that no row needs a special case. A power of two: its product
# with the scale is exact, so that in a row that has seen nothing the multiply-add m * scale - round(m * scale) is 0.
LOWEST = tl.constexpr(-(2.0**100))


@triton.jit
def _forward_keys(
    acc, total, m, q, k_ptr, v_ptr, bias_ptr, k_at, v_at, i, lo, hi, first, blocks, gap_at, gap, least, last, T, S,
    scale, cap, seed_ptr, threshold, head, stride_ks, stride_vs, stride_bt, stride_bs, D: tl.constexpr,
    DV: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, FOLD: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """FOLD: scores and their maximum m stay unscaled; the scale is part of one multiply-add inside exp2."""
    for n in range(blocks):
        start = first + n * N
        if MASK:
            start += tl.where(n >= gap_at, gap, 0) * N
        j = start + tl.arange(0, N)
        ok = (j >= least) & (j < last)
        k = scores.load(k_ptr, start, k_at, stride_ks, ok, D, PAD, UNIT, MASK)
        s = dot(q, tl.trans(k))
        if not FOLD:
            s *= scale
            if cap is not None:
                s = scores.tanh(s) * cap
            if bias_ptr is not None:
                s = scores.add_bias(s, bias_ptr, stride_bt, stride_bs, i[:, None], j[None, :], T, S)
        if MASK:
            s = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        if FOLD:
            m_scaled = m_new * scale
            p = tl.exp2(s * scale - m_scaled[:, None])
            shrink = tl.exp2(m * scale - m_scaled)
        else:
            p = tl.exp2(s - m_new[:, None])
            shrink = tl.exp2(m - m_new)
        total = total * shrink + tl.sum(p, 1)
        if seed_ptr is not None:
            p = tl.where(scores.kept(seed_ptr, threshold, head, i, start, N), p, 0.0)
        v = scores.load(v_ptr, start, v_at, stride_vs, ok, DV, PAD_V, UNIT, MASK)
        acc = acc * shrink[:, None] + dot(p.to(v.dtype), v)
        m = m_new
    return acc, total, m


@triton.jit(do_not_specialize=SIZES)
def attention_fwd(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, k_lens_ptr, bias_ptr, sinks_ptr, seed_ptr,
    B, T, S, H, G, n_tiles, group, n_docs, steps, left, right, scale, cap, threshold, inv_keep,
    stride_qb, stride_qt: tl.constexpr, stride_qh, stride_qd, stride_kb, stride_ks: tl.constexpr, stride_kh, stride_kd,
    stride_vb, stride_vs: tl.constexpr, stride_vh, stride_vd, stride_bb, stride_bh, stride_bt, stride_bs,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The tiles with the most keys of a causal mask start first."""
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
    q_ptr += (b * stride_qb + h * stride_qh) * UNIT
    k_ptr += (b * stride_kb + h // G * stride_kh) * UNIT
    v_ptr += (b * stride_vb + h // G * stride_vh) * UNIT
    if bias_ptr is not None:
        bias_ptr += b * stride_bb + h * stride_bh
    q_at = scores.offsets(M, stride_qt, stride_qd, PAD, UNIT, WIDE)
    q = scores.load(q_ptr, tile * M, q_at, stride_qt, hi > lo, D, PAD, UNIT, True)
    k_at = scores.offsets(N, stride_ks, stride_kd, PAD, UNIT, WIDE)
    v_at = scores.offsets(N, stride_vs, stride_vd, PAD_V, UNIT, WIDE)
    acc = tl.zeros([M, PAD_V], tl.float32)
    total = tl.zeros([M], tl.float32)
    m = tl.full([M], LOWEST, tl.float32)
    if sinks_ptr is not None:  # one more score of every row, already summed
        sink = tl.load(sinks_ptr + h).to(tl.float32) + tl.zeros([M], tl.float32)
        sink_score = sink * scores.LOG2E / scale if FOLD else sink * scores.LOG2E
        m = tl.where(exists, tl.maximum(sink_score, LOWEST), m)
        total = tl.where(exists & (sink > -float("inf")), 1.0, total)
    acc, total, m = _forward_keys(
        acc, total, m, q, k_ptr, v_ptr, bias_ptr, k_at, v_at, i, lo, hi, first + gap_at * N, gap, 0, 0, least, last,
        T, S, scale, cap, seed_ptr, threshold, head, stride_ks, stride_vs, stride_bt, stride_bs, D, DV, PAD, PAD_V, N,
        UNIT, FOLD, False,
    )  # fmt: skip
    acc, total, m = _forward_keys(
        acc, total, m, q, k_ptr, v_ptr, bias_ptr, k_at, v_at, i, lo, hi, first, blocks, gap_at, gap, least, last,
        T, S, scale, cap, seed_ptr, threshold, head, stride_ks, stride_vs, stride_bt, stride_bs, D, DV, PAD, PAD_V, N,
        UNIT, FOLD, True,
    )  # fmt: skip
    live = exists & (total != 0.0)  # a NaN total is a NaN result
    weight = 1.0 / tl.where(live, total, 1.0)
    if seed_ptr is not None:
        weight *= inv_keep
    acc = tl.where(live[:, None], acc * weight[:, None], 0.0)
    if FOLD:
        m *= scale
    lse = tl.where(live, (m + tl.log2(tl.where(live, total, 1.0))) * scores.LN2, -float("inf"))
    scores.store(out_ptr + (b * T * H + h) * DV, i, H * DV, i < T, acc, DV, PAD_V)
    tl.store(lse_ptr + head.to(tl.int64) * T + i, lse, mask=i < T)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None,
    right: int | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = Call(q, k, v, cu_q, cu_k, k_lens, bias, seed, scale, left, right, softcap, dropout_p)
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.empty((*q.shape[:-3], call.H, call.T), dtype=torch.float32, device=q.device)
    tiles, launch = call.cut("fwd", call.T)
    fold = softcap == 0.0 and bias is None and call.scale > 0.0
    with on(q):
        attention_fwd[(tiles * call.B * call.H,)](
            q, k, v, out, lse, sinks_ptr=sinks, G=call.G, group=call.group * call.G, FOLD=fold, **call.arguments,
            **launch,
        )  # fmt: skip
    return out, lse
