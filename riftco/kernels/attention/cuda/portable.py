"""Attention in Triton: forward, and a backward of a row pass, a dK/dV kernel and a dQ kernel without atomics.

A tile of query rows may hold rows of several documents: each row knows its range of keys (and each key its range of
rows), so thousands of short documents cost no more programs than one long one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._dot import dot
from ..._launch import on
from ..route import ROW_PRODUCTS, route
from ..spec import softmax_scale

NEVER = tl.constexpr(1 << 30)


@triton.jit
def _document(pos, cu_ptr, n_docs, steps):
    """Which document holds row `pos`: the number of starts up to it, less one, by bisection."""
    lo = tl.zeros_like(pos)
    hi = lo + n_docs + 1
    for _ in range(steps):
        mid = (lo + hi) // 2
        open_ = lo < hi
        right = open_ & (tl.load(cu_ptr + mid, mask=open_, other=0) <= pos)
        hi = tl.where(open_ & (right == 0), mid, hi)
        lo = tl.where(right, mid + 1, lo)
    return lo - 1


@triton.jit
def _bounds(pos, of_ptr, T, S, cu_q_ptr, cu_k_ptr, n_docs, steps, batch, PACKED: tl.constexpr):
    """(document, first and last query row, first and last key of it) for each row `pos` of the side `of_ptr`.

    Rows of no document get empty ranges.
    """
    if PACKED:
        doc = _document(pos, of_ptr, n_docs, steps)
        inside = (doc >= 0) & (doc < n_docs)
        # bounds that are not there are moved inside: no foreign memory
        q0 = tl.maximum(tl.load(cu_q_ptr + doc, mask=inside, other=0).to(tl.int32), 0)
        q1 = tl.minimum(tl.load(cu_q_ptr + doc + 1, mask=inside, other=0).to(tl.int32), T)
        k0 = tl.maximum(tl.load(cu_k_ptr + doc, mask=inside, other=0).to(tl.int32), 0)
        k1 = tl.minimum(tl.load(cu_k_ptr + doc + 1, mask=inside, other=0).to(tl.int32), S)
    else:
        q0 = tl.zeros_like(pos)
        k0 = tl.zeros_like(pos)
        q1 = q0 + T
        k1 = k0 + S
        doc = q0 + batch
    return doc, q0, q1, k0, k1


@triton.jit
def _keys_of(i, T, S, cu_q_ptr, cu_k_ptr, n_docs, steps, batch, CAUSAL: tl.constexpr, PACKED: tl.constexpr):
    """(document, lo, hi): query row i sees the keys lo <= j < hi, causal masks ending at the bottom right."""
    doc, _, q1, k0, k1 = _bounds(i, cu_q_ptr, T, S, cu_q_ptr, cu_k_ptr, n_docs, steps, batch, PACKED)
    hi = k1 - (q1 - 1 - i) if CAUSAL else k1
    return doc, k0, tl.where(i < q1, tl.maximum(hi, k0), k0)


@triton.jit
def _rows_of(j, T, S, cu_q_ptr, cu_k_ptr, n_docs, steps, batch, CAUSAL: tl.constexpr, PACKED: tl.constexpr):
    """(document, lo, hi): key j is seen by the query rows lo <= i < hi."""
    doc, q0, q1, _, k1 = _bounds(j, cu_k_ptr, T, S, cu_q_ptr, cu_k_ptr, n_docs, steps, batch, PACKED)
    lo = tl.maximum(q0, q1 - (k1 - j)) if CAUSAL else q0
    return doc, lo, tl.where(j < k1, tl.maximum(q1, lo), lo)


@triton.jit
def _shared_first(lo, hi, exists, BLOCK: tl.constexpr):
    """(first, middle, last) over the ranges of a tile: all its rows share the blocks up to middle, some those up to
    last. Rows that do not exist (the tail of the last tile) count for neither."""
    some = hi > lo
    first = tl.min(tl.where(some, lo, NEVER), 0)
    last = tl.max(tl.where(some, hi, 0), 0)
    shared = tl.min(tl.where(exists, hi, NEVER), 0) - first
    apart = tl.max(tl.where(some, lo, 0), 0) != first  # several documents
    middle = first + tl.where(apart, 0, tl.maximum(shared, 0) // BLOCK * BLOCK)
    return first, tl.minimum(middle, last), last


@triton.jit
def _shared_last(lo, hi, exists, BLOCK: tl.constexpr):
    """The mirror image: some rows of the tile have the blocks up to middle, all share those up to last."""
    some = hi > lo
    first = tl.min(tl.where(some, lo, NEVER), 0)
    last = tl.max(tl.where(some, hi, 0), 0)
    own = tl.max(tl.where(exists, lo, 0), 0) - first
    apart = tl.min(tl.where(exists, hi, NEVER), 0) < last
    middle = tl.where(apart, last, first + tl.maximum(tl.cdiv(own, BLOCK), 0) * BLOCK)
    return first, tl.minimum(middle, last), last


@triton.jit
def _load(ptr, row, stride_row, stride_col, ok, D: tl.constexpr, PAD: tl.constexpr):
    """Rows [len(row), PAD] of a matrix whose rows are D wide; 0 where not ok and in the padding."""
    col = tl.arange(0, PAD)
    at = ptr + row.to(tl.int64)[:, None] * stride_row + col[None, :] * stride_col
    mask = ok[:, None] if D == PAD else ok[:, None] & (col < D)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _store(ptr, row, stride_row, ok, value, D: tl.constexpr, PAD: tl.constexpr):
    col = tl.arange(0, PAD)
    at = ptr + row.to(tl.int64)[:, None] * stride_row + col[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=ok[:, None] & (col < D)[None, :])


@triton.jit
def _fwd_keys(
    acc, total, m, q, k_ptr, v_ptr, first, last, lo, hi, scale, stride_ks, stride_kd, stride_vs, stride_vd,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, N):
        j = start + tl.arange(0, N)
        k = _load(k_ptr, j, stride_ks, stride_kd, j < last, D, PAD)
        s = dot(q, tl.trans(k)) * scale
        if MASK:
            s = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new) if MASK else m_new
        p = tl.exp(s - shift[:, None])
        shrink = tl.exp(m - shift)
        total = total * shrink + tl.sum(p, 1)
        v = _load(v_ptr, j, stride_vs, stride_vd, j < last, DV, PAD_V)
        acc = acc * shrink[:, None] + dot(p.to(v.dtype), v)
        m = m_new
    return acc, total, m


@triton.jit
def _attention_fwd(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, T, S, H, G, n_tiles, n_docs, steps, scale,
    stride_qb, stride_qt, stride_qh, stride_qd, stride_kb, stride_ks, stride_kh, stride_kd,
    stride_vb, stride_vs, stride_vh, stride_vd, D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr,
    PAD_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one head; the tiles with the most keys of a causal mask start first."""
    pid = tl.program_id(0)
    h = (pid % H).to(tl.int64)
    tile = n_tiles - 1 - pid // H % n_tiles
    b = (pid // H // n_tiles).to(tl.int64)
    i = tile * M + tl.arange(0, M)
    _, lo, hi = _keys_of(i, T, S, cu_q_ptr, cu_k_ptr, n_docs, steps, 0, CAUSAL, PACKED)
    first, middle, last = _shared_first(lo, hi, i < T, N)
    q = _load(q_ptr + b * stride_qb + h * stride_qh, i, stride_qt, stride_qd, hi > lo, D, PAD)
    k_ptr += b * stride_kb + h // G * stride_kh
    v_ptr += b * stride_vb + h // G * stride_vh
    acc = tl.zeros([M, PAD_V], tl.float32)
    total = tl.zeros([M], tl.float32)
    m = tl.full([M], -float("inf"), tl.float32)
    acc, total, m = _fwd_keys(
        acc, total, m, q, k_ptr, v_ptr, first, middle, lo, hi, scale, stride_ks, stride_kd, stride_vs, stride_vd,
        D, DV, PAD, PAD_V, N, False,
    )  # fmt: skip
    acc, total, m = _fwd_keys(
        acc, total, m, q, k_ptr, v_ptr, middle, last, lo, hi, scale, stride_ks, stride_kd, stride_vs, stride_vd,
        D, DV, PAD, PAD_V, N, True,
    )  # fmt: skip
    live = hi > lo
    acc = tl.where(live[:, None], acc / tl.where(live, total, 1.0)[:, None], 0.0)
    lse = tl.where(live, m + tl.log(tl.where(live, total, 1.0)), -float("inf"))
    _store(out_ptr + (b * T * H + h) * DV, i, H * DV, i < T, acc, DV, PAD_V)
    tl.store(lse_ptr + (b * H + h) * T + i, lse, mask=i < T)


@triton.jit
def _attention_rows(
    d_out_ptr, out_ptr, delta_ptr, largest_ptr, T, H, n_tiles, stride_gb, stride_gt, stride_gh, stride_gd,
    DV: tl.constexpr, PAD_V: tl.constexpr, M: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """delta = sum(dO O) and, for float16, max |dO| of each row."""
    pid = tl.program_id(0)
    h = (pid % H).to(tl.int64)
    b = (pid // H // n_tiles).to(tl.int64)
    i = pid // H % n_tiles * M + tl.arange(0, M)
    g = _load(d_out_ptr + b * stride_gb + h * stride_gh, i, stride_gt, stride_gd, i < T, DV, PAD_V).to(tl.float32)
    o = _load(out_ptr + (b * T * H + h) * DV, i, H * DV, 1, i < T, DV, PAD_V).to(tl.float32)
    at = (b * H + h) * T + i
    tl.store(delta_ptr + at, tl.sum(g * o, 1), mask=i < T)
    if SCALED:
        tl.store(largest_ptr + at, tl.max(tl.abs(g), 1), mask=i < T)


@triton.jit
def _attention_range(
    largest_ptr, row_scale_ptr, doc_scale_ptr, cu_q_ptr, T, H, PACKED: tl.constexpr, BLOCK: tl.constexpr
):
    """The power of two that brings max |dO| of a document and head into [4, 8), for the document and for its rows."""
    pid = tl.program_id(0)
    h = (pid % H).to(tl.int64)
    doc = (pid // H).to(tl.int64)
    start = doc * 0
    stop = start + T
    base = h * T
    if PACKED:
        start = tl.maximum(tl.load(cu_q_ptr + doc).to(tl.int64), 0)
        stop = tl.minimum(tl.load(cu_q_ptr + doc + 1).to(tl.int64), T)
    else:
        base += doc * H * T
    top = tl.zeros([BLOCK], tl.float32)
    for at in range(start, stop, BLOCK):
        i = at + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(largest_ptr + base + i, mask=i < stop, other=0.0))
    largest = tl.max(top, 0)
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    scale = ((256 - exponent) << 23).to(tl.float32, bitcast=True)  # 2 ** (2 - floor(log2(largest)))
    scale = tl.where((largest > 0.0) & (largest < float("inf")), scale, 1.0)
    tl.store(doc_scale_ptr + doc * H + h, scale)
    for at in range(start, stop, BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(row_scale_ptr + base + i, tl.zeros([BLOCK], tl.float32) + scale, mask=i < stop)


@triton.jit
def _dkdv_rows(
    d_k, d_v, k, v, q_ptr, g_ptr, lse_ptr, delta_ptr, row_scale_ptr, first, last, lo, hi, scale,
    stride_qt, stride_qd, stride_gt, stride_gd, D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr,
    PAD_V: tl.constexpr, M: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr, SCALED: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, M):
        i = start + tl.arange(0, M)
        ok = i < last
        q = _load(q_ptr, i, stride_qt, stride_qd, ok, D, PAD)
        lse = tl.load(lse_ptr + i, mask=ok, other=0.0)
        p = tl.exp(dot(k, tl.trans(q)) * scale - lse[None, :])
        if MASK:
            p = tl.where((i[None, :] >= lo[:, None]) & (i[None, :] < hi[:, None]), p, 0.0)
        g = _load(g_ptr, i, stride_gt, stride_gd, ok, DV, PAD_V)
        if SCALED:
            row_scale = tl.load(row_scale_ptr + i, mask=ok, other=1.0)
            g = (g.to(tl.float32) * row_scale[:, None]).to(q.dtype)
        if NEED_V:
            d_v += dot(p.to(g.dtype), g)
        if NEED_K:
            delta = tl.load(delta_ptr + i, mask=ok, other=0.0)
            if SCALED:
                delta *= row_scale
            d_p = dot(v, tl.trans(g))
            d_s = p * (d_p - delta[None, :])
            d_k += dot(d_s.to(q.dtype), q)
    return d_k, d_v


@triton.jit
def _attention_dkdv(
    q_ptr, k_ptr, v_ptr, g_ptr, d_k_ptr, d_v_ptr, lse_ptr, delta_ptr, row_scale_ptr, doc_scale_ptr, cu_q_ptr, cu_k_ptr,
    T, S, H, K, n_tiles, n_docs, steps, scale, stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_ks, stride_kh, stride_kd, stride_vb, stride_vs, stride_vh, stride_vd,
    stride_gb, stride_gt, stride_gh, stride_gd, D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr,
    PAD_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr,
    SCALED: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one key head: all query heads of its group in turn, so that their sum needs no atomics."""
    pid = tl.program_id(0)
    kh = (pid % K).to(tl.int64)
    b = (pid // K // n_tiles).to(tl.int64)
    j = pid // K % n_tiles * N + tl.arange(0, N)
    doc, lo, hi = _rows_of(j, T, S, cu_q_ptr, cu_k_ptr, n_docs, steps, b.to(tl.int32), CAUSAL, PACKED)
    first, middle, last = _shared_last(lo, hi, j < S, M)
    seen = hi > lo
    k = _load(k_ptr + b * stride_kb + kh * stride_kh, j, stride_ks, stride_kd, seen, D, PAD)
    v = _load(v_ptr + b * stride_vb + kh * stride_vh, j, stride_vs, stride_vd, seen, DV, PAD_V)
    d_k = tl.zeros([N, PAD], tl.float32)
    d_v = tl.zeros([N, PAD_V], tl.float32)
    unit = tl.full([N], 1.0, tl.float32)  # the power of two that d_k and d_v carry at the moment
    for g in range(H // K):
        h = kh * (H // K) + g
        at = (b * H + h) * T
        if SCALED:
            next_unit = tl.load(doc_scale_ptr + doc * H + h, mask=seen, other=1.0)
            d_k *= (next_unit / unit)[:, None]
            d_v *= (next_unit / unit)[:, None]
            unit = next_unit
        d_k, d_v = _dkdv_rows(
            d_k, d_v, k, v, q_ptr + b * stride_qb + h * stride_qh, g_ptr + b * stride_gb + h * stride_gh, lse_ptr + at,
            delta_ptr + at, row_scale_ptr + at, first, middle, lo, hi, scale, stride_qt, stride_qd, stride_gt,
            stride_gd, D, DV, PAD, PAD_V, M, NEED_K, NEED_V, SCALED, True,
        )  # fmt: skip
        d_k, d_v = _dkdv_rows(
            d_k, d_v, k, v, q_ptr + b * stride_qb + h * stride_qh, g_ptr + b * stride_gb + h * stride_gh, lse_ptr + at,
            delta_ptr + at, row_scale_ptr + at, middle, last, lo, hi, scale, stride_qt, stride_qd, stride_gt,
            stride_gd, D, DV, PAD, PAD_V, M, NEED_K, NEED_V, SCALED, False,
        )  # fmt: skip
    if NEED_K:
        _store(d_k_ptr + (b * S * K + kh) * D, j, K * D, j < S, d_k * (scale / unit)[:, None], D, PAD)
    if NEED_V:
        _store(d_v_ptr + (b * S * K + kh) * DV, j, K * DV, j < S, d_v / unit[:, None], DV, PAD_V)


@triton.jit
def _dq_keys(
    d_q, q, g, lse, delta, k_ptr, v_ptr, first, last, lo, hi, scale, stride_ks, stride_kd, stride_vs, stride_vd,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, N):
        j = start + tl.arange(0, N)
        k = _load(k_ptr, j, stride_ks, stride_kd, j < last, D, PAD)
        v = _load(v_ptr, j, stride_vs, stride_vd, j < last, DV, PAD_V)
        p = tl.exp(dot(q, tl.trans(k)) * scale - lse[:, None])
        if MASK:
            p = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), p, 0.0)
        d_p = dot(g, tl.trans(v))
        d_s = p * (d_p - delta[:, None])
        d_q += dot(d_s.to(k.dtype), k)
    return d_q


@triton.jit
def _attention_dq(
    q_ptr, k_ptr, v_ptr, g_ptr, d_q_ptr, lse_ptr, delta_ptr, row_scale_ptr, cu_q_ptr, cu_k_ptr,
    T, S, H, G, n_tiles, n_docs, steps, scale, stride_qb, stride_qt, stride_qh, stride_qd,
    stride_kb, stride_ks, stride_kh, stride_kd, stride_vb, stride_vs, stride_vh, stride_vd,
    stride_gb, stride_gt, stride_gh, stride_gd, D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr,
    PAD_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SCALED: tl.constexpr, CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one head, in the forward's order."""
    pid = tl.program_id(0)
    h = (pid % H).to(tl.int64)
    tile = n_tiles - 1 - pid // H % n_tiles
    b = (pid // H // n_tiles).to(tl.int64)
    i = tile * M + tl.arange(0, M)
    _, lo, hi = _keys_of(i, T, S, cu_q_ptr, cu_k_ptr, n_docs, steps, 0, CAUSAL, PACKED)
    first, middle, last = _shared_first(lo, hi, i < T, N)
    live = hi > lo
    at = (b * H + h) * T + i
    q = _load(q_ptr + b * stride_qb + h * stride_qh, i, stride_qt, stride_qd, live, D, PAD)
    g = _load(g_ptr + b * stride_gb + h * stride_gh, i, stride_gt, stride_gd, live, DV, PAD_V)
    lse = tl.load(lse_ptr + at, mask=live, other=0.0)
    delta = tl.load(delta_ptr + at, mask=live, other=0.0)
    unit = tl.full([M], 1.0, tl.float32)
    if SCALED:
        unit = tl.load(row_scale_ptr + at, mask=live, other=1.0)
        g = (g.to(tl.float32) * unit[:, None]).to(q.dtype)
        delta *= unit
    k_ptr += b * stride_kb + h // G * stride_kh
    v_ptr += b * stride_vb + h // G * stride_vh
    d_q = tl.zeros([M, PAD], tl.float32)
    d_q = _dq_keys(
        d_q, q, g, lse, delta, k_ptr, v_ptr, first, middle, lo, hi, scale, stride_ks, stride_kd, stride_vs, stride_vd,
        D, DV, PAD, PAD_V, N, False,
    )  # fmt: skip
    d_q = _dq_keys(
        d_q, q, g, lse, delta, k_ptr, v_ptr, middle, last, lo, hi, scale, stride_ks, stride_kd, stride_vs, stride_vd,
        D, DV, PAD, PAD_V, N, True,
    )  # fmt: skip
    _store(d_q_ptr + (b * T * H + h) * D, i, H * D, i < T, d_q * (scale / unit)[:, None], D, PAD)


def _sizes(q: Tensor, k: Tensor, cu_q: Tensor | None) -> tuple[int, int, int, int, int, int, int]:
    """(B, T, S, H, K, documents, bisection steps)."""
    B = q.shape[0] if q.dim() == 4 else 1
    docs = B if cu_q is None else len(cu_q) - 1
    return B, q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], docs, (docs + 1).bit_length()


def _strides(t: Tensor) -> tuple[int, ...]:
    """Of batch, row, head and head dim."""
    return t.stride() if t.dim() == 4 else (0, *t.stride())


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    B, T, S, H, K, docs, steps = _sizes(q, k, cu_q)
    D, DV = q.shape[-1], v.shape[-1]
    out = torch.empty((*q.shape[:-1], DV), dtype=q.dtype, device=q.device)
    lse = torch.empty((*q.shape[:-3], H, T), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    way = route(q.dtype, D, DV)
    M, N, warps, stages = way.tiles.fwd
    tiles = triton.cdiv(T, M)
    with on(q):
        _attention_fwd[(tiles * H * B,)](
            q, k, v, out, lse, *_starts(cu_q, cu_k), T, S, H, H // K, tiles, docs, steps,
            softmax_scale(q, scale), *_strides(q), *_strides(k), *_strides(v), D=D, DV=DV, PAD=way.D,
            PAD_V=way.Dv, M=M, N=N, CAUSAL=causal, PACKED=cu_q is not None, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, lse


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None,
    causal: bool, scale: float | None, need_q: bool, need_k: bool, need_v: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    B, T, S, H, K, docs, steps = _sizes(q, k, cu_q)
    D, DV = q.shape[-1], v.shape[-1]
    shapes = ((q, need_q), (k, need_k), (v, need_v))
    d_q, d_k, d_v = (torch.empty(t.shape if need else 0, dtype=t.dtype, device=t.device) for t, need in shapes)
    if lse.numel() == 0:
        exponents = (docs, H) if q.dtype == torch.float16 else (0,)
        return (
            d_q,
            d_k.zero_(),
            d_v.zero_(),
            q.new_empty(0),
            q.new_empty(0),
            torch.empty_like(lse),
            q.new_zeros(exponents).int(),
        )
    way = route(q.dtype, D, DV)
    out, lse = out.contiguous(), lse.contiguous()
    cu_q, cu_k = _starts(cu_q, cu_k)
    scaled, scale = q.dtype == torch.float16, softmax_scale(q, scale)
    delta = torch.empty_like(lse)
    row_scale = largest = doc_scale = delta  # only float16 reads them
    if scaled:
        row_scale, largest, doc_scale = torch.empty_like(lse), torch.empty_like(lse), lse.new_empty((docs, H))
    shared = dict(D=D, DV=DV, PAD=way.D, PAD_V=way.Dv, SCALED=scaled, CAUSAL=causal, PACKED=cu_q is not None)
    strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(d_out))
    with on(q):
        rows = max(1, min(64, ROW_PRODUCTS // way.Dv))
        tiles = triton.cdiv(T, rows)
        _attention_rows[(tiles * H * B,)](
            d_out, out, delta, largest, T, H, tiles, *_strides(d_out), DV=DV, PAD_V=way.Dv, M=rows, SCALED=scaled
        )
        if d_lse is not None:
            delta -= d_lse.masked_fill(lse == -torch.inf, 0.0)
        if scaled:
            _attention_range[(docs * H,)](
                largest, row_scale, doc_scale, cu_q, T, H, PACKED=cu_q is not None, BLOCK=1024
            )
        if (need_k or need_v) and S:
            M, N, warps, stages = way.tiles.dkdv
            tiles = triton.cdiv(S, N)
            _attention_dkdv[(tiles * K * B,)](
                q, k, v, d_out, d_k, d_v, lse, delta, row_scale, doc_scale, cu_q, cu_k, T, S, H, K, tiles, docs, steps,
                scale, *strides, M=M, N=N, NEED_K=need_k, NEED_V=need_v, **shared, num_warps=warps, num_stages=stages,
            )  # fmt: skip
        if need_q:
            M, N, warps, stages = way.tiles.dq
            tiles = triton.cdiv(T, M)
            _attention_dq[(tiles * H * B,)](
                q, k, v, d_out, d_q, lse, delta, row_scale, cu_q, cu_k, T, S, H, H // K, tiles, docs, steps,
                scale, *strides, M=M, N=N, **shared, num_warps=warps, num_stages=stages,
            )  # fmt: skip
    exponent = doc_scale.frexp().exponent - 1 if scaled else q.new_empty(0, dtype=torch.int32)
    return d_q, d_k, d_v, q.new_empty(0), q.new_empty(0), delta, exponent


def _starts(cu_q: Tensor | None, cu_k: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Contiguous cu_q and cu_k; keys have the queries' documents where cu_k is None."""
    cu_q = None if cu_q is None else cu_q.contiguous()
    return cu_q, cu_q if cu_k is None else cu_k.contiguous()
