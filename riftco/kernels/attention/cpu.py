"""Attention on the CPU: batched matmuls over tiles of query rows and blocks of keys, in float32.

One tile holds rows of several documents where they are short, as every row knows its own range of keys. exp2 is the
fastest exponential here; its factor is applied after the maximum or lse is taken off, where rounding costs least.
"""

import math

import torch
from torch import Tensor

from . import spec
from .cpu_blocks import Block, Heads, Tiling

LOG2E = math.log2(math.e)
LOWEST = torch.finfo(torch.float32).min  # of a maximum: -inf - LOWEST stays -inf


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None,
    right: int | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -torch.inf, dtype=torch.float32)
    scale = spec.softmax_scale(q, scale)
    tiling = Tiling(q, k, cu_q, cu_k, k_lens, left, right)
    for heads in tiling.heads():
        keys, values = heads.keys(k, k_lens), heads.keys(v, k_lens)
        for rows in tiling.rows():
            x = heads.load(q, rows)
            acc, m = x.new_zeros((*x.shape[:2], v.shape[-1])), x.new_full((*x.shape[:2], 1), LOWEST)
            total = torch.zeros_like(m)
            if sinks is not None:  # one more score, without a value
                sink = heads.per_row(sinks, rows)
                m, total = sink.clamp_min(LOWEST), (sink > -torch.inf).to(torch.float32)
            for block in tiling.blocks(heads, rows):
                s = _masked(_capped(_bmm(x, keys[:, block.cols].mT, scale), softcap), heads, rows, block, bias)
                m_new = torch.maximum(m, s.amax(-1, keepdim=True))
                p = s.sub_(m_new).mul_(LOG2E).exp2_()
                shrink = (m - m_new).exp_()
                total = total.mul_(shrink).add_(p.sum(-1, keepdim=True))
                if seed is not None:
                    p.mul_(heads.kept(seed, rows, block.cols, dropout_p))
                acc = torch.baddbmm(acc.mul_(shrink), p, values[:, block.cols])
                m = m_new
            heads.store(out, rows, acc.div_((total * (1 - dropout_p)).masked_fill_(total == 0, 1.0)))
            heads.store_rows(lse, rows, m + total.log_())
    return out, lse


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float, dropout_p: float,
    kv_grad_start: int, deterministic: bool, need_q: bool, need_k: bool, need_v: bool, need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    start = kv_grad_start
    d_q = q.new_zeros(q.shape if need_q else 0)
    d_k, d_v = (
        t.new_zeros((*t.shape[:-3], t.shape[-3] - start, *t.shape[-2:]) if need else 0)
        for t, need in ((k, need_k), (v, need_v))
    )
    d_bias = None if bias is None or not need_bias else bias.new_zeros(bias.shape, dtype=torch.float32)
    scale, delta = spec.softmax_scale(q, scale), torch.zeros_like(lse)
    tiling = Tiling(q, k, cu_q, cu_k, k_lens, left, right, start)
    for heads in tiling.heads():
        keys, values = heads.keys(k, k_lens), heads.keys(v, k_lens)
        sum_k, sum_v = (
            t.new_zeros(t.shape[0], t.shape[1] - start, t.shape[2]) if need else None
            for t, need in ((keys, need_k), (values, need_v))
        )
        for rows in tiling.rows():
            x, g, o = heads.load(q, rows), heads.load(d_out, rows), heads.load(out, rows)
            minus_lse = heads.load_rows(lse, rows).neg()
            live = minus_lse != torch.inf
            minus_lse.masked_fill_(~live, 0.0)  # a row without keys: its mask alone makes p 0
            minus_delta = (g * o).sum(-1, keepdim=True).neg_()
            if d_lse is not None:
                minus_delta += heads.load_rows(d_lse, rows).masked_fill(~live, 0.0)
            heads.store_rows(delta, rows, -minus_delta)
            sum_q = torch.zeros_like(x) if need_q else None
            for block in tiling.blocks(heads, rows):
                cols = block.cols
                mine = slice(cols.start - start, cols.stop - start)  # of d_k and d_v, where it starts at 0 or above
                wanted_k, wanted_v = (t if mine.start >= 0 else None for t in (sum_k, sum_v))
                only_v = sum_q is None and wanted_k is None and d_bias is None
                if only_v and wanted_v is None:
                    continue
                if softcap:
                    capped = _capped(_bmm(x, keys[:, cols].mT, scale), softcap)
                    s = capped + minus_lse
                else:
                    s = torch.baddbmm(minus_lse, x, keys[:, cols].mT, alpha=scale)
                p = _masked(s, heads, rows, block, bias).mul_(LOG2E).exp2_()
                kept = None if seed is None else heads.kept(seed, rows, cols, dropout_p).float().div_(1 - dropout_p)
                if wanted_v is not None:
                    wanted_v[:, mine] += torch.bmm((p if kept is None else p * kept).mT, g)
                if only_v:
                    continue
                if kept is None:
                    d_s = torch.baddbmm(minus_delta, g, values[:, cols].mT).mul_(p)
                else:
                    d_s = torch.bmm(g, values[:, cols].mT).mul_(kept).add_(minus_delta).mul_(p)
                if d_bias is not None:
                    to = heads.bias(d_bias, rows, cols)
                    to += heads.split(d_s).sum_to_size(to.shape)
                if softcap:
                    d_s.mul_(capped.div_(softcap).square_().neg_().add_(1.0))
                if sum_q is not None:
                    sum_q.baddbmm_(d_s, keys[:, cols], alpha=scale)
                if wanted_k is not None:
                    wanted_k[:, mine] += torch.bmm(d_s.mT, x).mul_(scale)
            if sum_q is not None:
                heads.store(d_q, rows, sum_q)
        if sum_k is not None:
            heads.store_keys(d_k, sum_k)
        if sum_v is not None:
            heads.store_keys(d_v, sum_v)
    d_sinks = spec.sink_gradient(sinks, lse, delta) if sinks is not None and need_sinks else q.new_empty(0)
    exponent = spec.dout_exponent(d_out, cu_q) if q.dtype == torch.float16 else q.new_empty(0, dtype=torch.int32)
    d_bias = q.new_empty(0) if d_bias is None or bias is None else d_bias.to(bias.dtype)
    return d_q, d_k, d_v, d_bias, d_sinks, delta, exponent


def _bmm(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=alpha)


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
            heads.split(s).add_(part)
    return s
