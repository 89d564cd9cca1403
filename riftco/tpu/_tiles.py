"""Attention's problem in tiles of one size, addressed by a number that the host or the device knows.

Every operand is laid out once with its tiles in front, so that the tile of a loop's step is one dynamic slice. B, T, S,
H, K, D and Dv as in kernels/attention/spec.py; G = H // K; R rows and C keys of a tile.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attention import philox, spec

Index = int | Tensor
State = dict[str, Tensor]


def loop(body: Callable[[Index, Index, State, State], State], pairs: list[tuple[int, int]], state: State, fixed: State):
    """state = body(i, j, state, fixed) for every pair: one body in the graph, however many there are.

    What the body reads must be among `state` and `fixed`: of anything else the whole history would run in every step.
    """
    if not pairs:
        return state
    if len(pairs) == 1:
        return body(*pairs[0], state, fixed)

    def step(carry, pair):
        return (body(pair[0], pair[1], *carry), carry[1]), None

    device = next(iter(state.values())).device
    steps = torch.tensor(pairs).to(device).unbind(1)
    scan: Any = importlib.import_module("torch_xla.experimental.scan")
    (state, _), _ = scan._scan_impl_pytree(step, (state, fixed), steps)  # scan() itself would record a backward
    return state


def at(t: Tensor, i: Index) -> Tensor:
    """t[i]; the device's numbers are read as a dynamic slice."""
    return t.index_select(0, i.view(1)).squeeze(0) if isinstance(i, Tensor) else t[i]


def put(t: Tensor, i: Index, value: Tensor) -> Tensor:
    """t with value at i."""
    index = i.view(1) if isinstance(i, Tensor) else torch.full((1,), i, device=t.device)
    return value.unsqueeze(0) if len(t) == 1 else t.index_copy(0, index, value.unsqueeze(0))


