"""Attention composed of PyTorch's own operations, tile by tile: for devices without a kernel, and where a kernel fails.

No T x S matrix, no value read back to the host, no branch on one: the same operations run whatever the tensors hold.
Scores of a tile [B, H, rows, keys] are float32. One pass over the tiles makes all gradients. Tiles that no row can see,
as far as T, S and the window tell, are left out.

Dimensions as in spec.py; G = H // K; the heads of a group are rows of one matmul.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import philox, spec

LOWEST = torch.finfo(torch.float32).min  # of a maximum: -inf - LOWEST stays -inf


@dataclass(frozen=True)
class Tiles:
    """rows and keys of a tile."""

    rows: int = 512
    keys: int = 4096


SCORES = 1 << 25  # of a tile, all sequences and heads: a handful of buffers of 128 MiB live at a time


def fitting(q: Tensor) -> Tiles:
    """The largest tiles that SCORES allows, down to 16 rows and 256 keys."""
    heads = max(q.shape[:-3].numel() * q.shape[-2], 1)
    keys = max(256, min(Tiles.keys, SCORES // (heads * Tiles.rows)))
    return Tiles(max(16, min(Tiles.rows, SCORES // (heads * keys))), keys)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None,
    right: int | None, softcap: float, dropout_p: float, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem = _Problem(
        q, k, cu_q, cu_k, k_lens, bias, seed, scale, left, right, softcap, dropout_p, tiles or fitting(q)
    )
    outs, lses = [], []
    for rows in problem.row_tiles():
        x = problem.queries(q, rows)
        top, total = x.new_full((*x.shape[:-1], 1), LOWEST), x.new_zeros((*x.shape[:-1], 1))
        if sinks is not None:  # one more score, without a value
            sink = problem.sink_scores(sinks, rows)
            top, total = sink.clamp_min(LOWEST), (sink > -torch.inf).to(sink.dtype)
        acc = x.new_zeros((*x.shape[:-1], v.shape[-1]))
        for cols in problem.key_tiles(rows):
            _, s = problem.scores(x, problem.keys(k, cols), rows, cols)
            new_top = torch.maximum(top, s.amax(-1, keepdim=True))
            p, shrink = (s - new_top).exp(), (top - new_top).exp()
            total, top = total * shrink + p.sum(-1, keepdim=True), new_top
            if seed is not None:
                p = p * problem.kept(rows, cols)
            acc = acc * shrink + p @ problem.keys(v, cols)
        outs.append(problem.heads_last(acc / total.masked_fill(total == 0, 1.0), rows))
        lses.append(problem.row_values(top + total.log()))
    return problem.unpacked(torch.cat(outs, 1)).to(q.dtype), problem.unpacked(torch.cat(lses, -1))


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float, dropout_p: float,
    kv_grad_start: int, deterministic: bool, need_q: bool, need_k: bool, need_v: bool, need_bias: bool,
    need_sinks: bool, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    problem = _Problem(
        q, k, cu_q, cu_k, k_lens, bias, seed, scale, left, right, softcap, dropout_p, tiles or fitting(q), kv_grad_start
    )
    sum_k = problem.key_sums(k, kv_grad_start) if need_k else None
    sum_v = problem.key_sums(v, kv_grad_start) if need_v else None
    need_bias = need_bias and bias is not None
    sum_bias = lse.new_zeros(bias.shape) if need_bias and bias is not None else None
    d_qs, deltas = [], []
    for rows in problem.row_tiles():
        x, g, o = (problem.queries(t, rows) for t in (q, d_out, out))
        log_sum = problem.of_rows(lse, rows)
        live = log_sum != -torch.inf
        log_sum = log_sum.masked_fill(~live, 0.0)  # a row without keys: its mask alone makes p 0
        delta = (g * o).sum(-1, keepdim=True)
        if d_lse is not None:
            delta = delta - problem.of_rows(d_lse, rows).masked_fill(~live, 0.0)
        deltas.append(problem.row_values(delta))
        d_x = torch.zeros_like(x)
        for cols in problem.key_tiles(rows):
            mine = slice(cols.start - kv_grad_start, cols.stop - kv_grad_start)
            wanted_k, wanted_v = (t if mine.start >= 0 else None for t in (sum_k, sum_v))
            only_v = not need_q and wanted_k is None and sum_bias is None
            if only_v and wanted_v is None:
                continue
            keys = problem.keys(k, cols)
            capped, s = problem.scores(x, keys, rows, cols)
            p = (s - log_sum).exp()
            kept = None if seed is None else problem.kept(rows, cols)
            if wanted_v is not None:
                wanted_v[:, :, mine] += (p if kept is None else p * kept).mT @ g
            if only_v:
                continue
            d_p = g @ problem.keys(v, cols).mT
            d_s = p * ((d_p if kept is None else d_p * kept) - delta)
            if sum_bias is not None:
                to = problem.part_of_bias(sum_bias, rows, cols)
                to += problem.split(d_s).sum_to_size(to.shape)
            d_s = d_s * problem.scale
            if softcap:
                d_s = d_s * (1.0 - (capped / softcap).square())
            if need_q:
                d_x = d_x + d_s @ keys
            if wanted_k is not None:
                wanted_k[:, :, mine] += d_s.mT @ x
        if need_q:
            d_qs.append(problem.heads_last(d_x, rows))
    delta = problem.unpacked(torch.cat(deltas, -1))
    exponent = q.new_empty(0, dtype=torch.int32)
    if q.dtype == torch.float16:
        exponent = spec.dout_exponent(d_out, cu_q)
    return (
        problem.unpacked(torch.cat(d_qs, 1)).to(q.dtype) if need_q else q.new_empty(0),
        k.new_empty(0) if sum_k is None else problem.unpacked(sum_k.transpose(1, 2)).to(k.dtype),
        v.new_empty(0) if sum_v is None else problem.unpacked(sum_v.transpose(1, 2)).to(v.dtype),
        q.new_empty(0) if sum_bias is None or bias is None else sum_bias.to(bias.dtype),
        spec.sink_gradient(sinks, lse, delta) if need_sinks and sinks is not None else q.new_empty(0),
        delta,
        exponent,
    )


class _Problem:
    def __init__(self, q, k, cu_q, cu_k, k_lens, bias, seed, scale, left, right, softcap, dropout_p, tiles, cut=0):
        self.packed, self.device = q.dim() == 3, q.device
        self.B = 1 if self.packed else q.shape[0]
        (self.T, H), (self.S, self.K) = q.shape[-3:-1], k.shape[-3:-1]
        self.G = H // self.K
        self.acc = torch.promote_types(q.dtype, torch.float32)
        self.bias, self.seed, self.softcap, self.dropout_p = bias, seed, softcap, dropout_p
        self.scale, self.tiles = spec.softmax_scale(q, scale), tiles
        self.bounds = sorted({*range(0, self.S, tiles.keys), min(max(cut, 0), self.S), self.S})
        self.lo, self.hi = spec.key_range(self.T, self.S, cu_q, cu_k, k_lens, left, right, self.device)
        # what T, S and the window tell about where the keys of row i lie: from i + first on, and before i + last
        dense = cu_q is None
        self.first = self.S - self.T - left if dense and k_lens is None and left is not None else None
        self.last = self.S - self.T + right + 1 if dense and right is not None else None
        self.rows_exist = spec.exist(self.T, cu_q)
        self.keys_exist = spec.exist(self.S, cu_q if cu_k is None else cu_k, k_lens)

    def row_tiles(self) -> Iterator[slice]:
        for t in range(0, max(self.T, 1), self.tiles.rows):
            yield slice(t, min(t + self.tiles.rows, self.T))

    def key_tiles(self, rows: slice) -> Iterator[slice]:
        start = 0 if self.first is None else rows.start + self.first
        stop = self.S if self.last is None else rows.stop - 1 + self.last
        for a, b in zip(self.bounds, self.bounds[1:]):
            if a < stop and start < b:
                yield slice(a, b)

    def queries(self, t: Tensor, rows: slice) -> Tensor:
        """[B, T, H, D] or [T, H, D] -> [B, K, G x rows, D] in the accumulator's dtype."""
        return self._heads_first(t, rows, self.rows_exist)

    def keys(self, t: Tensor, cols: slice) -> Tensor:
        """[B, S, K, D] or [S, K, D] -> [B, K, keys, D]."""
        return self._heads_first(t, cols, self.keys_exist)

    def _heads_first(self, t: Tensor, part: slice, exist: Tensor | None) -> Tensor:
        """Rows that do not exist become 0: whatever they hold, even NaN, must not reach a result."""
        t = (t.unsqueeze(0) if self.packed else t)[:, part]
        if exist is not None:
            t = t.masked_fill(~exist[..., part, None, None], 0.0)
        return t.to(self.acc).unflatten(2, (self.K, -1)).movedim(1, 3).flatten(2, 3)

    def of_rows(self, t: Tensor, rows: slice) -> Tensor:
        """[B, H, T] or [H, T] -> [B, K, G x rows, 1]."""
        t = (t.unsqueeze(0) if self.packed else t)[..., rows]
        return t.unflatten(1, (self.K, self.G)).flatten(2, 3).unsqueeze(-1)

    def row_values(self, t: Tensor) -> Tensor:
        """[B, K, G x rows, 1] -> [B, H, rows]."""
        return t.squeeze(-1).unflatten(2, (self.G, -1)).flatten(1, 2)

    def heads_last(self, t: Tensor, rows: slice) -> Tensor:
        """[B, K, G x rows, D] -> [B, rows, H, D]."""
        return t.unflatten(2, (self.G, rows.stop - rows.start)).movedim(3, 1).flatten(2, 3)

    def unpacked(self, t: Tensor) -> Tensor:
        return (t.squeeze(0) if self.packed else t).contiguous()

    def key_sums(self, t: Tensor, start: int) -> Tensor:
        return t.new_zeros(self.B, self.K, self.S - start, t.shape[-1], dtype=self.acc)

    def split(self, s: Tensor) -> Tensor:
        """[B, K, G x rows, keys] -> [B, K, G, rows, keys]."""
        return s.unflatten(2, (self.G, s.shape[2] // max(self.G, 1)))

    def scores(self, x: Tensor, keys: Tensor, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        """Without and with bias and mask."""
        capped = x @ keys.mT * self.scale
        if self.softcap:
            capped = self.softcap * (capped / self.softcap).tanh()
        s, bias = self.split(capped), self.bias
        j = torch.arange(cols.start, cols.stop, device=self.device)
        see = (j >= self.lo[..., rows, None]) & (j < self.hi[..., rows, None])
        see = see if see.dim() == 2 else see[:, None, None]
        if bias is not None and bias.dtype == torch.bool:
            see = see & self.part_of_bias(bias, rows, cols)
        elif bias is not None:
            s = s + spec.without_lowest(self.part_of_bias(bias, rows, cols)).to(self.acc)
        return capped, s.masked_fill(~see, -torch.inf).flatten(2, 3)

    def part_of_bias(self, bias: Tensor, rows: slice, cols: slice) -> Tensor:
        """A tile's part of [B, H, T, S], each size or 1, as [B, K, G, rows, keys], each or 1."""
        t = bias.unsqueeze(1) if bias.shape[1] == 1 else bias.unflatten(1, (self.K, self.G))
        t = t if t.shape[3] == 1 else t[:, :, :, rows]
        return t if t.shape[4] == 1 else t[..., cols]

    def sink_scores(self, sinks: Tensor, rows: slice) -> Tensor:
        """[H] -> [B, K, G x rows, 1]; rows of no document have none."""
        t = sinks.to(self.acc).view(1, self.K, self.G, 1).expand(self.B, -1, -1, rows.stop - rows.start)
        if self.rows_exist is not None:
            t = t.masked_fill(~self.rows_exist[rows], -torch.inf)
        return t.flatten(2, 3).unsqueeze(-1)

    def kept(self, rows: slice, cols: slice) -> Tensor:
        """[B, K, G x rows, keys]: 0 where a probability is dropped, else 1 / (1 - dropout_p)."""
        heads = torch.arange(self.B * self.K * self.G, device=self.device).view(self.B, self.K, self.G, 1)
        row = torch.arange(rows.start, rows.stop, device=self.device)
        kept = philox.keep_range(self.seed, heads, row, cols.start, cols.stop, self.dropout_p)
        return (kept.to(self.acc) / (1 - self.dropout_p)).flatten(2, 3)
