"""Attention for XLA: one loop over the pairs of row and key tiles that can see each other; no T x S matrix.

The loop is XLA's own While, so that the graph is the same for any length. Masks are comparisons inside the fusion.
"""

import functools

import torch
from torch import Tensor

from ..kernels.attention import spec
from ._tiles import Index, State, Tiles, at, loop, put

ROWS = KEYS = 512  # of a tile
LOWEST = torch.finfo(torch.float32).min  # of a maximum: -inf - LOWEST stays -inf


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None,
    right: int | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if q.numel() == 0:
        return q.new_zeros((*q.shape[:-1], v.shape[-1])), _rowwise(q)
    tiles = Tiles(q, k, cu_q, cu_k, k_lens, bias, seed, scale, left, right, softcap, dropout_p, ROWS, KEYS)
    rows = tiles.of_rows(q)
    top = rows.new_full((*rows.shape[:-1], 1), LOWEST, dtype=tiles.acc)
    total = torch.zeros_like(top)
    if sinks is not None:  # one more score, without a value
        sink = tiles.sink_scores(sinks)
        top, total = sink.clamp_min(LOWEST), (sink > -torch.inf).to(sink.dtype)
    acc = rows.new_zeros((*rows.shape[:-1], v.shape[-1]), dtype=tiles.acc)
    fixed = {"q": rows, "k": tiles.of_keys(k), "v": tiles.of_keys(v), **tiles.fixed()}
    state = {"top": top, "total": total, "acc": acc}
    state = loop(functools.partial(_attend, tiles), [*tiles.pairs()], state, fixed)
    top, total, acc = (state[name] for name in ("top", "total", "acc"))
    out = tiles.rows(acc / total.masked_fill(total == 0, 1.0))
    return out.to(q.dtype), tiles.row_values(top + total.log())


def _attend(tiles: Tiles, i: Index, j: Index, state: State, fixed: State) -> State:
    """One tile of the online softmax."""
    top, total, acc = (at(state[name], i) for name in ("top", "total", "acc"))
    x, keys, values = (at(fixed[name], n).to(tiles.acc) for name, n in (("q", i), ("k", j), ("v", j)))
    _, s = tiles.scores(x, keys, i, j, fixed)
    new_top = torch.maximum(top, s.amax(-1, keepdim=True))
    p, shrink = (s - new_top).exp(), (top - new_top).exp()
    new_total = total * shrink + p.sum(-1, keepdim=True)
    if tiles.seed is not None:
        p = p * tiles.kept(i, j, fixed)
    new = {"top": new_top, "total": new_total, "acc": acc * shrink + p @ values}
    return {name: put(state[name], i, value) for name, value in new.items()}


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float, dropout_p: float,
    kv_grad_start: int, deterministic: bool, need_q: bool, need_k: bool, need_v: bool, need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """One pass over the tiles makes all gradients; tiles of keys before kv_grad_start make none of k and v."""
    tiles = Tiles(q, k, cu_q, cu_k, k_lens, bias, seed, scale, left, right, softcap, dropout_p, ROWS, KEYS)
    g = tiles.of_rows(d_out)
    log_sum = tiles.of_row_values(lse, -torch.inf)
    live = log_sum != -torch.inf
    delta = (g.to(tiles.acc) * tiles.of_rows(out).to(tiles.acc)).sum(-1, keepdim=True)
    if d_lse is not None:
        delta = delta - tiles.of_row_values(d_lse, 0.0).masked_fill(~live, 0.0)
    rows, keys, values = tiles.of_rows(q), tiles.of_keys(k), tiles.of_keys(v)
    fixed = {"q": rows, "k": keys, "v": values, "g": g, "delta": delta, **tiles.fixed()}
    fixed["log_sum"] = log_sum.masked_fill(~live, 0.0)  # a row without keys: its mask alone makes p 0
    need_bias = need_bias and bias is not None
    wanted = {"d_q": (need_q, rows), "d_k": (need_k, keys), "d_v": (need_v, values)}
    state = {name: torch.zeros_like(t, dtype=tiles.acc) for name, (need, t) in wanted.items() if need}
    if need_bias:
        state["d_bias"] = torch.zeros_like(fixed["bias"], dtype=tiles.acc)
    cut = kv_grad_start // tiles.C  # the first tile of keys with a gradient
    pairs, of_keys = [*tiles.pairs()], {name: state[name] for name in ("d_k", "d_v") if name in state}
    early = {name: t for name, t in state.items() if name not in of_keys}
    body = functools.partial(_differentiate, tiles)
    if early:
        state |= loop(body, [(i, j) for i, j in pairs if j < cut], early, fixed)
    if state:
        state = loop(body, [(i, j) for i, j in pairs if j >= cut], state, fixed)
    row_delta = tiles.row_values(delta)
    exponent = q.new_empty(0, dtype=torch.int32)
    if q.dtype == torch.float16:
        exponent = spec.dout_exponent(d_out, cu_q)
    return (
        tiles.rows(state["d_q"]).to(q.dtype) if need_q else q.new_empty(0),
        tiles.keys(state["d_k"], kv_grad_start).to(k.dtype) if need_k else k.new_empty(0),
        tiles.keys(state["d_v"], kv_grad_start).to(v.dtype) if need_v else v.new_empty(0),
        q.new_empty(0) if bias is None or not need_bias else tiles.bias_gradient(state["d_bias"], bias),
        spec.sink_gradient(sinks, lse, row_delta) if need_sinks and sinks is not None else q.new_empty(0),
        row_delta,
        exponent,
    )


def _differentiate(tiles: Tiles, i: Index, j: Index, state: State, fixed: State) -> State:
    """What one tile adds to the gradients in `state`."""
    x, g, keys = (at(fixed[name], n).to(tiles.acc) for name, n in (("q", i), ("g", i), ("k", j)))
    capped, s = tiles.scores(x, keys, i, j, fixed)
    p = (s - at(fixed["log_sum"], i)).exp()
    kept = None if tiles.seed is None else tiles.kept(i, j, fixed)
    added: dict[str, tuple[Index, Tensor]] = {}
    if "d_v" in state:
        added["d_v"] = j, (p if kept is None else p * kept).mT @ g
    if state.keys() != {"d_v"}:
        d_p = g @ at(fixed["v"], j).to(tiles.acc).mT
        d_s = p * ((d_p if kept is None else d_p * kept) - at(fixed["delta"], i))
        if "d_bias" in state:
            added["d_bias"] = tiles.bias_tile(i, j), tiles.split(d_s).sum_to_size(state["d_bias"].shape[1:])
        d_s = d_s * tiles.scale
        if tiles.softcap:
            d_s = d_s * (1.0 - (capped / tiles.softcap).square())
        if "d_q" in state:
            added["d_q"] = i, d_s @ keys
        if "d_k" in state:
            added["d_k"] = j, d_s.mT @ x
    return {name: put(t, added[name][0], at(t, added[name][0]) + added[name][1]) for name, t in state.items()}


def _rowwise(q: Tensor) -> Tensor:
    *lead, T, H, _ = q.shape
    return q.new_full((*lead, H, T), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
