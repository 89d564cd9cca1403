"""Attention over a cache for XLA: runs padded to one length, their keys read a tile at a time by XLA's own loop.

A tile's cached rows are gathered through the block table and dequantised inside the loop, so that neither the scores of
all keys nor a copy of the cache exists. R runs of at most L query rows and N new keys each; W, T, S, H, K, D and G as
in kernels/cached_attention/spec.py; C keys of a tile.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.cached_attention import spec
from ..kernels.cached_attention.write import quantize_q8_0
from ._tiles import Index, State, at, loop, put

KEYS = 512  # of a tile
LOWEST = torch.finfo(torch.float32).min


class _Packed(NamedTuple):
    """Where the rows of the runs lie among `total` packed ones."""

    of: spec.Rows
    place: Tensor  # [R, L]
    there: Tensor  # [R, L]
    length: Tensor  # [R]

    @classmethod
    def make(cls, total: int, most: int, slots: Tensor, cu: Tensor | None, n_slots: int) -> "_Packed":
        runs, device = len(slots), slots.device
        if cu is None:
            each = total // runs
            begin, length = torch.arange(runs, device=device) * each, torch.full((runs,), each, device=device)
        else:
            bounds = cu.long().clamp(0, total)
            begin, length = bounds[:-1], bounds.diff()
        local = torch.arange(most, device=device)
        live = (slots >= 0) & (slots < n_slots)
        index = (begin.unsqueeze(1) + local).clamp(0, max(total - 1, 0))
        return cls(spec.rows_of(total, slots, cu, n_slots), index, (local < length[:, None]) & live[:, None], length)

    def padded(self, t: Tensor) -> Tensor:
        """[total, ..] -> [R, L, ..], 0 where there is no row, whatever is read there."""
        there = self.there.view(*self.there.shape, *(1,) * (t.dim() - 1))
        return t.index_select(0, self.place.flatten()).unflatten(0, self.place.shape).masked_fill(~there, 0.0)

    def packed(self, t: Tensor) -> Tensor:
        """[R, L, ..] -> [total, ..]: rows of no live run 0, NaN where a run is longer than L."""
        most = self.place.shape[1]
        rows = t.flatten(0, 1).index_select(0, self.of.run * most + self.of.local.clamp(0, most - 1))
        shape = (-1, *(1,) * (rows.dim() - 1))
        rows = rows.masked_fill((self.of.local >= most).view(shape), torch.nan)
        return rows.masked_fill(~self.of.live.view(shape), 0.0)


class _Runs:
    def __init__(
        self, q, k, k_cache, v_cache, k_scale, v_scale, table, slots, positions, cu_q, cu_k, scale, left, softcap,
        longest,
    ):  # fmt: skip
        n_slots = len(k_cache if table is None else table)
        self.page = k_cache.shape[1]
        self.window = self.page * (1 if table is None else table.shape[1])
        self.T, self.H, D = q.shape
        self.K, self.S, self.device = k.shape[1], k.shape[0], q.device
        self.G, self.softcap = self.H // self.K, softcap
        self.scale = D**-0.5 if scale is None else scale
        self.acc = torch.promote_types(q.dtype, torch.float32)
        self.rows = _Packed.make(self.T, min(longest, self.T) or 1, slots, cu_q, n_slots)
        new = longest if cu_k is None and self.T == self.S else self.S if cu_q is not None else self.S // len(slots)
        self.C = max(min(KEYS, max(self.window, new)), 1)
        self.nc, self.nn = -(-self.window // self.C), -(-new // self.C)
        self.new = _Packed.make(self.S, self.nn * self.C, slots, cu_q if cu_k is None else cu_k, n_slots)
        start = positions.long()
        first = start + self.new.length - self.rows.length  # position of a run's first query row
        place = first.unsqueeze(1) + torch.arange(self.rows.place.shape[1], device=self.device)
        # a row sees the positions from `lowest` to `place`, and a run those from `least` to `most`
        self.lowest, self.least = (t - left if left is not None else torch.full_like(t, -1) for t in (place, first))
        self.most = first + self.rows.length - 1
        self.live = (slots >= 0) & (slots < n_slots)
        slot = slots.long().clamp(0, max(n_slots - 1, 0))
        pages = slot.unsqueeze(1) if table is None else table.long()[slot].clamp(0, max(len(k_cache) - 1, 0))
        self.fixed = {"place": place, "start": start, "pages": pages}
        caches = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale}
        self.fixed |= {name: t.flatten(0, 1) for name, t in caches.items() if t is not None}
        self.fixed |= {"lowest": self.lowest, "least": self.least, "most": self.most, "live": self.live.int()}
        self.fixed |= {"new_there": self.new.there.int().unflatten(1, (self.nn, self.C)).movedim(1, 0)}

    def of_rows(self, t: Tensor) -> Tensor:
        """[T, H, D] -> [R, K, G L, D]."""
        t = self.rows.padded(t).to(self.acc).unflatten(2, (self.K, self.G))
        return t.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def of_values(self, t: Tensor, fill: float) -> Tensor:
        """[H, T] -> [R, K, G L, 1]; `fill` where there is no row."""
        t = self.rows.padded(t.mT).masked_fill(~self.rows.there.unsqueeze(-1), fill)
        return t.unflatten(2, (self.K, self.G)).permute(0, 2, 3, 1).flatten(2, 3).unsqueeze(-1)

    def packed(self, t: Tensor) -> Tensor:
        """[R, K, G L, D] -> [T, H, D]."""
        return self.rows.packed(t.unflatten(2, (self.G, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3))

    def of_keys(self, t: Tensor) -> Tensor:
        """[S, K, D] -> [tiles, R, K, C, D]."""
        return self.new.padded(t).unflatten(1, (self.nn, self.C)).permute(1, 0, 3, 2, 4)

    def keys(self, t: Tensor) -> Tensor:
        """The inverse of `of_keys`."""
        return self.new.packed(t.permute(1, 0, 3, 2, 4).flatten(1, 2))

    def tile(self, j: Index, cached: bool, fixed: State) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [R, K, C, D] of a tile, and the positions [R, C] that they have, -2 where there is none."""
        key = j * self.C + torch.arange(self.C, device=self.device)
        if cached:
            there, place = (key < fixed["start"].unsqueeze(1)) & (key < self.window), key.expand(len(self.live), -1)
        else:
            there, place = at(fixed["new_there"], j) > 0, fixed["start"].unsqueeze(1) + key
        seen = (place >= fixed["least"].unsqueeze(1)) & (place <= fixed["most"].unsqueeze(1))
        there = there & seen & (fixed["live"] > 0).unsqueeze(1)
        if cached:
            page = fixed["pages"].index_select(1, key.clamp(max=max(self.window - 1, 0)) // self.page)
            rows = (page * self.page + key % self.page).flatten()
            k, v = (self._cached(rows, name, fixed) for name in ("k", "v"))
        else:
            k, v = (at(fixed[name], j).to(self.acc) for name in ("k", "v"))
        k, v = (t.masked_fill(~there[:, None, :, None], 0.0) for t in (k, v))
        return k, v, place.where(there, -2)

    def _cached(self, rows: Tensor, name: str, fixed: State) -> Tensor:
        codes, scale = fixed[f"{name}_cache"], fixed.get(f"{name}_scale")
        if scale is not None:
            scale = scale.index_select(0, rows)
        t = spec.dequantized(codes.index_select(0, rows), scale, self.acc)
        return t.unflatten(0, (len(self.live), self.C)).transpose(1, 2)

    def scores(self, x: Tensor, keys: Tensor, place: Tensor, fixed: State) -> tuple[Tensor, Tensor]:
        """[R, K, G L, C] without and with mask."""
        capped = x @ keys.mT * self.scale
        if self.softcap:
            capped = self.softcap * (capped / self.softcap).tanh()
        place = place.unsqueeze(1)
        see = (place >= 0) & (place <= fixed["place"].unsqueeze(-1)) & (place >= fixed["lowest"].unsqueeze(-1))
        s = capped.unflatten(2, (self.G, -1)).masked_fill(~see[:, None, None], -torch.inf)
        return capped, s.flatten(2, 3)


def _over(runs: _Runs, body, state: State, fixed: State) -> State:
    """body(runs, cached, j, .., state, fixed) for the tiles of cached keys, then for those of new ones."""
    state = loop(functools.partial(body, runs, True), [(j, 0) for j in range(runs.nc)], state, fixed)
    return loop(functools.partial(body, runs, False), [(j, 0) for j in range(runs.nn)], state, fixed)


def forward(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    block_table: Tensor | None, slots: Tensor, positions: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    sinks: Tensor | None, scale: float | None, left: int | None, softcap: float, longest: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if q.numel() == 0 or len(slots) == 0:
        acc = torch.promote_types(q.dtype, torch.float32)
        return torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=acc)
    runs = _Runs(
        q, k, k_cache, v_cache, k_scale, v_scale, block_table, slots, positions, cu_q, cu_k, scale, left, softcap,
        longest,
    )  # fmt: skip
    x = runs.of_rows(q)
    top, total = torch.full_like(x[..., :1], LOWEST), torch.zeros_like(x[..., :1])
    if sinks is not None:
        sink = runs.of_values(sinks.to(runs.acc).unsqueeze(1).expand(-1, len(q)), -torch.inf)
        top, total = sink.clamp_min(LOWEST), (sink > -torch.inf).to(runs.acc)
    fixed = {**runs.fixed, "q": x, "k": runs.of_keys(k), "v": runs.of_keys(v)}
    state = _over(runs, _attend, {"top": top, "total": total, "acc": torch.zeros_like(x)}, fixed)
    top, total = state["top"], state["total"]
    out = runs.packed(state["acc"] / total.masked_fill(total == 0, 1.0))
    lse = runs.packed(top + total.log()).squeeze(-1)
    return out.to(q.dtype), lse.masked_fill(~runs.rows.of.live.unsqueeze(-1), -torch.inf).mT.contiguous()


def _attend(runs: _Runs, cached: bool, j: Index, _: Index, state: State, fixed: State) -> State:
    keys, values, place = runs.tile(j, cached, fixed)
    _, s = runs.scores(fixed["q"], keys, place, fixed)
    top = torch.maximum(state["top"], s.amax(-1, keepdim=True))
    p, shrink = (s - top).exp(), (state["top"] - top).exp()
    total = state["total"] * shrink + p.sum(-1, keepdim=True)
    return {"top": top, "total": total, "acc": state["acc"] * shrink + p @ values}


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    block_table: Tensor | None, slots: Tensor, positions: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    sinks: Tensor | None, scale: float | None, left: int | None, softcap: float, longest: int,
    need_q: bool, need_k: bool, need_v: bool, need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    no_sinks = lse.new_empty(0) if sinks is None else sinks.new_empty(0)
    if q.numel() == 0 or len(slots) == 0:
        wanted = ((need_q, q), (need_k, k), (need_v, v))
        grads = [torch.zeros_like(t) if need else t.new_empty(0) for need, t in wanted]
        return *grads, torch.zeros_like(sinks) if need_sinks and sinks is not None else no_sinks  # type: ignore[return-value]
    runs = _Runs(
        q, k, k_cache, v_cache, k_scale, v_scale, block_table, slots, positions, cu_q, cu_k, scale, left, softcap,
        longest,
    )  # fmt: skip
    x, g = runs.of_rows(q), runs.of_rows(d_out)
    log_sum = runs.of_values(lse, -torch.inf)
    live = log_sum != -torch.inf
    delta = (g * runs.of_rows(out)).sum(-1, keepdim=True)
    if d_lse is not None:
        delta = delta - runs.of_values(d_lse, 0.0).masked_fill(~live, 0.0)
    new_k, new_v = runs.of_keys(k), runs.of_keys(v)
    fixed = {**runs.fixed, "q": x, "k": new_k, "v": new_v, "g": g, "delta": delta}
    fixed["log_sum"] = log_sum.masked_fill(~live, 0.0)
    wanted_of = {"d_q": (need_q, x), "d_k": (need_k, new_k), "d_v": (need_v, new_v)}
    state = {name: torch.zeros_like(t, dtype=runs.acc) for name, (need, t) in wanted_of.items() if need}
    if state:
        state = _over(runs, _differentiate, state, fixed)
    row_delta = runs.packed(delta).squeeze(-1).mT
    return (
        runs.packed(state["d_q"]).to(q.dtype) if need_q else q.new_empty(0),
        runs.keys(state["d_k"]).to(k.dtype) if need_k else k.new_empty(0),
        runs.keys(state["d_v"]).to(v.dtype) if need_v else v.new_empty(0),
        spec.sink_gradient(sinks, lse, row_delta) if need_sinks and sinks is not None else no_sinks,
    )


def _differentiate(runs: _Runs, cached: bool, j: Index, _: Index, state: State, fixed: State) -> State:
    """Cached keys are constants: of them only d_q has a part."""
    if cached and "d_q" not in state:
        return state
    x, g, state = fixed["q"], fixed["g"], dict(state)
    keys, values, place = runs.tile(j, cached, fixed)
    capped, s = runs.scores(x, keys, place, fixed)
    p = (s - fixed["log_sum"]).exp()
    if "d_v" in state and not cached:
        state["d_v"] = put(state["d_v"], j, at(state["d_v"], j) + p.mT @ g)
    d_s = p * (g @ values.mT - fixed["delta"]) * runs.scale
    if runs.softcap:
        d_s = d_s * (1.0 - (capped / runs.softcap).square())
    if "d_q" in state:
        state["d_q"] = state["d_q"] + d_s @ keys
    if "d_k" in state and not cached:
        state["d_k"] = put(state["d_k"], j, at(state["d_k"], j) + d_s.mT @ x)
    return state


def write(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, rows: Tensor, k: Tensor, v: Tensor
) -> None:
    """Rows that are left out write what one that stays writes, or, where none stays, what is there: no shape depends on
    how many there are."""
    total = k_cache.shape[0] * k_cache.shape[1]
    if rows.numel() == 0 or total == 0:
        return
    keep = (rows >= 0) & (rows < total)
    first = keep.int().argmax(0).view(1)  # 0 where none is kept
    index = rows.where(keep, rows.index_select(0, first)).long().clamp(0, total - 1)
    source = torch.arange(len(rows), device=rows.device).where(keep, first)
    some = keep.any()
    for cache, scale, x in ((k_cache, k_scale, k), (v_cache, v_scale, v)):
        new = (x.to(cache.dtype),) if scale is None else quantize_q8_0(x)
        for stored, values in zip((cache, scale), new):
            assert stored is not None
            flat = stored.flatten(0, 1)
            value = torch.where(some, values.index_select(0, source), flat.index_select(0, index))
            stored.copy_(flat.index_copy(0, index, value).view(stored.shape))
