"""A head whose rows, the classes, lie in several processes (DTensor, Shard(0)): each makes the logits of its own.

Rows of x are the same everywhere. Of each row the processes exchange the largest logit, the sum of exponentials below
it and the label's logit: three numbers, whatever V is. The gradient then needs nothing but its own classes; d_x is
each process's part of a sum, which DTensor takes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._contract import launcher, once_differentiable
from .._frozen_weight import DENSE
from ..cross_entropy.spec import lse_of
from . import head as heads
from . import slices, vocabulary
from .plan import Plan, plan
from .problem import Problem
from .rows import Rows, put

CPU_BYTES = 32 << 20  # of a slice's logits, as without shards


class Shard(NamedTuple):
    """The classes of this process: `first` and the V of its weight; of all: `V`; `most`: of the largest shard."""

    group: Any
    first: int
    most: int
    V: int


class ShardedRows(torch.autograd.Function):
    """(losses, lse) of the rows, in every process; the backward makes the logits again, a slice at a time."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, row_weight, options, shard):
        p = problem(x, weight, bias, target, row_weight, options)
        loss, lse, top, log_total = forward(p, shard)
        ctx.options, ctx.shard = options, shard
        ctx.save_for_backward(x, weight, bias, target, row_weight, top, log_total)
        ctx.mark_non_differentiable(lse)
        return loss, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss, _):
        x, weight, bias, target, row_weight, top, log_total = ctx.saved_tensors
        p = problem(x, weight, bias, target, row_weight, ctx.options)
        grads = backward(p, ctx.shard, d_loss, top, log_total, ctx.needs_input_grad[:3])
        return *grads, None, None, None, None


def problem(x, weight, bias, target, row_weight, options) -> Problem:
    """The call as the unsharded head's code takes it, with the classes of this process."""
    ignore_index, z_loss, softcap, logit_scale, slice_bytes, n_labelled = options
    return Problem(
        x, weight, None, target, bias, row_weight, None, None, None, None, weight.shape[0], DENSE, 0, 1.0,
        ignore_index, 0.0, z_loss, softcap, logit_scale, False, slice_bytes, n_labelled,
    )  # fmt: skip


def forward(p: Problem, shard: Shard) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse) of all rows, and (top, log_total) over all classes of those that are computed."""
    rows, head, over = _prepare(p, shard)
    top, log_total, own = (p.x.new_full((rows.count,), fill, dtype=p.acc) for fill in (-torch.inf, 0.0, 0.0))
    target = p.target.reshape(-1)
    done = 0
    for where, xs in rows.over(over):
        here = slice(done, done + xs.shape[0])
        done = here.stop
        if p.V:
            z = head.logits(xs, None)
            first = torch.zeros(xs.shape[0], dtype=torch.int64, device=z.device)  # any class: the loss is made below
            _, top[here], log_total[here], *_ = launcher("cross_entropy_fwd", z)(
                z, first, None, None, *_options(p), False
            )
            own[here] = _at_label(z, target[where] - shard.first, p)
    largest = top.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    unit = 1.0 if p.softcap else p.logit_scale  # `top` is of bent logits, or of logits before their scale
    below = torch.where(top == -torch.inf, 0.0, ((top - largest) * unit + log_total).exp())
    sums = torch.stack([below, own])
    dist.all_reduce(sums, group=shard.group)
    log_total = sums[0].log()
    loss, lse = _losses(p, rows, shard, sums[1], largest, log_total)
    return loss.view(p.rows), lse.view(p.rows), largest, log_total


def _losses(p: Problem, rows: Rows, shard: Shard, label, top, log_total) -> tuple[Tensor, Tensor]:
    where = rows.where
    lse = lse_of(top, log_total, p.softcap, p.logit_scale)
    loss = (1.0 if p.softcap else p.logit_scale) * (top - label) + log_total  # the large ones first: they nearly cancel
    if p.z_loss:
        loss = loss + p.z_loss * lse.square()
    target = p.target.reshape(-1)[where]
    loss = torch.where(target < shard.V, loss, torch.nan)
    if p.row_weight is not None:
        loss = loss * p.row_weight.reshape(-1)[where].to(p.acc)
    dead = ~rows.live[where]
    full = [p.x.new_zeros(rows.total, dtype=p.acc) for _ in range(2)]
    for out, value in zip(full, (loss, lse)):
        put(out, where, value.masked_fill(dead, 0.0))
    if rows.short is not None:
        full[0].masked_fill_(rows.short, torch.nan)
    return full[0], full[1]


def backward(
    p: Problem, shard: Shard, d_loss: Tensor, top: Tensor, log_total: Tensor, needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """This process's part of d_x, and d_weight and d_bias of its classes."""
    need_x, need_weight, need_bias = needs
    rows, head, over = _prepare(p, shard)
    upstream, restore = slices.tamed(p, rows, d_loss, slices.power_above)
    assert upstream is not None
    target = p.target.reshape(-1)
    d_x = rows.zeros_or_empty(p.C, dtype=p.x.dtype) if need_x else None
    d_w = heads.Sum(p.x, (p.V, p.C), p.acc, need_weight)
    d_bias = p.x.new_zeros(p.V, dtype=p.acc) if need_bias else None
    done = 0
    for where, xs in rows.over(over):
        here = slice(done, done + xs.shape[0])
        done = here.stop
        made = torch.zeros_like(xs)
        if p.V:
            z = head.logits(xs, None)
            a = upstream[where].to(p.acc)
            if p.row_weight is not None:
                a = a * p.row_weight.reshape(-1)[where].to(p.acc)
            k = a
            if p.z_loss:
                k = a * (1 + 2 * p.z_loss * lse_of(top[here], log_total[here], p.softcap, p.logit_scale))
            k = torch.where(target[where] < shard.V, k, torch.nan)
            dead = (~rows.live[where]).unsqueeze(-1)
            label = target[where] - shard.first
            launch = launcher("cross_entropy_bwd", z)
            g = vocabulary.d_logits(launch, p, z, label, top[here], log_total[here], k, a, dead)
            if need_x:
                head.d_x(g, None, made)
            d_w.add(g, xs)
            if d_bias is not None:
                d_bias += g.sum(0, dtype=p.acc)
        if d_x is not None:
            put(d_x, where, made)
    if restore is not None:
        for grad in (d_x, d_bias):
            if grad is not None:
                heads.scale_(grad, restore)
    return (
        None if d_x is None else d_x.view(p.x.shape),
        d_w.result(p.weight.dtype, restore) if need_weight else None,
        None if d_bias is None or p.bias is None else d_bias.to(p.bias.dtype),
    )


