"""Attention on the CPU: batched matmuls over tiles of query rows and blocks of keys, in float32.

One tile holds rows of several documents where they are short, as every row knows its own range of keys. exp2 is the
fastest exponential here; its factor is applied after the maximum or lse is taken off, where rounding costs least.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import cpu_plain, spec
from .cpu_blocks import Block, Heads, Tiling
from .cpu_products import Float32, products
from .cpu_threads import each

LOG2E = math.log2(math.e)
LOWEST = torch.finfo(torch.float32).min  # of a maximum: -inf - LOWEST stays -inf


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None,
    right: int | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not cpu_plain.why_not(q, k, v, scale, left, right, cu_q, cu_k, k_lens, bias, sinks, seed, softcap):
        out, lse = cpu_plain.forward(q, k, v, spec.softmax_scale(q, scale), right)
        if not cpu_plain.lost(out, lse):
            return out, lse
    out = _new(q, (*q.shape[:-1], v.shape[-1]), cu_q)
    lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -torch.inf, dtype=torch.float32)
    softmax_scale, tiling = spec.softmax_scale(q, scale), Tiling(q, k, cu_q, cu_k, k_lens, left, right)

    def group(heads: Heads) -> None:
        exact, use = Float32(), products(q.dtype, tiling.terms)
        keys = heads.tiles(k, tiling.bounds, k_lens, torch.float32)  # lse is float32, so are the scores under it
        values = heads.tiles(v, tiling.bounds, k_lens, use.dtype)
        for rows in tiling.rows(heads):
            x = heads.load(q, rows) * softmax_scale
            acc, m = lse.new_zeros((*x.shape[:2], v.shape[-1])), lse.new_full((*x.shape[:2], 1), LOWEST)
            total = torch.zeros_like(m)
            if sinks is not None:  # one more score, without a value
                sink = heads.per_row(sinks, rows)
                m, total = sink.clamp_min(LOWEST), (sink > -torch.inf).to(torch.float32)
            for block in tiling.blocks(heads, rows):
                s = _capped(exact.product(x, block.of(keys).mT, "s"), softcap)
                s = _masked(s, heads, rows, block, bias)
                m_new = torch.maximum(m, s.amax(-1, keepdim=True))
                p = s.sub_(m_new).mul_(LOG2E).exp2_()
                shrink = (m - m_new).exp_()
                total = total.mul_(shrink).add_(p.sum(-1, keepdim=True))
                if seed is not None:
                    p.mul_(heads.kept(seed, rows, block.cols, dropout_p))
                use.add(acc.mul_(shrink), use.operand(p, "p"), block.of(values))
                m = m_new
            heads.store(out, rows, acc.div_((total * (1 - dropout_p)).masked_fill_(total == 0, 1.0)))
            heads.store_rows(lse, rows, m + total.log_())

    each(tiling.heads(), group)
    return out, lse


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float, dropout_p: float,
    kv_grad_start: int, deterministic: bool, need_q: bool, need_k: bool, need_v: bool, need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if d_lse is not None and not d_lse.any():
        d_lse = None  # compiled graphs pass zeros
    options = (d_lse, cu_q, cu_k, k_lens, bias, sinks, seed, softcap, float(kv_grad_start))
    if not cpu_plain.why_not(q, k, v, scale, left, right, *options) and not (lse == -torch.inf).any():
        *grads, delta = cpu_plain.backward(d_out, q, k, v, out, lse, spec.softmax_scale(q, scale), right)
        none = q.new_empty(0)
        d_q, d_k, d_v = (g if need else none for g, need in zip(grads, (need_q, need_k, need_v)))
        return d_q, d_k, d_v, none, none, delta, q.new_empty(0, dtype=torch.int32)
    start = kv_grad_start
    d_q = _new(q, q.shape if need_q else (0,), cu_q)
    d_k, d_v = (
        _new(q, (*t.shape[:-3], t.shape[-3] - start, *t.shape[-2:]) if need else (0,))
        for t, need in ((k, need_k), (v, need_v))
    )
    d_bias = None if bias is None or not need_bias else bias.new_zeros(bias.shape, dtype=torch.float32)
    softmax_scale, delta = spec.softmax_scale(q, scale), torch.zeros_like(lse)
    tiling = Tiling(q, k, cu_q, cu_k, k_lens, left, right, start, alone=d_bias is not None)

    def group(heads: Heads) -> tuple[Heads, list[Tensor], list[Tensor]]:
        use = products(q.dtype, tiling.terms)
        rest = 1.0 if use.dtype == torch.float32 else softmax_scale  # of the scale, where q would be rounded by it
        keys, values = (heads.tiles(t, tiling.bounds, k_lens, use.dtype) for t in (k, v))
        sum_k, sum_v = (
            [lse.new_zeros(t.shape if cols.start >= start else 0) for t, cols in zip(tiles, tiling.bounds)]
            for tiles in (keys if need_k else [], values if need_v else [])
        )
        for rows in tiling.rows(heads):
            x, g = heads.load(q, rows, use.dtype), heads.load(d_out, rows, use.dtype)
            x = x * softmax_scale if rest == 1.0 else x
            minus_lse = heads.load_rows(lse, rows).neg()
            live = minus_lse != torch.inf
            minus_lse.masked_fill_(~live, 0.0)  # a row without keys: its mask alone makes p 0
            minus_delta = (heads.load(out, rows) * g).sum(-1, keepdim=True).neg_()
            if d_lse is not None:
                minus_delta += heads.load_rows(d_lse, rows).masked_fill(~live, 0.0)
            heads.store_rows(delta, rows, -minus_delta)
            sum_q = use.scratch.take("d_q", tuple(x.shape)).zero_() if need_q else None
            for block in tiling.blocks(heads, rows):
                cols = block.cols
                wanted_k, wanted_v = (block.of(t) if t and cols.start >= start else None for t in (sum_k, sum_v))
                only_v = sum_q is None and wanted_k is None and d_bias is None
                if only_v and wanted_v is None:
                    continue
                s = use.product(x, block.of(keys).mT, "s")
                s = capped = _capped(s if rest == 1.0 else s.mul_(rest), softcap)
                s = s + minus_lse if softcap else s.add_(minus_lse)
                p = _masked(s, heads, rows, block, bias).mul_(LOG2E).exp2_()
                kept = None if seed is None else heads.kept(seed, rows, cols, dropout_p).float().div_(1 - dropout_p)
                if wanted_v is not None:
                    use.add(wanted_v, use.operand(p if kept is None else p * kept, "p").mT, g)
                if only_v:
                    continue
                d_s = use.product(g, block.of(values).mT, "d_s")
                d_s = (d_s if kept is None else d_s.mul_(kept)).add_(minus_delta).mul_(p)
                if d_bias is not None:
                    to = heads.bias(d_bias, rows, cols)
                    to += heads.split(d_s).sum_to_size(to.shape)
                if softcap:
                    d_s.mul_(capped.div_(softcap).square_().neg_().add_(1.0))
                d_s = use.operand(d_s, "p")
                if sum_q is not None:
                    use.add(sum_q, d_s, block.of(keys))
                if wanted_k is not None:
                    use.add(wanted_k, d_s.mT, x)
            if sum_q is not None:
                heads.store(d_q, rows, sum_q.mul_(softmax_scale))
        if rest != 1.0:
            for tile in sum_k:
                tile.mul_(rest)
        if tiling.parts == 1:
            keep(heads, sum_k, sum_v)
            return heads, [], []
        return heads, sum_k, sum_v

    def keep(heads: Heads, sum_k: list[Tensor], sum_v: list[Tensor]) -> None:
        for to, tiles in ((d_k, sum_k), (d_v, sum_v)):
            for tile, cols in zip(tiles, tiling.bounds):
                if cols.start >= start:
                    heads.store(to, slice(cols.start - start, cols.stop - start), tile)

    done = each(tiling.heads(), group, alone=d_bias is not None)  # the groups of heads may share a bias
    for parts in zip(*(done[i :: tiling.parts] for i in range(tiling.parts))) if tiling.parts > 1 else ():
        heads, *sums = parts[0]
        for _, *others in parts[1:]:
            for total, other in zip(itertools.chain(*sums), itertools.chain(*others)):
                total += other
        keep(heads, *sums)
    d_sinks = spec.sink_gradient(sinks, lse, delta) if sinks is not None and need_sinks else q.new_empty(0)
    exponent = spec.dout_exponent(d_out, cu_q) if q.dtype == torch.float16 else q.new_empty(0, dtype=torch.int32)
    d_bias = q.new_empty(0) if d_bias is None or bias is None else d_bias.to(bias.dtype)
    return d_q, d_k, d_v, d_bias, d_sinks, delta, exponent


def _new(q: Tensor, shape: Sequence[int], cu: Tensor | None = None) -> Tensor:
    """Written row by row, so that only rows of no document, or no heads at all, need the zeros."""
    return q.new_empty(shape) if cu is None and q.shape[-2] else q.new_zeros(shape)


def _capped(s: Tensor, softcap: float) -> Tensor:
    return s.div_(softcap).tanh_().mul_(softcap) if softcap else s


def _masked(s: Tensor, heads: Heads, rows: slice, block: Block, bias: Tensor | None) -> Tensor:
    """s [N, G x rows, keys] with the bias added and -inf where a row does not see a key."""
    if block.hidden is not None:
        hidden = block.hidden if block.hidden.dim() == 2 else block.hidden[:, None, None]
        minus_inf = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        heads.split(s).add_(minus_inf)
    if bias is not None:
        part = heads.bias(bias, rows, block.cols)
        if bias.dtype == torch.bool:
            heads.split(s).masked_fill_(~part, -torch.inf)
        else:
            heads.split(s).add_(spec.without_lowest(part))
    return s
