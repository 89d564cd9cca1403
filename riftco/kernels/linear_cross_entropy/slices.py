"""Linear + cross-entropy over slices of rows: a slice's logits become its losses, then its gradient, in one buffer.

Device-neutral; cuda.py, cpu.py, riftco/metal and riftco/tpu say how a slice of logits is turned into losses.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cross_entropy.spec import lse_of
from . import head as heads
from . import labels, vocabulary
from . import rows as selection
from .plan import Plan, plan
from .problem import Problem
from .rows import Rows, Where, put
from .vocabulary import why_not


def power_above(x: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent.clamp(-100, 100))


@dataclass(frozen=True)
class Loss:
    """How one device turns a slice of logits [n, V] into losses.

    forward, forward_backward_, backward: launchers of cross_entropy. The first two may overwrite the logits; the second
        leaves their gradient there.
    temporaries(problem): bytes per logit that these two hold beside the logits.
    most_bytes: a cap on slice_bytes, where larger slices are slower.
    vocabulary_below: rows a slice, below which a trainable head's classes are taken in blocks; 0: never.
    host_counts: the host sees values at once, so that counting rows costs no wait.
    power_above(x): the power of two above x > 0, between 2 ** -100 and 2 ** 100.
    """

    forward: Callable
    forward_backward_: Callable
    backward: Callable
    temporaries: Callable[[Problem], int]
    most_bytes: int | None = None
    vocabulary_below: int = 0
    host_counts: bool = False
    power_above: Callable[[Tensor], Tensor] = power_above


class Outputs:
    """loss, lse, log_prob, entropy, argmax of every row; slices are put in order and joined once, at the end."""

    def __init__(self, rows: Rows, p: Problem):
        self.rows, self.p = rows, p
        self.slices: list[tuple[Tensor, ...]] = []

    def put(self, results: tuple[Tensor, ...]) -> None:
        self.slices.append(results)

    def finished(self) -> tuple[Tensor, ...]:
        p = self.p
        columns = list(zip(*self.slices)) or [()] * 6
        loss, top, log_total, *more = (self._joined(c, 0, p.acc) for c in columns[: 5 if p.metrics else 3])
        if self.rows.short is not None:
            loss.masked_fill_(self.rows.short, torch.nan)
        shaped = [v.view(p.rows) for v in (loss, lse_of(top, log_total, p.softcap, p.logit_scale), *more)]
        if p.metrics:
            return *shaped, self._joined(columns[5], -1, torch.int64).view(p.rows)
        return *shaped, loss.new_empty(0), loss.new_empty(0), p.x.new_empty(0, dtype=torch.int64)

    def _joined(self, parts: tuple[Tensor, ...], filler: int, dtype: torch.dtype) -> Tensor:
        """The slices' values among those of all rows; dropped rows get the filler."""
        if parts and self.rows.everything:
            return torch.cat(parts)
        out = torch.full((self.rows.total,), filler, dtype=dtype, device=self.p.x.device)
        if parts:
            put(out, self.rows.where, torch.cat(parts))
        return out


def forward(ce: Loss, *arguments) -> tuple[Tensor, ...]:
    """The op linear_cross_entropy_fwd; spec.forward says what it means."""
    p = Problem(*arguments)
    with _as_given(p.x):
        rows, head, slices = _prepare(ce, p)
        out = Outputs(rows, p)
        for where, xs in rows.over(slices):
            logits = head.logits(xs, head.inner(xs))
            out.put(_losses(ce, p, logits, where))
            del logits
        return out.finished()


