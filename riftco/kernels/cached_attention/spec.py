"""What attention over a cache means, in plain torch.

R runs (one a slot), T query rows and S new keys of all runs packed, W cached rows a slot, H query heads, K key/value
heads, G = H // K, D head dim.
Run r holds the query rows cu_q[r] to cu_q[r + 1] and the new keys cu_k[r] to cu_k[r + 1]; without cu_q each run has
T // R rows and S // R keys. Its first new key sits at positions[r]: the rows of its slot below are its prefix, a
constant. Its last query row sits where its last new key does. Holds all H x T x (slots x W + S) scores at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._sinks import sink_gradient

BLOCK = 32  # values along D that share a scale in a q8_0 cache


class Rows(NamedTuple):
    """Packed rows: the run of each, its number in the run, rows in the run, and whether it belongs to a live run."""

    run: Tensor
    local: Tensor
    length: Tensor
    live: Tensor


def rows_of(total: int, slots: Tensor, cu: Tensor | None, n_slots: int) -> Rows:
    i = torch.arange(total, device=slots.device)
    runs = len(slots)
    if runs == 0:
        return Rows(i, i, i, i < 0)
    if cu is None:
        each = total // runs
        run, start = i // max(each, 1), i // max(each, 1) * each
        length, inside = torch.full_like(i, each), run < runs
    else:
        cu = cu.long().clamp(0, total)
        run = (cu <= i.unsqueeze(-1)).sum(-1) - 1  # by counting starts: torch_xla leaves searchsorted to the CPU
        inside = run < runs
        run = run.clamp(0, runs - 1)
        start, length = cu[run], cu[run + 1] - cu[run]
    run = run.clamp(max=runs - 1)
    slot = slots[run]
    return Rows(run, i - start, length, inside & (slot >= 0) & (slot < n_slots))


def visible(
    q_rows: Rows, k_rows: Rows, k_count: Tensor, slots: Tensor, positions: Tensor, n_slots: int, window: int,
    left: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(see_prefix [T, n_slots, W], see_new [T, S], live [T]): which keys each query row sees, and rows of live runs."""
    run = q_rows.run
    start = positions.long()[run] if len(positions) else run
    at = start + k_count - q_rows.length + q_rows.local
    lowest = at - left if left is not None else torch.full_like(at, -1)
    w = torch.arange(window, device=at.device)
    slot = torch.arange(n_slots, device=at.device)
    own = q_rows.live[:, None] & (slots[run][:, None] == slot if len(slots) else slot < 0)
    reach = (w < start[:, None]) & (w <= at[:, None]) & (w >= lowest[:, None])
    k_at = (positions.long()[k_rows.run] if len(positions) else k_rows.run) + k_rows.local
    same = (run[:, None] == k_rows.run) & q_rows.live[:, None] & k_rows.live
    return (
        own[:, :, None] & reach[:, None],
        same & (k_at <= at[:, None]) & (k_at >= lowest[:, None]),
        q_rows.live,
    )