class Tiles:
    def __init__(
        self, q, k, cu_q, cu_k, k_lens, bias, seed, scale, left, right, softcap, dropout_p, rows: int, keys: int
    ):  # fmt: skip
        self.packed, self.device = q.dim() == 3, q.device
        self.B = 1 if self.packed else q.shape[0]
        (self.T, self.H), (self.S, self.K) = q.shape[-3:-1], k.shape[-3:-1]
        self.G = self.H // self.K
        self.R, self.C = max(min(rows, self.T), 1), max(min(keys, self.S), 1)
        if seed is not None:
            self.C = -(-self.C // 4) * 4  # a draw gives four numbers
        self.nr, self.nc = -(-self.T // self.R), -(-self.S // self.C)
        self.acc = torch.promote_types(q.dtype, torch.float32)
        self.bias, self.seed, self.softcap, self.dropout_p = bias, seed, softcap, dropout_p
        self.scale = spec.softmax_scale(q, scale)
        lo, hi = spec.key_range(self.T, self.S, cu_q, cu_k, k_lens, left, right, self.device)
        self.lo, self.hi = (self._ranges(t) for t in (lo, hi))
        # what shapes and the window tell about the keys of row i: from i + first on, and before i + last
        own = cu_q is not None and cu_k is None and self.T == self.S  # a document's rows are its keys
        dense, shift = cu_q is None, 0 if own else self.S - self.T
        self.first = shift - left if (own or (dense and k_lens is None)) and left is not None else None
        self.last = shift + right + 1 if (own or dense) and right is not None else None
        self.rows_exist = spec.exist(self.T, cu_q)
        self.keys_exist = spec.exist(self.S, cu_q if cu_k is None else cu_k, k_lens)

    def _ranges(self, t: Tensor) -> Tensor:
        """[T] or [B, T] -> [nr, R, 1] or [nr, B, 1, 1, R, 1]; rows behind the last see nothing."""
        t = F.pad(t, (0, self.nr * self.R - self.T)).int().unflatten(-1, (self.nr, self.R)).movedim(-2, 0)
        return t.unsqueeze(-1) if t.dim() == 2 else t[:, :, None, None, :, None]

    def pairs(self) -> Iterator[tuple[int, int]]:
        """The tiles (i, j) in which a row may see a key."""
        for i in range(self.nr):
            begin, end = i * self.R, min((i + 1) * self.R, self.T)
            for j in range(self.nc):
                low, high = j * self.C, (j + 1) * self.C
                if (self.last is None or low < end - 1 + self.last) and (
                    self.first is None or begin + self.first < high
                ):
                    yield i, j

    def of_rows(self, t: Tensor) -> Tensor:
        """[B, T, H, D] or [T, H, D] -> [nr, B, K, G R, D]. Rows that do not exist become 0, even of NaN."""
        t = self._existing(t, self.rows_exist)
        t = F.pad(t, (0, 0, 0, 0, 0, self.nr * self.R - self.T)).unflatten(1, (self.nr, self.R))
        return t.unflatten(3, (self.K, self.G)).permute(1, 0, 3, 4, 2, 5).flatten(3, 4)

    def of_keys(self, t: Tensor) -> Tensor:
        """[B, S, K, D] or [S, K, D] -> [nc, B, K, C, D]. Keys that do not exist become 0, even of NaN."""
        t = self._existing(t, self.keys_exist)
        t = F.pad(t, (0, 0, 0, 0, 0, self.nc * self.C - self.S)).unflatten(1, (self.nc, self.C))
        return t.permute(1, 0, 3, 2, 4)

    def _existing(self, t: Tensor, exist: Tensor | None) -> Tensor:
        t = t.unsqueeze(0) if self.packed else t
        return t if exist is None else t.masked_fill(~exist[..., None, None], 0.0)

    def of_row_values(self, t: Tensor, fill: float) -> Tensor:
        """[B, H, T] or [H, T] -> [nr, B, K, G R, 1]."""
        t = F.pad(t.unsqueeze(0) if self.packed else t, (0, self.nr * self.R - self.T), value=fill)
        t = t.unflatten(2, (self.nr, self.R)).unflatten(1, (self.K, self.G))
        return t.permute(3, 0, 1, 2, 4).flatten(3, 4).unsqueeze(-1)

    def rows(self, t: Tensor) -> Tensor:
        """The inverse of `of_rows`."""
        t = t.unflatten(3, (self.G, self.R)).permute(1, 0, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)
        return self._unpacked(t[:, : self.T])

    def keys(self, t: Tensor, start: int) -> Tensor:
        """The inverse of `of_keys`, from key `start` on."""
        return self._unpacked(t.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, start : self.S])

    def row_values(self, t: Tensor) -> Tensor:
        """The inverse of `of_row_values`."""
        t = t.squeeze(-1).unflatten(3, (self.G, self.R)).permute(1, 2, 3, 0, 4).flatten(3, 4).flatten(1, 2)
        return self._unpacked(t[..., : self.T])

    def _unpacked(self, t: Tensor) -> Tensor:
        return (t.squeeze(0) if self.packed else t).contiguous()

    def of_bias(self, t: Tensor) -> Tensor:
        """[B, H, T, S], each size or 1 -> [tiles, B, K, G, R, C], each or 1."""
        t = t.unsqueeze(1) if t.shape[1] == 1 else t.unflatten(1, (self.K, self.G))
        for dim, tiles, size in ((3, self.nr, self.R), (5, self.nc, self.C)):
            if t.shape[dim] == 1:
                t = t.unsqueeze(dim)
            else:
                pad = [0, 0] * (t.dim() - 1 - dim) + [0, tiles * size - t.shape[dim]]
                t = F.pad(t, pad).unflatten(dim, (tiles, size))
        return t.permute(3, 5, 0, 1, 2, 4, 6).flatten(0, 1)

    def bias_gradient(self, t: Tensor, bias: Tensor) -> Tensor:
        """The inverse of `of_bias`."""
        T, S = bias.shape[2:]
        t = t.unflatten(0, (self.nr if T > 1 else 1, self.nc if S > 1 else 1)).permute(2, 3, 4, 0, 5, 1, 6)
        return t.flatten(5, 6).flatten(3, 4).flatten(1, 2)[:, :, :T, :S].to(bias.dtype)

    def bias_tile(self, i: Index, j: Index) -> Index:
        assert self.bias is not None
        row, column = self.bias.shape[2] > 1, self.bias.shape[3] > 1
        return (i if row else 0) * (self.nc if column else 1) + (j if column else 0)

    def fixed(self) -> State:
        """What every step reads."""
        tensors = {"lo": self.lo, "hi": self.hi, "seed": self.seed}
        if self.bias is not None:
            hides = self.bias.dtype == torch.bool  # a loop carries no bool
            tensors["bias"] = self.of_bias(self.bias.to(torch.int8) if hides else self.bias)
        return {name: t for name, t in tensors.items() if t is not None}

    def split(self, s: Tensor) -> Tensor:
        """[B, K, G R, C] -> [B, K, G, R, C]."""
        return s.unflatten(2, (self.G, self.R))

    def scores(self, x: Tensor, keys: Tensor, i: Index, j: Index, fixed: State) -> tuple[Tensor, Tensor]:
        """[B, K, G R, C] without and with bias and mask."""
        capped = x @ keys.mT * self.scale
        if self.softcap:
            capped = self.softcap * (capped / self.softcap).tanh()
        s = self.split(capped)
        key = j * self.C + torch.arange(self.C, device=self.device, dtype=torch.int32)
        see = (key >= at(fixed["lo"], i)) & (key < at(fixed["hi"], i))
        if "bias" in fixed:
            bias = at(fixed["bias"], self.bias_tile(i, j))
            if bias.dtype == torch.int8:
                see = see & (bias > 0)
            else:
                s = s + spec.without_lowest(bias).to(self.acc)
        return capped, s.masked_fill(~see, -torch.inf).flatten(2, 3)

    def kept(self, i: Index, j: Index, fixed: State) -> Tensor:
        """[B, K, G R, C]: 0 where a probability is dropped, else 1 / (1 - dropout_p)."""
        head = torch.arange(self.B * self.H, device=self.device).view(self.B, self.K, self.G, 1, 1)
        row = (i * self.R + torch.arange(self.R, device=self.device)).unsqueeze(-1)
        quad = j * (self.C // 4) + torch.arange(self.C // 4, device=self.device)
        four = philox.words(fixed["seed"], *torch.broadcast_tensors(head, row, quad))
        kept = (torch.stack(four, -1) >= philox.threshold(self.dropout_p)).flatten(-2)
        return (kept.to(self.acc) / (1 - self.dropout_p)).flatten(2, 3)

    def sink_scores(self, sinks: Tensor) -> Tensor:
        """[H] -> [nr, B, K, G R, 1]; rows of no document have none."""
        t = sinks.to(self.acc).view(1, self.H, 1).expand(self.B, -1, self.T)
        if self.rows_exist is not None:
            t = t.masked_fill(~self.rows_exist, -torch.inf)
        return self.of_row_values(t.squeeze(0) if self.packed else t, -torch.inf)
