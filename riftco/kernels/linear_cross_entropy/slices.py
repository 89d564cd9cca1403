"""Linear + cross-entropy over slices of rows: a slice's logits become its losses, then its gradient, in one buffer.

Device-neutral; cuda.py, cpu.py, riftco/metal and riftco/tpu say how a slice of logits is turned into losses.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cross_entropy.spec import lse_of, no_metrics
from . import head as heads
from . import labels, panels, vocabulary
from . import rows as selection
from .panels import Panels, Sizes
from .plan import Filled, Plan, plan
from .problem import Problem
from .rows import Places, Rows, put
from .vocabulary import why_not

FIELDS = len(Problem._fields)


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
    in_turn: cross_entropy.cuda.Slices, where a device has that: the launches of one call, with what they share worked
        out once.
    places: counts the rows that carry loss in one launch.
    onednn: float32 products go through oneDNN (`_matmul`).
    filled(problem, need_weight): what sizes of slices suit the device's matmul of d_x.
    panel(problem): what the width of panels is a multiple of that `in_turn` takes (`panels`); 0: it takes none.
    one_product: a product of 16-bit operands rounds its sums once, so that dW of one slice needs no wider memory.
    """

    forward: Callable
    forward_backward_: Callable
    backward: Callable
    temporaries: Callable[[Problem], int]
    most_bytes: int | None = None
    vocabulary_below: int = 0
    host_counts: bool = False
    power_above: Callable[[Tensor], Tensor] = power_above
    in_turn: Callable[..., Any] | None = None
    places: Places | None = None
    onednn: bool = False
    filled: Callable[[Problem, bool], Filled | None] = lambda p, need_weight: None
    panel: Callable[[Problem], int] = lambda p: 0
    one_product: bool = False


class Losses:
    """loss, lse, log_prob, entropy, argmax of the rows of one call, whose slices come in order.

    With `gradient` a slice's logits become their gradient, else they may be overwritten, too. `upstream`: of all rows.
    """

    def __init__(self, ce: Loss, p: Problem, rows: Rows, gradient: bool = False, upstream: Tensor | None = None):
        self.ce, self.p, self.rows, self.gradient, self.done = ce, p, rows, gradient, 0
        k = () if p.label_weight is None else p.target.shape[-1:]
        self.target = rows.of(p.target.reshape(rows.total, *k))
        self.many = None if p.label_weight is None else rows.of(p.label_weight.reshape(rows.total, *k))
        self.weight = None if p.row_weight is None else rows.of(p.row_weight.reshape(-1))
        self.upstream = None if upstream is None else rows.of(upstream)
        self.parts: list[tuple[Tensor, ...]] = []
        self.out: list[Tensor] = []
        self.launch: Any = None
        if ce.in_turn is not None and self.many is None:
            self.out = [p.x.new_empty(rows.count, dtype=p.acc) for _ in range(5 if p.metrics else 3)]
            if p.metrics:
                self.out.append(p.x.new_empty(rows.count, dtype=torch.int64))
            self.launch = ce.in_turn(
                self.target, self.weight, p.class_weight, self.upstream, p.options, p.metrics, gradient, self.out
            )

    def __call__(self, logits: Tensor) -> None:
        """The losses of the next rows."""
        first, self.done = self.done, self.done + logits.shape[0]
        if self.launch is None:
            self.parts.append(self._part(logits, slice(first, self.done)))
        else:
            self.launch(logits, first)

    def in_panels(self, panels: list[Tensor], together: int) -> None:
        """The losses of the first rows, whose logits lie in panels, `together` of them in one place."""
        assert self.launch is not None
        self.done = panels[0].shape[0]
        self.launch.in_panels(panels, together)

    def _part(self, logits: Tensor, at: slice) -> tuple[Tensor, ...]:
        p, ce = self.p, self.ce
        target, weight, d = self.target[at], _piece(self.weight, at), _piece(self.upstream, at)
        if self.many is not None:
            options = (p.ignore_index, p.softcap, p.logit_scale, p.metrics)
            if self.gradient:
                many = (target, self.many[at], weight, d)
                return labels.forward_backward_(ce.forward_backward_, logits, *many, *options)
            return labels.forward(ce.forward, logits, target, self.many[at], weight, *options)
        if self.gradient:
            return ce.forward_backward_(logits, target, weight, p.class_weight, d, *p.options, p.metrics)
        return ce.forward(logits, target, weight, p.class_weight, *p.options, p.metrics)

    def columns(self) -> list[Tensor]:
        """loss, top, log_total, with metrics log_prob, entropy and argmax, too, of the computed rows."""
        if not self.out and self.parts:
            self.out = [torch.cat(c) for c in list(zip(*self.parts))[: 6 if self.p.metrics else 3]]
        return self.out

    def finished(self) -> tuple[Tensor, ...]:
        p, columns = self.p, self.columns() if self.done else []
        loss, top, log_total, *more = (self._of_all(columns, i) for i in range(6 if p.metrics else 3))
        if self.rows.short is not None:
            loss.masked_fill_(self.rows.short, torch.nan)
        shaped = [v.view(p.rows) for v in (loss, lse_of(top, log_total, p.softcap, p.logit_scale), *more)]
        return *shaped, *(() if p.metrics else no_metrics(p.x))

    def _of_all(self, columns: list[Tensor], i: int) -> Tensor:
        """Column i with the rows that are not computed, too: 0, and -1 as argmax."""
        if columns and self.rows.everything:
            return columns[i]
        filler, dtype = (-1, torch.int64) if i == 5 else (0, self.p.acc)
        out = torch.full((self.rows.total,), filler, dtype=dtype, device=self.p.x.device)
        if columns:
            put(out, self.rows.where, columns[i])
        return out