def dequantized(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows of a cache in `dtype`: q8_0 codes [.., D] times their scale [.., D / 32], or a conversion."""
    if scale is None:
        return codes.to(dtype)
    return (codes.unflatten(-1, (-1, BLOCK)).to(dtype) * scale.unsqueeze(-1).to(dtype)).flatten(-2)


def by_slot(rows: Tensor | None, block_table: Tensor | None) -> Tensor | None:
    """[n_pages, page, ..] as [slots, W, ..]; a slot cache is that already."""
    if rows is None or block_table is None:
        return rows
    return rows[block_table.long().clamp(0, max(len(rows) - 1, 0))].flatten(1, 2)


class _Scores:
    """Scores of all rows against all keys, masked; and the operands they came from."""

    def __init__(
        self, q, k, v, k_cache, v_cache, k_scale, v_scale, block_table, slots, positions, cu_q, cu_k, scale, left,
        softcap,
    ):  # fmt: skip
        acc = torch.promote_types(q.dtype, torch.float32)
        k_cache, v_cache, k_scale, v_scale = (by_slot(t, block_table) for t in (k_cache, v_cache, k_scale, v_scale))
        (n_slots, window), (T, H, D), K = k_cache.shape[:2], q.shape, k.shape[1]
        cu_k = cu_q if cu_k is None else cu_k
        q_rows, k_rows = rows_of(T, slots, cu_q, n_slots), rows_of(k.shape[0], slots, cu_k, n_slots)
        count = torch.full_like(q_rows.run, k.shape[0] // max(len(slots), 1))
        if cu_k is not None and len(slots):
            count = cu_k.long().diff()[q_rows.run]
        see = visible(q_rows, k_rows, count, slots.long(), positions, n_slots, window, left)
        self.live, self.scale = see[2], D**-0.5 if scale is None else scale
        self.see = torch.cat([see[0].flatten(1), see[1]], 1)
        seen_c, seen_n = see[0].any(0), see[1].any(0)  # what nobody sees may hold NaN
        self.q = q.to(acc).masked_fill(~self.live[:, None, None], 0.0).unflatten(1, (K, H // K))
        self.k_old = dequantized(k_cache, k_scale, acc).masked_fill(~seen_c[..., None, None], 0.0).flatten(0, 1)
        self.v_old = dequantized(v_cache, v_scale, acc).masked_fill(~seen_c[..., None, None], 0.0).flatten(0, 1)
        self.k = k.to(acc).masked_fill(~seen_n[:, None, None], 0.0)
        self.v = v.to(acc).masked_fill(~seen_n[:, None, None], 0.0)
        s = self.against(self.q, self.k_old, self.k) * self.scale
        self.s = softcap * torch.tanh(s / softcap) if softcap > 0 else s  # [K, G, T, keys]
        self.old = len(self.k_old)

    @staticmethod
    def against(rows: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """[T, K, G, D] times [keys, K, D] -> [K, G, T, keys], the cached keys first. The keys are never joined."""
        return torch.cat([torch.einsum("tkgd,skd->kgts", rows, keys) for keys in (old, new)], -1)

    def times(self, weights: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """[K, G, T, keys] times [keys, K, D] -> [T, K, G, D]."""
        parts = (weights[..., : self.old], old), (weights[..., self.old :], new)
        return sum(torch.einsum("kgts,skd->tkgd", w, keys) for w, keys in parts)  # type: ignore[return-value]


def forward(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    block_table: Tensor | None, slots: Tensor, positions: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    sinks: Tensor | None, scale: float | None, left: int | None, softcap: float, longest: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [T, H, D], k, v [S, K, D], caches [slots, W, K, D] or pages -> out [T, H, D], lse [H, T] (natural log).

    `longest` is what the host knows of the rows in a run; it changes no result.
    """
    of = _Scores(
        q, k, v, k_cache.detach(), v_cache.detach(), k_scale, v_scale, block_table, slots, positions, cu_q, cu_k,
        scale, left, softcap,
    )  # fmt: skip
    some = of.see.any(-1)
    s = of.s.masked_fill(~of.see, -torch.inf)
    if sinks is not None:
        sink = sinks.to(s.dtype).view(*s.shape[:2], 1, 1).expand(*s.shape[:3], 1)
        s, some = torch.cat([s, sink], -1), of.live
    lse = s.masked_fill(~some[:, None], 0.0).logsumexp(-1)  # rows that see nothing stay finite for autograd
    p = (s[..., : of.see.shape[1]] - lse.unsqueeze(-1)).exp().masked_fill(~of.see, 0.0)
    out = of.times(p, of.v_old, of.v).flatten(1, 2).to(q.dtype)
    return out.contiguous(), lse.masked_fill(~some, -torch.inf).flatten(0, 1)


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    block_table: Tensor | None, slots: Tensor, positions: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    sinks: Tensor | None, scale: float | None, left: int | None, softcap: float, longest: int,
    need_q: bool, need_k: bool, need_v: bool, need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """P = exp(s - lse), delta = sum(dO O) - d_lse, dS = P (dO v^T - delta): dq = scale dS k over every key, dk and dv
    for the new keys alone. A gradient that is not needed comes back with zero elements."""
    of = _Scores(
        q, k, v, k_cache, v_cache, k_scale, v_scale, block_table, slots, positions, cu_q, cu_k, scale, left, softcap
    )
    lead, acc = of.s.shape[:2], of.s.dtype
    log_sum = lse.to(acc).view(*lead, -1)
    p = (of.s - log_sum.masked_fill(log_sum == -torch.inf, 0.0).unsqueeze(-1)).exp().masked_fill(~of.see, 0.0)
    g = d_out.to(acc).masked_fill(~of.live[:, None, None], 0.0).unflatten(1, lead)
    delta = (g * out.to(acc).unflatten(1, lead)).sum(-1).permute(1, 2, 0)
    if d_lse is not None:
        delta = delta - d_lse.to(acc).view(*lead, -1).masked_fill(~of.live, 0.0)
    d_s = p * (of.against(g, of.v_old, of.v) - delta.unsqueeze(-1))
    if softcap > 0:
        d_s = d_s * (1 - (of.s / softcap).square())
    empty = q.new_empty(0)
    d_q = d_k = d_v = empty
    d_sinks = lse.new_empty(0) if sinks is None else sinks.new_empty(0)
    if need_q:
        d_q = (of.times(d_s, of.k_old, of.k) * of.scale).flatten(1, 2).to(q.dtype).contiguous()
    if need_k:
        d_k = torch.einsum("kgts,tkgd->skd", d_s[..., of.old :], of.q * of.scale).to(k.dtype).contiguous()
    if need_v:
        d_v = torch.einsum("kgts,tkgd->skd", p[..., of.old :], g).to(v.dtype).contiguous()
    if need_sinks and sinks is not None:
        d_sinks = sink_gradient(sinks, lse, delta.flatten(0, 1))
    return d_q, d_k, d_v, d_sinks
