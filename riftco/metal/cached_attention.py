"""Launches csrc/metal/cached_attention*.metal; the contract is riftco/kernels/cached_attention/op.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.attention.spec import softmax_scale
from ..kernels.cached_attention import spec
from ..kernels.cached_attention.compose import decode as decode  # rope's shader, these, and the write
from ..kernels.cached_attention.route import DECODE_ROWS, LEAST_CHUNK, MOST_PIECES
from . import bound, launch
from .attention import row_sums

SHADERS = ("cached_attention", "cached_attention_backward")
HEADS, THREADS = 4, 128  # cached_attention.h


def forward(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    block_table: Tensor | None, slots: Tensor, positions: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    sinks: Tensor | None, scale: float | None, left: int | None, softcap: float, longest: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (T, H, D), K = q.shape, k.shape[1]
    out, lse = q.new_empty((T, H, D)), torch.empty((H, T), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if len(slots) == 0 or k_cache.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    window = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    n, chunk = pieces(window, left, longest)
    parts = [torch.empty(s if n > 1 else 1, dtype=torch.float32, device=q.device) for s in ((n, T, H, D), (n, T, H, 2))]
    table, *runs = _runs(block_table, slots, positions, cu_q, cu_k)
    cache = (k_cache, v_cache, k_scale, v_scale)
    numbers = _numbers(q, k, v, None, cache, table, runs, left, has_sinks=sinks is not None, n=n, chunk=chunk)
    reals = [softmax_scale(q, scale), softcap]
    sink = None if sinks is None else sinks.contiguous()
    launch(
        "cached_attention", "cached_attention_fwd", [q.dtype, k_cache.dtype], [out, lse, *parts],
        [q, *bound(k, v), *cache, table, *runs, sink], numbers, reals, groups=n * _threadgroups(T, H, K),
        threads=THREADS, exact=True,
    )  # fmt: skip
    if n > 1:
        launch(
            "cached_attention", "cached_attention_join", [q.dtype], [out, lse], parts, numbers, reals, groups=T * H,
            threads=min(D, THREADS),
        )  # fmt: skip
    return out, lse


def pieces(W: int, left: int | None, longest: int) -> tuple[int, int]:
    """(pieces of a row's keys, cached rows of one): the new keys are a piece of their own, or all is one piece.

    Decoding is cut by the slots' size alone, so that a row's result does not depend on the other runs of the call.
    """
    reach = W if left is None else min(W, left + 1)
    if longest > DECODE_ROWS or reach <= LEAST_CHUNK:
        return 1, 0
    prefix = min(MOST_PIECES, -(-reach // LEAST_CHUNK))
    return 1 + prefix, -(-reach // prefix)


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    block_table: Tensor | None, slots: Tensor, positions: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    sinks: Tensor | None, scale: float | None, left: int | None, softcap: float, longest: int,
    need_q: bool, need_k: bool, need_v: bool, need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (T, H, _), (S, K, _) = q.shape, k.shape
    d_q, d_k, d_v = (t.new_empty(t.shape if need else 0) for t, need in ((q, need_q), (k, need_k), (v, need_v)))
    empty = lse.new_empty(0) if sinks is None else sinks.new_empty(0)
    lse = lse.contiguous()
    if len(slots) == 0 or k_cache.numel() == 0:
        d_sinks = empty if sinks is None or not need_sinks else torch.zeros_like(sinks)
        return d_q.zero_(), d_k.zero_(), d_v.zero_(), d_sinks
    delta, _ = row_sums(d_out, out, lse, d_lse)
    table, *runs = _runs(block_table, slots, positions, cu_q, cu_k)
    cache = (k_cache, v_cache, k_scale, v_scale)
    need = (d_k.numel() > 0, d_v.numel() > 0)
    numbers = _numbers(q, k, v, d_out, cache, table, runs, left, need=need)
    reals, rows = [softmax_scale(q, scale), softcap], [*bound(d_out, q, k, v, lse, delta)]
    if d_q.numel():
        launch(
            "cached_attention_backward", "cached_attention_dq", [q.dtype, k_cache.dtype], [d_q],
            [*rows, *cache, table, *runs], numbers, reals, groups=_threadgroups(T, H, K), threads=THREADS, exact=True,
        )  # fmt: skip
    if any(need):
        outputs = [t if t.numel() else t.new_empty(1) for t in (d_k, d_v)]
        launch(
            "cached_attention_backward", "cached_attention_dkdv", [q.dtype], outputs, [*rows, *runs], numbers,
            reals, groups=S * K, threads=THREADS, exact=True,
        )  # fmt: skip
    return d_q, d_k, d_v, spec.sink_gradient(sinks, lse, delta) if sinks is not None and need_sinks else empty


def _runs(block_table, slots, positions, cu_q, cu_k) -> list[Tensor | None]:
    """The table of pages, slots, positions and bounds of runs, in int32, as the shader reads them."""
    tensors = (block_table, slots, positions, cu_q, cu_q if cu_k is None else cu_k)
    return [None if t is None else t.to(torch.int32).contiguous() for t in tensors]


def _threadgroups(T: int, H: int, K: int) -> int:
    """One for a row and up to HEADS heads of a key head."""
    return T * K * -(-H // K // HEADS)


def _numbers(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor | None, cache: tuple[Tensor | None, ...], table: Tensor | None,
    runs: list[Tensor | None], left: int | None, *, has_sinks: bool = False, n: int = 1, chunk: int = 0,
    need: tuple[bool, bool] = (False, False),
) -> list[int]:  # fmt: skip
    """CachedAttentionParams of the shader, up to its floats."""
    (T, H, D), (S, K, _), rows = q.shape, k.shape, cache[0]
    slots, cu_q = runs[0], runs[2]
    assert rows is not None and slots is not None
    pages, page = rows.shape[:2]
    numbers = [T, S, H, K, D, len(slots), *((pages, page) if table is None else (len(table), page * table.shape[1]))]
    numbers += [pages, page, 0 if table is None else table.shape[1], cu_q is not None, has_sinks]
    numbers += [-1 if left is None else left, n, chunk, *need]
    for t in (q, k, v):
        numbers += [0, *t.stride()]
    for cached in cache:
        numbers += [0] * 4 if cached is None else cached.stride()
    return numbers + [0, *(q if d_out is None else d_out).stride()]