def forward(ce: Loss, *arguments) -> tuple[Tensor, ...]:
    """The op linear_cross_entropy_fwd; spec.forward says what it means."""
    p = Problem(*arguments)
    with _as_given(p.x):
        rows, head, slices = _prepare(ce, p)
        head.reserve(slices.rows)
        losses = Losses(ce, p, rows)
        for _, xs in rows.over(slices):
            losses(head.logits(xs, head.inner(xs)))
        return losses.finished()


def backward(ce: Loss, d_loss: Tensor | None, *arguments) -> tuple[Tensor, ...]:
    """The op linear_cross_entropy_bwd; spec.backward says what it means."""
    rest, (accum_dtype, needs, *counted) = arguments[:FIELDS], arguments[FIELDS:]
    p = Problem(*rest)
    need_x, need_weight, need_bias, need_a, need_b = needs
    with _as_given(p.x):
        filled = ce.filled(p, need_weight) if need_x else None
        rows, head, slices = _prepare(ce, p, counted[0] if counted else None, filled)
        upstream, restore = tamed(p, rows, d_loss, ce.power_above)
        first, slices, dtype = (
            _order(ce, p, rows, slices, accum_dtype, need_x, filled) if need_weight else (None, slices, p.acc)
        )
        passes = slices.slices + (first is not None)
        if not why_not(p, rows.count, passes, ce.vocabulary_below, need_weight, accum_dtype):
            losses = Losses(ce, p, rows)
            grads = vocabulary.backward(ce, p, rows, head, losses, slices.row_bytes, upstream, needs)
            return *losses.finished(), grads[0].view(p.x.shape) if need_x else grads[0], *grads[1:]
        losses = Losses(ce, p, rows, True, upstream)
        R, together = head.rank, rows.index is None
        d_x = rows.zeros_or_empty(p.C, dtype=p.x.dtype) if need_x else p.x.new_empty(0)
        d_w = heads.Sum(p.x, (p.V, p.C), dtype, need_weight)
        d_a, d_b = heads.Sum(p.x, (R, p.C), p.acc, need_a), heads.Sum(p.x, (p.V, R), p.acc, need_b)
        d_bias = p.x.new_zeros(p.V, dtype=p.acc) if need_bias else p.x.new_empty(0, dtype=p.acc)
        if first is not None:
            panels.backward(p, rows, head, losses, first, d_w, d_x if need_x else None, d_bias if need_bias else None)
        if slices.slices:
            head.reserve(slices.rows)
        for where, xs in rows.over(slices, losses.done):
            inner = head.inner(xs)
            logits = head.logits(xs, inner)
            losses(logits)
            g = logits  # by now
            d_inner = head.d_inner(g) if need_x or need_a else None
            if need_x:
                made = d_x[where] if together else xs.new_empty(xs.shape)
                head.d_x(g, d_inner, made)
                if not together:
                    put(d_x, where, made)
            if need_weight:
                d_w.add(g, xs)
            if need_a:
                d_a.add(d_inner, xs)
            if need_b:
                d_b.add(g, inner)
            if need_bias:
                d_bias += g.sum(0, dtype=d_bias.dtype)
            del logits, g
        head.buffer = None
        if restore is not None:
            heads.scale_(d_x, restore)
            heads.scale_(d_bias, restore)
        return (
            *losses.finished(),
            d_x.view(p.x.shape) if need_x else d_x,
            d_w.result(p.weight_grad_dtype(accum_dtype), restore),
            d_bias,
            d_a.result(p.acc, restore),
            d_b.result(p.acc, p.lora_scale if restore is None else restore * p.lora_scale),
        )