def backward(ce: Loss, d_loss: Tensor | None, *arguments) -> tuple[Tensor, ...]:
    """The op linear_cross_entropy_bwd; spec.backward says what it means."""
    *rest, accum_dtype, needs = arguments
    p = Problem(*rest)
    need_x, need_weight, need_bias, need_a, need_b = needs
    with _as_given(p.x):
        rows, head, slices = _prepare(ce, p)
        out = Outputs(rows, p)
        upstream, restore = tamed(p, d_loss, ce.power_above)
        if not why_not(p, rows.count, slices.rows, ce.vocabulary_below, need_weight, accum_dtype):
            grads = vocabulary.backward(ce, p, rows, head, out, slices, upstream, needs)
            return *out.finished(), grads[0].view(p.x.shape) if need_x else grads[0], *grads[1:]
        R = 0 if p.lora_a is None else p.lora_a.shape[0]
        d_x = rows.zeros_or_empty(p.C, dtype=p.x.dtype) if need_x else p.x.new_empty(0)
        d_w = heads.Sum(p.x, (p.V, p.C), torch.promote_types(p.x.dtype, accum_dtype), need_weight)
        d_a, d_b = heads.Sum(p.x, (R, p.C), p.acc, need_a), heads.Sum(p.x, (p.V, R), p.acc, need_b)
        d_bias = p.x.new_zeros(p.V if need_bias else 0, dtype=p.acc)
        for where, xs in rows.over(slices):
            inner = head.inner(xs)
            logits = head.logits(xs, inner)
            out.put(_gradients_(ce, p, logits, where, upstream))
            g = logits  # by now
            d_inner = head.d_inner(g) if need_x or need_a else None
            if need_x:
                together = isinstance(where, slice)
                made = d_x[where] if together else xs.new_empty(xs.shape)
                head.d_x(g, d_inner, made)
                if not together:
                    put(d_x, where, made)
            d_w.add(g, xs)
            d_a.add(d_inner, xs)
            d_b.add(g, inner)
            if need_bias:
                d_bias += g.sum(0, dtype=d_bias.dtype)
            del logits, g
        head.buffer = None
        if restore is not None:
            d_x, d_bias = d_x.mul_(restore), d_bias.mul_(restore)
        return (
            *out.finished(),
            d_x.view(p.x.shape) if need_x else d_x,
            d_w.result(p.weight_grad_dtype(accum_dtype), restore),
            d_bias,
            d_a.result(p.acc, restore),
            d_b.result(p.acc, p.lora_scale if restore is None else restore * p.lora_scale),
        )


def _as_given(x: Tensor) -> contextlib.AbstractContextManager:
    """No autocast inside; meta tensors, which tools run this on, have none."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def _prepare(ce: Loss, p: Problem) -> tuple[Rows, heads.Head, Plan]:
    rows, head = selection.Rows(p, ce.host_counts), heads.Head(p)
    row_bytes = p.V * (p.x.dtype.itemsize + ce.temporaries(p)) + head.row_bytes()
    slices = plan(rows.count, row_bytes, p.slice_bytes, ce.most_bytes)
    head.reserve(slices.rows)
    return rows, head, slices


def tamed(
    p: Problem, d_loss: Tensor | None, power_above: Callable[[Tensor], Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """(the upstream gradient [rows], a power of two that was taken out of it or None).

    float16 cannot hold the gradient of a mean over thousands of rows: its logits' gradients are made for upstream
    values below 1, and the factor is put back exactly, where float32 sums are rounded.
    """
    if d_loss is None:
        return None, None
    flat = d_loss.reshape(-1)
    if p.x.dtype != torch.float16 or flat.numel() == 0:
        return flat, None
    largest = flat.detach().float().abs().amax(0)  # torch_xla mistakes the shape of amax()
    factor = torch.where(largest.isfinite() & (largest > 0), power_above(largest), 1.0)
    return flat.float() / factor, factor


def _piece(t: Tensor | None, where: Where) -> Tensor | None:
    return None if t is None else t[where]


def _rowwise(p: Problem, where: Where) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(target, label_weight, row_weight) of a slice."""
    if p.label_weight is None:
        target, many = p.target.reshape(-1)[where], None
    else:
        k = p.target.shape[-1]
        target, many = p.target.reshape(-1, k)[where], p.label_weight.reshape(-1, k)[where]
    return target, many, None if p.row_weight is None else p.row_weight.reshape(-1)[where]


def _losses(ce: Loss, p: Problem, logits: Tensor, where: Where) -> tuple[Tensor, ...]:
    target, many, weight = _rowwise(p, where)
    if many is None:
        return ce.forward(logits, target, weight, p.class_weight, *p.options, p.metrics)
    options = (p.ignore_index, p.softcap, p.logit_scale, p.metrics)
    return labels.forward(ce.forward, logits, target, many, weight, *options)


def _gradients_(ce: Loss, p: Problem, logits: Tensor, where: Where, upstream: Tensor | None) -> tuple[Tensor, ...]:
    target, many, weight = _rowwise(p, where)
    d = _piece(upstream, where)
    if many is None:
        return ce.forward_backward_(logits, target, weight, p.class_weight, d, *p.options, p.metrics)
    options = (p.ignore_index, p.softcap, p.logit_scale, p.metrics)
    return labels.forward_backward_(ce.forward_backward_, logits, target, many, weight, d, *options)