def _prepare(p: Problem, shard: Shard) -> tuple[Rows, heads.Head, Plan]:
    """Slices are planned for the largest shard, so that all processes have the same."""
    on_cpu = p.x.device.type == "cpu"
    rows, head = Rows(p, host_counts=on_cpu), heads.Head(p)
    itemsize = p.x.dtype.itemsize
    row_bytes = shard.most * (itemsize + 4 * ((itemsize == 2) + 2 * bool(p.softcap))) + 2 * itemsize * p.C
    over = plan(rows.count, row_bytes, p.slice_bytes, CPU_BYTES if on_cpu else None)
    head.reserve(over.rows)
    return rows, head, over


def _options(p: Problem) -> tuple[int, float, float, float, float]:
    """Of calls whose label is class 0."""
    return (p.ignore_index if p.ignore_index != 0 else -1, 0.0, 0.0, p.softcap, p.logit_scale)


def _at_label(z: Tensor, label: Tensor, p: Problem) -> Tensor:
    """The label's logit where it is one of these classes, else 0."""
    here = (label >= 0) & (label < z.shape[1])
    value = z.gather(-1, label.clamp(0, z.shape[1] - 1).long().unsqueeze(-1)).squeeze(-1).to(p.acc)
    if p.softcap:
        value = p.softcap * (value * (p.logit_scale / p.softcap)).tanh()
    return torch.where(here, value, 0.0)


def losses(
    x: Any,
    weight: Any,
    target: Any,
    bias: Any,
    row_weight: Any,
    options: tuple[int, float, float, float, int, int | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses, lse, target), whole, in every process, of a head that is a DTensor.

    Args:
        x: a Tensor that is the same in all processes, or a DTensor on weight's mesh, gathered here.
        weight: [V, C], Shard(0) or Replicate() on a mesh of one dimension.
        target, row_weight, bias: as x.
        options: ignore_index, z_loss, softcap, logit_scale, slice_bytes, n_labelled.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor import Shard as Cut

    mesh = weight.device_mesh
    V, world, rank = weight.shape[0], mesh.size(), mesh.get_local_rank()
    most = -(-V // world)  # DTensor cuts as torch.chunk does
    shard = Shard(mesh.get_group(), min(rank * most, V), most, V)

    def whole(t: Any, grad: Any = None) -> Any:
        if t is None:
            return None
        t = t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, [Replicate()], run_check=False)
        return t.redistribute(mesh, [Replicate()]).to_local(grad_placements=grad)

    rows_of = weight.redistribute(mesh, [Cut(0)]).to_local()
    if bias is not None:
        bias = bias if isinstance(bias, DTensor) else DTensor.from_local(bias, mesh, [Replicate()], run_check=False)
        bias = bias.redistribute(mesh, [Cut(0)]).to_local()
    target = whole(target)
    loss, lse = ShardedRows.apply(whole(x, [Partial()]), rows_of, bias, target, whole(row_weight), options, shard)
    return loss, lse, target
