"""How cpu.py cuts attention into blocks: which heads, rows and keys come together, and what is added to their scores.

B, T, S, H, K, D as in spec.py, G = H // K. N is a number of (sequence, key head) pairs.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import philox, spec

SCORES = 1 << 19  # elements of a block of scores: smaller ones cost threads more meetings, larger ones leave the cache
KEYS = 256  # of a tile
EVEN, UNEVEN = 256, 96  # most rows of a tile; with a window it wastes half its height of keys
PARTS = 4  # most threads that share the rows of a head: each sums all of dK and dV for itself
THREADED = 1 << 27  # multiplications of a product above which groups of heads are worth a thread each


@dataclass(frozen=True)
class Block:
    """Some keys of a tile of rows: the part `inside` of tile `n` of keys, `cols` of all.

    hidden [rows, keys] (with k_lens [b, rows, keys]): which a row does not see.
    """

    n: int
    inside: slice
    cols: slice
    hidden: Tensor | None

    def of(self, tiles: list[Tensor]) -> Tensor:
        tile = tiles[self.n]
        if self.inside.stop - self.inside.start == tile.shape[1]:
            return tile
        # one pair's part is contiguous, and oneDNN copies what its strides do not show to be
        return tile[0, self.inside].unsqueeze(0) if len(tile) == 1 else tile[:, self.inside]


class Heads:
    """Some sequences and key heads, as the leading dimension N of [N, G x rows, D] and [N, S, D] in float32.

    Heads before rows: the first rows of a causal mask weigh most, and sums over rows lose least when they come apart.
    """

    def __init__(self, b: slice, k: slice, K: int, G: int, part: int = 0):
        """part: which tiles of rows are this one's, where several share the heads."""
        self.b, self.k, self.K, self.G, self.part = b, k, K, G, part

    def _pick(self, t: Tensor, rows: slice) -> Tensor:
        """View [B, T, H, D] or [total, H, D] as [b, k, G, rows, D]."""
        t = t if t.dim() == 4 else t.unsqueeze(0)
        return t[self.b, rows].unflatten(2, (self.K, -1))[:, :, self.k].movedim(1, 3)

    def load(self, t: Tensor, rows: slice, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._pick(t, rows).to(dtype).flatten(0, 1).flatten(1, 2)

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

    def tiles(self, t: Tensor, bounds: list[slice], k_lens: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
        """[B, S, K, D] or [total, K, D] -> [N, keys, D] each; keys that do not exist become 0, whatever they hold."""
        tiles = []
        for cols in bounds:
            tile = self._pick(t, cols).squeeze(2)
            if k_lens is not None:
                beyond = torch.arange(cols.start, cols.stop) >= k_lens[self.b].view(-1, 1, 1)
                tile = tile.masked_fill(beyond.unsqueeze(-1), 0.0)
            tile = tile.to(dtype).flatten(0, 1)
            tiles.append(tile if dtype == torch.float32 else tile.contiguous())
        return tiles

    def per_row(self, sinks: Tensor, rows: slice) -> Tensor:
        """[H] -> [N, G x rows, 1]."""
        some = sinks.to(torch.float32).view(self.K, self.G, 1)[self.k]
        some = some.expand(-1, -1, rows.stop - rows.start).flatten(1).unsqueeze(-1)
        return some.repeat(self.b.stop - self.b.start, 1, 1)

    def bias(self, bias: Tensor, rows: slice, cols: slice) -> Tensor:
        """The part of [B, H, T, S], each size or 1, that lies on a block: [b or 1, k or 1, G or 1, rows or 1, ...]."""
        if bias.shape[1] == 1:
            t = bias.unsqueeze(1)
        else:
            t = bias.unflatten(1, (self.K, self.G))[:, self.k]
        for dim, part in ((0, self.b), (3, rows), (4, cols)):
            if t.shape[dim] != 1:
                t = t[(slice(None),) * dim + (part,)]
        return t

    def split(self, s: Tensor) -> Tensor:
        """[N, G x rows, keys] -> [b, k, G, rows, keys]."""
        return s.unflatten(1, (self.G, -1)).unflatten(0, (self.b.stop - self.b.start, -1))

    def kept(self, seed: Tensor, rows: slice, cols: slice, dropout_p: float) -> Tensor:
        """bool [N, G x rows, keys]: the dropout mask."""
        first = torch.arange(self.b.start, self.b.stop).view(-1, 1, 1) * (self.K * self.G)
        heads = torch.arange(self.K * self.G).view(self.K, self.G)[self.k]
        row = torch.arange(rows.start, rows.stop)
        kept = philox.keep_range(seed, (first + heads).unsqueeze(-1), row, cols.start, cols.stop, dropout_p)
        return kept.flatten(0, 1).flatten(1, 2)


class Tiling:
    """Cuts [B, T, K, G] x S into blocks whose scores stay in cache, and knows which keys a tile of rows sees."""

    def __init__(self, q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
                 left: int | None, right: int | None, cut: int = 0, alone: bool = False):  # fmt: skip
        """bounds: the tiles of keys; none has keys on both sides of `cut`."""
        (T, H), (S, K) = q.shape[-3:-1], k.shape[-3:-1]
        self.B, self.K, self.G = q.shape[0] if q.dim() == 4 else 1, K, H // K
        self.lo, self.hi = spec.key_range(T, S, cu_q, cu_k, k_lens, left, right, q.device)
        self.first, self.last = (0, T) if cu_q is None else (max(int(cu_q[0]), 0), min(int(cu_q[-1]), T))
        edges = sorted({*range(0, S, KEYS), cut, S})
        self.bounds = [slice(a, b) for a, b in itertools.pairwise(edges)]
        width = min(KEYS, max(S, 1))
        most = UNEVEN if left is not None or right is not None else EVEN
        self.terms = self.B * H * T * S * q.shape[-1]
        pairs = max(1, SCORES // (max(self.G, 1) * min(most, max(T, 1)) * width))  # in one batched matmul
        self.parts = 1
        threads = torch.get_num_threads() if self.terms > THREADED and not alone else 1
        pairs_in_all, common = self.B * K, math.gcd(self.B * K, threads)
        if common < threads and pairs_in_all < 4 * threads:  # heads do not divide evenly: rows do
            self.parts = min(threads // max(common, 1), PARTS)
            pairs = 1 if self.parts == PARTS else min(pairs, max(1, pairs_in_all // max(common, 1)))
        elif threads > 1:
            pairs = min(pairs, max(1, pairs_in_all // threads))
        self.pairs_b, self.pairs_k = min(max(1, pairs // K), max(self.B, 1)), min(pairs, K)
        height = SCORES // (self.pairs_b * self.pairs_k * max(self.G, 1) * width)
        self.height = min(most, max(16, height))

    def heads(self) -> Iterator[Heads]:
        for b in range(0, self.B if self.G else 0, self.pairs_b):
            for k in range(0, self.K, self.pairs_k):
                some = slice(b, min(b + self.pairs_b, self.B))
                for part in range(self.parts):
                    yield Heads(some, slice(k, min(k + self.pairs_k, self.K)), self.K, self.G, part)

    def rows(self, heads: Heads) -> Iterator[slice]:
        for t in range(self.first + heads.part * self.height, self.last, self.height * self.parts):
            yield slice(t, min(t + self.height, self.last))

    def blocks(self, heads: Heads, rows: slice) -> Iterator[Block]:
        """The keys that some row of the tile sees."""
        lo, hi = self.lo[..., rows], self.hi[..., rows]
        if lo.dim() == 2:
            lo, hi = lo[heads.b], hi[heads.b]
        some = hi > lo
        if not bool(some.any()):
            return
        start, stop, inner_start, inner_stop = int(lo[some].min()), int(hi.max()), int(lo.max()), int(hi.min())
        for n, tile in enumerate(self.bounds):
            cols = slice(max(tile.start, start), min(tile.stop, stop))
            if cols.start >= cols.stop:
                continue
            hidden = None
            if cols.start < inner_start or cols.stop > inner_stop:
                col = torch.arange(cols.start, cols.stop)
                hidden = (col < lo.unsqueeze(-1)) | (col >= hi.unsqueeze(-1))
            yield Block(n, slice(cols.start - tile.start, cols.stop - tile.start), cols, hidden)
