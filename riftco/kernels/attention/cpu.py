"""Attention on the CPU: batched matmuls over tiles of query rows and blocks of keys, in float32.

One tile holds rows of several documents where they are short, as every row knows its own range of keys. exp2 is the
fastest exponential here; its factor is applied after the maximum or lse is taken off, where rounding costs least.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from . import spec

SCORES = 1 << 20  # elements of a block of scores: smaller ones cost threads more meetings, larger ones leave the cache
KEYS = 512
LOG2E = math.log2(math.e)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None,
    right: int | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    causal = _plain(left, right, k_lens, bias, sinks, seed, softcap)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -torch.inf, dtype=torch.float32)
    scale = spec.softmax_scale(q, scale)
    tiling = _Tiling(q, k, cu_q, cu_k, causal)
    for heads in tiling.heads():
        keys, values = heads.keys(k), heads.keys(v)
        for rows in tiling.rows():
            x = heads.load(q, rows)
            acc, m, total = x.new_zeros((*x.shape[:2], v.shape[-1])), x.new_full((*x.shape[:2], 1), -1e37), None
            for cols, bias in tiling.keys(rows):
                s = _bmm(x, keys[:, cols].mT, scale)
                _add(s, bias, heads.G)
                m_new = torch.maximum(m, s.amax(-1, keepdim=True))  # at least -1e37: -inf - m stays -inf
                p = s.sub_(m_new).mul_(LOG2E).exp2_()
                shrink = (m - m_new).exp_()
                row_sum = p.sum(-1, keepdim=True)
                total = row_sum if total is None else row_sum.add_(shrink * total)
                acc = torch.baddbmm(acc.mul_(shrink), p, values[:, cols])
                m = m_new
            if total is not None:
                heads.store(out, rows, acc.div_(total.masked_fill(total == 0, 1.0)))
                heads.store_rows(lse, rows, m + total.log())
    return out, lse


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float, dropout_p: float,
    kv_grad_start: int, deterministic: bool, need_q: bool, need_k: bool, need_v: bool, need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    causal = _plain(left, right, k_lens, bias, sinks, seed, softcap, kv_grad_start)
    d_q, d_k, d_v = (t.new_zeros(t.shape if need else 0) for t, need in ((q, need_q), (k, need_k), (v, need_v)))
    scale, delta = spec.softmax_scale(q, scale), torch.zeros_like(lse)
    tiling = _Tiling(q, k, cu_q, cu_k, causal)
    for heads in tiling.heads():
        keys, values = heads.keys(k), heads.keys(v)
        sum_k = torch.zeros_like(keys, memory_format=torch.contiguous_format) if need_k else None
        sum_v = torch.zeros_like(values, memory_format=torch.contiguous_format) if need_v else None
        for rows in tiling.rows():
            x, g, o = heads.load(q, rows), heads.load(d_out, rows), heads.load(out, rows)
            minus_lse = heads.load_rows(lse, rows).neg()
            live = minus_lse != torch.inf
            minus_lse.masked_fill_(~live, 0.0)  # a row without keys: its bias alone makes p 0
            minus_delta = (g * o).sum(-1, keepdim=True).neg_()
            if d_lse is not None:
                minus_delta += heads.load_rows(d_lse, rows).masked_fill(~live, 0.0)
            heads.store_rows(delta, rows, -minus_delta)
            sum_q = torch.zeros_like(x) if need_q else None
            for cols, bias in tiling.keys(rows):
                s = torch.baddbmm(minus_lse, x, keys[:, cols].mT, alpha=scale)
                _add(s, bias, heads.G)
                p = s.mul_(LOG2E).exp2_()
                if sum_v is not None:
                    sum_v[:, cols] += torch.bmm(p.mT, g)
                if sum_q is None and sum_k is None:
                    continue
                d_s = torch.baddbmm(minus_delta, g, values[:, cols].mT).mul_(p)
                if sum_q is not None:
                    sum_q.baddbmm_(d_s, keys[:, cols], alpha=scale)
                if sum_k is not None:
                    sum_k[:, cols] += torch.bmm(d_s.mT, x).mul_(scale)
            if sum_q is not None:
                heads.store(d_q, rows, sum_q)
        if sum_k is not None:
            heads.store_keys(d_k, sum_k)
        if sum_v is not None:
            heads.store_keys(d_v, sum_v)
    exponent = spec.dout_exponent(d_out, cu_q) if q.dtype == torch.float16 else q.new_empty(0, dtype=torch.int32)
    return d_q, d_k, d_v, q.new_empty(0), q.new_empty(0), delta, exponent


def _plain(left, right, k_lens, bias, sinks, seed, softcap, kv_grad_start=0) -> bool:
    """causal; refuses by name what is not there."""
    given = dict(k_lens=k_lens, bias=bias, sinks=sinks, dropout_p=seed, softcap=softcap or None, window=left,
                 kv_grad_start=kv_grad_start or None)  # fmt: skip
    lacking = [n for n, value in given.items() if value is not None] + ["window"] * (right not in (None, 0))
    if lacking:
        raise NotImplementedError(f"attention: no kernel yet for {', '.join(lacking)}")
    return right == 0


def _bmm(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=alpha)


def _add(s: Tensor, bias: Tensor | None, G: int) -> None:
    """bias [rows, keys] on every head of the group."""
    if bias is not None:
        s.unflatten(1, (G, -1)).add_(bias)


class _Tiling:
    """Cuts [B, T, K, G] x S into blocks whose scores stay in cache, and knows which keys a tile of rows sees."""

    def __init__(self, q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, causal: bool):
        (T, H), (S, K) = q.shape[-3:-1], k.shape[-3:-1]
        self.B, self.K, self.G = q.shape[0] if q.dim() == 4 else 1, K, H // K
        self.lo, self.hi = spec.key_range(T, S, cu_q, cu_k, None, None, 0 if causal else None, q.device)
        self.first, self.last = (0, T) if cu_q is None else (int(cu_q[0]), min(int(cu_q[-1]), T))
        width = min(KEYS, max(S, 1))
        pairs = max(1, SCORES // (max(self.G, 1) * 64 * width))  # (batch, key head) pairs in one batched matmul
        self.pairs_b, self.pairs_k = min(max(1, pairs // K), max(self.B, 1)), min(pairs, K)
        height = SCORES // (self.pairs_b * self.pairs_k * max(self.G, 1) * width)
        self.height = min(64 if causal else 256, max(16, height))  # a causal tile wastes half its height of keys

    def heads(self) -> Iterator["_Heads"]:
        for b in range(0, self.B if self.G else 0, self.pairs_b):
            for k in range(0, self.K, self.pairs_k):
                yield _Heads(slice(b, b + self.pairs_b), slice(k, k + self.pairs_k), self.K, self.G)

    def rows(self) -> Iterator[slice]:
        for t in range(self.first, self.last, self.height):
            yield slice(t, min(t + self.height, self.last))

    def keys(self, rows: slice) -> Iterator[tuple[slice, Tensor | None]]:
        """Blocks of keys that some row of the tile sees, with 0 / -inf to add where not all rows see all of them."""
        lo, hi = self.lo[rows], self.hi[rows]
        some = hi > lo
        if not bool(some.any()):
            return
        start, stop, inner_start, inner_stop = int(lo[some].min()), int(hi.max()), int(lo.max()), int(hi.min())
        for j in range(start, stop, KEYS):
            end = min(j + KEYS, stop)
            if inner_start <= j and end <= inner_stop:
                yield slice(j, end), None
                continue
            col = torch.arange(j, end)
            hidden = (col < lo.unsqueeze(-1)) | (col >= hi.unsqueeze(-1))
            yield slice(j, end), torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


class _Heads:
    """Some batch rows and key heads, as the leading dimension N of [N, G x rows, D] and [N, S, D] in float32.

    Heads before rows: the first rows of a causal mask weigh most, and sums over rows lose least when they come apart.
    """

    def __init__(self, b: slice, k: slice, K: int, G: int):
        self.b, self.k, self.K, self.G = b, k, K, G

    def _pick(self, t: Tensor, rows: slice) -> Tensor:
        """View [B, T, H, D] or [total, H, D] as [b, k, G, rows, D]."""
        t = t if t.dim() == 4 else t.unsqueeze(0)
        return t[self.b, rows].unflatten(2, (self.K, -1))[:, :, self.k].movedim(1, 3)

    def load(self, t: Tensor, rows: slice) -> Tensor:
        return self._pick(t, rows).to(torch.float32).flatten(0, 1).flatten(1, 2)

    def store(self, t: Tensor, rows: slice, value: Tensor) -> None:
        to = self._pick(t, rows)
        to.copy_(value.view(to.shape))

    def load_rows(self, t: Tensor, rows: slice) -> Tensor:
        """[B, H, T] -> [N, G x rows, 1]."""
        return self.load(self._rows_first(t), rows)

    def store_rows(self, t: Tensor, rows: slice, value: Tensor) -> None:
        self.store(self._rows_first(t), rows, value)

    @staticmethod
    def _rows_first(t: Tensor) -> Tensor:
        return t.transpose(-1, -2).unsqueeze(-1)

    def keys(self, t: Tensor) -> Tensor:
        """[B, S, K, D] or [total, K, D] -> [N, S, D]."""
        return self._pick(t, slice(None)).squeeze(2).to(torch.float32).flatten(0, 1)

    def store_keys(self, t: Tensor, value: Tensor) -> None:
        self.store(t, slice(None), value)
