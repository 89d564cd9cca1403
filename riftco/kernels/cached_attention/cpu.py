"""Attention over a cache on the CPU: batched matmuls over tiles of query rows and blocks of keys, in float32.

Cached rows are dequantised a block at a time, so neither a float copy of the cache nor [T, W] scores ever exist. Run
bounds are read on the host, where they already are.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import spec

SCORES = 1 << 20  # elements of a block of scores
KEYS = 512
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class _Run:
    """A live run: its slot, query rows, new keys, the position of its first new key and its prefix length."""

    slot: int
    q0: int
    q1: int
    k0: int
    k1: int
    start: int
    prefix: int


@dataclass
class _Keys:
    """The cache of one layer and the new keys, as blocks of [K, keys, D] in float32."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    block_table: Tensor | None
    left: int | None

    def blocks(self, run: _Run, first: int, last: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None, slice | None]]:
        """(k, v, 0 / -inf to add, new rows or None) of what the query rows at positions first to last see."""
        at = torch.arange(first, last + 1)
        low = 0 if self.left is None else max(first - self.left, 0)
        pieces = ((low, min(run.prefix, last + 1), True), (max(low, run.start), last + 1, False))
        for begin, end, cached in pieces:
            for j in range(begin, end, KEYS):
                stop = min(j + KEYS, end)
                col = torch.arange(j, stop)
                hidden = col > at[:, None]
                if self.left is not None:
                    hidden |= col < at[:, None] - self.left
                bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf) if bool(hidden.any()) else None
                if cached:
                    k = self._cached(self.k_cache, self.k_scale, run.slot, j, stop)
                    yield k, self._cached(self.v_cache, self.v_scale, run.slot, j, stop), bias, None
                else:
                    rows = slice(run.k0 + j - run.start, run.k0 + stop - run.start)
                    k, v = (t[rows].transpose(0, 1).to(torch.float32) for t in (self.k, self.v))
                    yield k, v, bias, rows

    def _cached(self, rows: Tensor, scale: Tensor | None, slot: int, j: int, stop: int) -> Tensor:
        here: tuple[Tensor | int, Tensor | slice] = slot, slice(j, stop)
        if self.block_table is not None:
            at = torch.arange(j, stop)
            page = self.block_table[slot, at // rows.shape[1]].long().clamp(0, len(rows) - 1)
            here = page, at % rows.shape[1]
        return spec.dequantized(rows[here], None if scale is None else scale[here], torch.float32).transpose(0, 1)


def _runs(q, k, k_cache, block_table, slots, positions, cu_q, cu_k) -> Iterator[_Run]:
    n_slots = len(k_cache) if block_table is None else len(block_table)
    window = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    bounds = []
    for total, cu in ((len(q), cu_q), (len(k), cu_q if cu_k is None else cu_k)):
        each = total // max(len(slots), 1)
        bounds.append([n * each for n in range(len(slots) + 1)] if cu is None else cu.clamp(0, total).tolist())
    for r, (slot, start) in enumerate(zip(slots.tolist(), positions.tolist())):
        (q0, q1), (k0, k1) = (b[r : r + 2] for b in bounds)
        if 0 <= slot < n_slots and q1 > q0:
            yield _Run(slot, q0, q1, k0, max(k0, k1), start, max(min(start, window), 0))


def _tiles(run: _Run, H: int) -> Iterator[tuple[slice, int, int]]:
    """(query rows, their first and last position)."""
    height = max(1, SCORES // (H * KEYS))
    offset = run.start + (run.k1 - run.k0) - run.q1
    for t in range(run.q0, run.q1, height):
        end = min(t + height, run.q1)
        yield slice(t, end), offset + t, offset + end - 1


def _load(t: Tensor, rows: slice, K: int) -> Tensor:
    """[T, H, D] -> [K, G x rows, D] in float32."""
    return t[rows].unflatten(1, (K, -1)).permute(1, 2, 0, 3).to(torch.float32).flatten(1, 2)


def _store(t: Tensor, rows: slice, value: Tensor) -> None:
    to = t[rows].unflatten(1, (len(value), -1)).permute(1, 2, 0, 3)
    to.copy_(value.view(to.shape))


def _score(x: Tensor, keys: Tensor, bias: Tensor | None, scale: float, softcap: float) -> Tensor:
    s = torch.bmm(x, keys.mT).mul_(scale)
    if softcap > 0:
        s.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        s.unflatten(1, (-1, len(bias))).add_(bias)
    return s


def forward(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    block_table: Tensor | None, slots: Tensor, positions: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    sinks: Tensor | None, scale: float | None, left: int | None, softcap: float, longest: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (T, H, D), K = q.shape, k.shape[1]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full((H, T), -torch.inf, dtype=torch.float32)
    scale = D**-0.5 if scale is None else scale
    keys = _Keys(k, v, k_cache, v_cache, k_scale, v_scale, block_table, left)
    for run in _runs(q, k, k_cache, block_table, slots, positions, cu_q, cu_k):
        for rows, first, last in _tiles(run, H):
            x = _load(q, rows, K)
            acc, m, total = torch.zeros_like(x), x.new_full((*x.shape[:2], 1), -1e37), x.new_zeros((*x.shape[:2], 1))
            if sinks is not None:
                m = sinks.float().view(K, -1, 1).expand(-1, -1, rows.stop - rows.start).reshape(m.shape)
                total = torch.ones_like(total)
            for k_block, v_block, bias, _ in keys.blocks(run, first, last):
                s = _score(x, k_block, bias, scale, softcap)
                m_new = torch.maximum(m, s.amax(-1, keepdim=True))  # finite from the start: -inf - m stays -inf
                p = s.sub_(m_new).mul_(LOG2E).exp2_()
                shrink = (m - m_new).exp_()
                total = total.mul_(shrink).add_(p.sum(-1, keepdim=True))
                acc = torch.baddbmm(acc.mul_(shrink), p, v_block)
                m = m_new
            _store(out, rows, acc.div_(total.masked_fill(total == 0, 1.0)))
            _store(lse.T.unsqueeze(-1), rows, m + total.log())
    return out, lse


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    block_table: Tensor | None, slots: Tensor, positions: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    sinks: Tensor | None, scale: float | None, left: int | None, softcap: float, longest: int,
    need_q: bool, need_k: bool, need_v: bool, need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (_, H, D), K = q.shape, k.shape[1]
    d_q = q.new_zeros(q.shape if need_q else 0)
    sum_k, sum_v = (torch.zeros(t.shape if need else 0) for t, need in ((k, need_k), (v, need_v)))
    delta_rows = torch.zeros_like(lse).T.unsqueeze(-1)
    scale = D**-0.5 if scale is None else scale
    keys = _Keys(k, v, k_cache, v_cache, k_scale, v_scale, block_table, left)
    for run in _runs(q, k, k_cache, block_table, slots, positions, cu_q, cu_k):
        for rows, first, last in _tiles(run, H):
            x, g = _load(q, rows, K), _load(d_out, rows, K)
            log_sum = _load(lse.T.unsqueeze(-1), rows, K)
            log_sum = log_sum.masked_fill(log_sum == -torch.inf, 0.0)  # a row without keys: its bias makes p 0
            delta = (g * _load(out, rows, K)).sum(-1, keepdim=True)
            if d_lse is not None:
                delta -= _load(d_lse.T.unsqueeze(-1), rows, K)
            _store(delta_rows, rows, delta)
            sum_q = torch.zeros_like(x)
            for k_block, v_block, bias, new in keys.blocks(run, first, last):
                s = _score(x, k_block, bias, scale, softcap)
                slope = 1 - (s / softcap).square_() if softcap > 0 else None
                p = s.sub_(log_sum).mul_(LOG2E).exp2_()
                if new is not None and need_v:
                    sum_v[new] += torch.bmm(p.mT, g).transpose(0, 1)
                if not (need_q or need_k):
                    continue
                d_s = torch.bmm(g, v_block.mT).sub_(delta).mul_(p)
                if slope is not None:
                    d_s = d_s.mul_(slope).masked_fill_(p == 0, 0.0)  # a hidden score's slope is infinite
                if need_q:
                    sum_q.baddbmm_(d_s, k_block, alpha=scale)
                if new is not None and need_k:
                    sum_k[new] += torch.bmm(d_s.mT, x).transpose(0, 1).mul_(scale)
            if need_q:
                _store(d_q, rows, sum_q)
    d_sinks = lse.new_empty(0)
    if need_sinks and sinks is not None:
        d_sinks = spec.sink_gradient(sinks, lse, delta_rows.squeeze(-1).T)
    return d_q, sum_k.to(k.dtype), sum_v.to(v.dtype), d_sinks
