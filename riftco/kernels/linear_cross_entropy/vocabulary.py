"""The other order, for a trainable head and small slices: blocks of classes instead of rows.

A first pass takes the rows' lse from slices of rows; a second makes the logits of all rows again, a block of classes at
a time. Each block of dW is one matmul over all rows, summed in float32 inside it and written once in the weight's
dtype, so no float32 dW exists; d_x is what is summed over blocks, in float32. 8 N C V flops instead of 6.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cross_entropy.spec import lse_of
from .head import Head, accumulate, add_product
from .plan import TILE, plan
from .problem import Problem
from .rows import Rows, put

if TYPE_CHECKING:
    from .slices import Loss, Losses


def why_not(p: Problem, count: int, passes: int, below: int, need_weight: bool, accum_dtype: torch.dtype) -> str:
    """ "" where blocks of classes pay; else why slices of rows are taken. passes: how often dW is added to; `below`:
    rows for each time, measured per device."""
    if not need_weight or p.frozen:
        return "the head is frozen"
    if passes <= 1 or count >= below * passes:
        return f"{count} rows in {passes} slices: reading and writing dW once a slice costs less than the logits again"
    if p.label_smoothing or p.label_weight is not None:
        return "label_smoothing and topk touch every class of a row at once"
    if p.x.dtype.itemsize != 2 or accum_dtype != torch.float32 or p.x.dtype == torch.float16:
        return "only a bfloat16 head summed in float32 saves what the sums of d_x cost"
    if count * (4 + p.x.dtype.itemsize) > 2 * p.V:
        return "float32 sums of d_x would be larger than those of dW"
    return ""


def backward(
    ce: "Loss",
    p: Problem,
    rows: Rows,
    head: Head,
    losses: "Losses",
    row_bytes: int,
    upstream: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """d_x, d_weight, d_bias, d_lora_a, d_lora_b; row_bytes: what a row of the first pass holds, which has the memory of
    a float32 dW to itself."""
    need_x, _, need_bias, need_a, need_b = needs
    slices = plan(rows.count, row_bytes, p.slice_bytes + 4 * p.V * p.C, ce.most_bytes)
    head.reserve(slices.rows)
    for _, xs in rows.over(slices):
        losses(head.logits(xs, head.inner(xs)))
    _, top, log_total, *_ = losses.columns()
    head.buffer = None

    where, x = rows.whole()
    target = p.target.reshape(-1)[where].long()
    dead = (~rows.live[where]).unsqueeze(-1)
    k, a = _coefficients(p, target, _piece(p.row_weight, where), _piece(upstream, where), top, log_total)
    inner = head.inner(x)
    d_w = p.x.new_empty((p.V, p.C))
    d_bias = p.x.new_empty(p.V if need_bias else 0, dtype=p.acc)
    d_b = p.x.new_empty((p.V, head.rank) if need_b else 0, dtype=p.acc)
    d_x = p.x.new_zeros((rows.count, p.C) if need_x else 0, dtype=p.acc)
    d_inner = p.x.new_zeros((rows.count, head.rank) if head.a is not None else 0, dtype=p.acc)
    columns = _columns(ce, p, rows.count)
    buffer = p.x.new_empty(rows.count, columns)
    for lo in range(0, p.V, columns):
        block = slice(lo, min(lo + columns, p.V))
        z = head.logits_of(x, inner, block, buffer[:, : block.stop - lo])
        g = d_logits(ce.backward, p, z, target - lo, top, log_total, k, a, dead)
        torch.mm(g.t(), x, out=d_w[block])
        if need_x:
            add_product(d_x, g.t(), p.weight[block], True)
        if need_bias:
            d_bias[block] = g.sum(0, dtype=p.acc)
        if head.b is not None and inner is not None:
            add_product(d_inner, g.t(), head.b[block], True)
            if need_b:
                accumulate(d_b[block], g, inner, False)
        del g  # before the next block's is made
    del z, buffer
    d_a = p.x.new_empty((head.rank, p.C) if need_a else 0, dtype=p.acc)
    if head.a is not None:
        narrow = d_inner.to(p.x.dtype)
        if need_a:
            accumulate(d_a, narrow, x, False)
        if need_x:
            add_product(d_x, narrow.t(), head.a, True)
    full = rows.zeros_or_empty(p.C, dtype=p.x.dtype) if need_x else p.x.new_empty(0)
    if need_x:
        put(full, where, d_x.to(p.x.dtype))
    return full, d_w, d_bias, d_a, d_b.mul_(p.lora_scale)


def _columns(ce: "Loss", p: Problem, count: int) -> int:
    """Classes of a block: its logits and their gradient lie side by side. A bfloat16 dW leaves half of a float32 one's
    memory for them and for float32 sums of d_x."""
    budget = max(p.slice_bytes, p.slice_bytes + 2 * p.C * (p.V - 2 * count))
    budget = budget if ce.most_bytes is None else min(budget, ce.most_bytes)
    most = max(1, budget // (max(1, count) * (2 * p.x.dtype.itemsize + ce.temporaries(p))))
    return min(p.V, most if most < TILE else most // TILE * TILE)


def _coefficients(p: Problem, target, row_weight, upstream, top, log_total) -> tuple[Tensor, Tensor]:
    """Of a row's gradient k p - a [v = target]: k and a, NaN where the target is no class."""
    up = torch.ones_like(top) if upstream is None else upstream.to(top.dtype)
    if row_weight is not None:
        up = up * row_weight.to(top.dtype)
    inside = (target >= 0) & (target < p.V)
    a = up if p.class_weight is None else up * p.class_weight[target.where(inside, 0)].to(top.dtype)
    k = a
    if p.z_loss:  # 0 times an infinite lse would be NaN
        k = a + 2 * p.z_loss * lse_of(top, log_total, p.softcap, p.logit_scale) * up
    return torch.where(target < p.V, k, torch.nan), a


def d_logits(launch: Callable[..., Tensor], p: Problem, z, label, top, log_total, k, a, dead) -> Tensor:
    """The block's gradient: the launcher of d lse gives k p; the labels' entries are written over, p - 1 by expm1."""
    n, V = z.shape
    here = ((label >= 0) & (label < V)).unsqueeze(-1)
    index = label.clamp(0, V - 1).unsqueeze(-1)
    x = z.gather(-1, index).to(p.acc)
    bent = (x * (p.logit_scale / p.softcap)).tanh() if p.softcap else None
    u, s = (x, p.logit_scale) if bent is None else (p.softcap * bent, 1.0)
    log_p = s * (u - top.unsqueeze(-1)) - log_total.unsqueeze(-1)
    slope = p.logit_scale if bent is None else p.logit_scale * (1 - bent.square())
    at_label = (a.unsqueeze(-1) * log_p.expm1() + (k - a).unsqueeze(-1) * log_p.exp()) * slope
    first = torch.zeros(n, dtype=torch.int64, device=z.device)  # any class: only d lse is asked for
    options = (p.ignore_index if p.ignore_index != 0 else -1, 0.0, 0.0, p.softcap, p.logit_scale)
    g = launch(None, k, z, first, None, None, top, log_total, *options)
    value = torch.where(here, at_label.to(g.dtype), g.gather(-1, index))
    return g.scatter_(-1, index, value).masked_fill_(dead, 0.0)


def _piece(t: Tensor | None, where) -> Tensor | None:
    return None if t is None else t.reshape(-1)[where]