def _as_given(x: Tensor) -> contextlib.AbstractContextManager:
    """No autocast inside; meta tensors, which tools run this on, have none."""
    on = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if on else contextlib.nullcontext()


def _prepare(
    ce: Loss, p: Problem, counted: Tensor | None = None, filled: Filled | None = None
) -> tuple[Rows, heads.Head, Plan]:  # fmt: skip
    rows, head = selection.Rows(p, ce.host_counts, ce.places, counted), heads.Head(p, ce.onednn, filled)
    row_bytes = p.V * (p.x.dtype.itemsize + ce.temporaries(p)) + head.row_bytes(rows.views, rows.index is None)
    slices = plan(rows.count, row_bytes, p.slice_bytes, ce.most_bytes, filled)
    return rows, head, slices


def _order(
    ce: Loss, p: Problem, rows: Rows, slices: Plan, accum_dtype: torch.dtype, need_x: bool, filled: Filled | None
) -> tuple[Panels | None, Plan, torch.dtype]:  # fmt: skip
    """Of a head that learns: a first slice in panels or None, the slices of the other rows, the dtype of dW's memory.

    No more memory is taken than dW in accum_dtype and slice_bytes. Where one product makes dW it is written in its own
    dtype, and what that leaves is the logits'.
    """
    wide, narrow = torch.promote_types(p.x.dtype, accum_dtype), p.weight_grad_dtype(accum_dtype)
    if not ce.one_product or p.V * p.C < panels.FILLING:
        return None, slices, wide
    saved = p.V * p.C * (wide.itemsize - narrow.itemsize)
    if slices.slices > 1 and (step := ce.panel(p)):
        sizes = Sizes(
            p.V, step, p.x.dtype.itemsize, p.C * narrow.itemsize, p.C * wide.itemsize,
            p.C * p.x.dtype.itemsize * (not rows.views),
            p.C * (p.acc.itemsize + p.x.dtype.itemsize * (rows.index is not None)) * need_x, p.slice_bytes,
        )  # fmt: skip
        if (found := panels.first(rows.count, sizes, slices.row_bytes, filled)) is not None:
            made, rest = found
            if 1 + rest.slices <= panels.WORTH * slices.slices:
                return made, rest, wide if rest.slices else narrow
    whole = plan(rows.count, slices.row_bytes, p.slice_bytes + saved)
    return (None, whole, narrow) if whole.slices <= 1 else (None, slices, wide)


def tamed(
    p: Problem, rows: Rows, d_loss: Tensor | None, power_above: Callable[[Tensor], Tensor]
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
    live = rows.of(flat) if rows.all_live else flat.where(rows.live, 0.0)  # what others are sent counts for nothing
    if live.numel() == 0:
        return flat, None
    largest = live.detach().float().abs().amax(0)  # torch_xla mistakes the shape of amax()
    factor = torch.where(largest.isfinite() & (largest > 0), power_above(largest), 1.0)
    return flat.float() / factor, factor


def _piece(t: Tensor | None, at: slice) -> Tensor | None:
    return None if t is None else t[at]
