"""Cross-entropy on the CPU: blocks of rows that stay in the cache, each taken through one exponential.

Rows without a label are never read. The scratch of a block is float32 whatever the logits are; float32 gradients are
made where they end up.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._launch import one_stride
from .spec import labels, no_metrics

BLOCK_BYTES = 1 << 20  # of float32 logits for each thread: what a second-level cache holds


class _Rows(NamedTuple):
    """Some rows of a call: where they lie among all, and what belongs to each of them."""

    where: slice | Tensor
    label: Tensor  # a target that is safe to index with
    valid: Tensor
    weight: Tensor | None


class _Call(NamedTuple):
    """Rows of logits [..., V] with their options. x: the logits as [N, V], or as they came where no view gives that."""

    x: Tensor
    rows: list[_Rows]
    dropped: Tensor | None  # rows without loss
    class_weight: Tensor | None
    weight_sum: float | Tensor
    label_smoothing: float
    z_loss: float
    softcap: float
    logit_scale: float

    @property
    def acc(self) -> torch.dtype:
        return torch.promote_types(self.x.dtype, torch.float32)

    @property
    def s(self) -> float:
        return 1.0 if self.softcap else self.logit_scale


def _prepare(logits, target, row_weight, class_weight, ignore_index, label_smoothing, z_loss, softcap, logit_scale):
    V = logits.shape[-1]
    x = logits.view(target.numel(), V) if one_stride(logits) else logits
    w = None if row_weight is None else row_weight.reshape(-1)
    live, index, valid = labels(target.reshape(-1), w, ignore_index, V)
    at = live.nonzero().squeeze(1)
    whole = at.numel() == live.numel()
    step = max(1, BLOCK_BYTES * torch.get_num_threads() // (4 * max(V, 1)))
    rows = []
    for lo in range(0, at.numel() if V else 0, step):
        where = slice(lo, min(lo + step, at.numel())) if whole else at[lo : lo + step]
        rows.append(_Rows(where, index[where], valid[where], None if w is None else w[where]))
    weight_sum = V if class_weight is None else class_weight.sum()
    dropped = None if whole else live.logical_not()
    return _Call(x, rows, dropped, class_weight, weight_sum, label_smoothing, z_loss, softcap, logit_scale)


def _take(call: _Call, where: slice | Tensor) -> Tensor:
    if call.x.dim() == 2:
        return call.x[where]
    rows = torch.arange(where.start, where.stop) if isinstance(where, slice) else where
    return call.x[torch.unravel_index(rows, call.x.shape[:-1])]


def _blocks(call: _Call, out: Tensor | None) -> Iterator[tuple[_Rows, Tensor]]:
    """(rows, their u as a float32 block that may be overwritten); a block of `out` itself where it can be."""
    scratch = None
    for rows in call.rows:
        x = _take(call, rows.where)
        if out is not None and isinstance(rows.where, slice) and out.dtype == call.acc:
            u = out[rows.where]
            u = u if u.data_ptr() == x.data_ptr() else u.copy_(x)
        elif x.dtype == call.acc and not isinstance(rows.where, slice):
            u = x  # gathered: its own already
        else:
            if scratch is None:
                scratch = torch.empty(x.shape, dtype=call.acc)
            u = scratch[: x.shape[0]].copy_(x)
        if call.softcap:
            u.mul_(call.logit_scale / call.softcap).tanh_().mul_(call.softcap)
        yield rows, u


def _put(out: Tensor, rows: _Rows, value: Tensor) -> None:
    if not isinstance(rows.where, slice):
        out.index_copy_(0, rows.where, value.to(out.dtype))
    elif out[rows.where].data_ptr() != value.data_ptr():
        out[rows.where] = value


def _losses(call: _Call, rows: _Rows, u: Tensor, metrics: bool):
    """u becomes exp(s * (u - top)), the label's 0 -> (loss, top, log_total, log_prob[, entropy, argmax]), their sum."""
    at = rows.label.unsqueeze(-1)
    bound = torch.finfo(u.dtype).max
    top = u.amax(-1, keepdim=True).clamp_(-bound, bound)
    argmax = u.argmax(-1) if metrics else None
    u.sub_(top)
    if call.s != 1:
        u.mul_(call.s)
    top = top.squeeze(-1)
    picked = u.gather(-1, at).squeeze(-1)
    if call.label_smoothing:
        smooth = u.sum(-1) if call.class_weight is None else u @ call.class_weight
    d = u.clone() if metrics else None
    if d is not None:
        d.scatter_(-1, at, 0.0)
    # the others without the label, whose part would hide theirs in a confident row
    others, e_y = u.scatter_(-1, at, -torch.inf).exp_().sum(-1), picked.exp()
    total = others + e_y
    log_total = torch.where(picked == 0, others.log1p(), total.log())
    log_p = torch.where(rows.valid, picked - log_total, torch.nan)
    loss = -(1 - call.label_smoothing) * log_p
    if call.class_weight is not None:
        loss *= call.class_weight[rows.label]
    if call.label_smoothing:
        loss += call.label_smoothing / u.shape[-1] * (call.weight_sum * log_total - smooth)
    if call.z_loss:
        loss += call.z_loss * (call.s * top + log_total).square()
    if rows.weight is not None:
        loss *= rows.weight
    if d is None:
        return (loss, top, log_total, log_p), total
    entropy = log_total - (d.masked_fill_(u == 0, 0.0).mul_(u).sum(-1) + e_y * picked.nan_to_num(0.0)) / total
    return (loss, top, log_total, log_p, entropy, argmax), total


def _gradient_(call: _Call, rows: _Rows, u: Tensor, up, extra, slope, total: Tensor, log_p: Tensor, lse: Tensor):
    """u = exp(s * (u - top)) becomes d_logits. up, extra: d_loss, d_lse of the rows, or None; slope: of the softcap."""
    V, at = u.shape[-1], rows.label.unsqueeze(-1)
    p = log_p.exp()
    k = torch.zeros_like(p) if extra is None else extra
    if up is not None:
        up = torch.where(rows.valid, up if rows.weight is None else up * rows.weight, torch.nan)
        w = 1.0 if call.class_weight is None else call.class_weight[rows.label]
        a = (1 - call.label_smoothing) * w * up
        rest = call.label_smoothing / V * call.weight_sum * up + k
        if call.z_loss:  # 0 times an infinite lse would be NaN
            rest = rest + 2 * call.z_loss * lse * up
        even = call.label_smoothing / V * up
        hot, k = a * log_p.expm1() + rest * p - even * w, a + rest
    else:
        hot = k * p
    u.mul_((k / total * call.logit_scale).unsqueeze(-1))
    if up is not None and call.label_smoothing:
        even = (even * call.logit_scale).unsqueeze(-1)
        u.sub_(even if call.class_weight is None else even * call.class_weight)
    u.scatter_(-1, at, (hot * call.logit_scale).unsqueeze(-1))
    return u if slope is None else u.mul_(slope)


def _slope(call: _Call, u: Tensor) -> Tensor | None:
    return torch.square(u / call.softcap).neg_().add_(1) if call.softcap else None


def _outputs(target: Tensor, logits: Tensor, metrics: bool) -> list[Tensor]:
    N = target.numel()
    acc = torch.promote_types(logits.dtype, torch.float32)
    out = [torch.zeros(N, dtype=acc) for _ in range(5 if metrics else 3)]
    return [*out, torch.full((N,), -1)] if metrics else [*out, *no_metrics(logits)]


def _shaped(out: list[Tensor], target: Tensor, metrics: bool) -> tuple[Tensor, ...]:
    made = 6 if metrics else 3
    return *(t.view(target.shape) for t in out[:made]), *out[made:]


def forward(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, metrics: bool,
    may_overwrite: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = _prepare(
        logits, target, row_weight, class_weight, ignore_index, label_smoothing, z_loss, softcap, logit_scale
    )  # fmt: skip
    out = _outputs(target, logits, metrics)
    for rows, u in _blocks(call, call.x if may_overwrite and call.x.dim() == 2 else None):
        values, _ = _losses(call, rows, u, metrics)
        for o, value in zip(out, values if metrics else values[:3]):
            _put(o, rows, value)
    return _shaped(out, target, metrics)


def backward(
    d_loss: Tensor | None, d_lse: Tensor | None, logits: Tensor, target: Tensor, row_weight: Tensor | None,
    class_weight: Tensor | None, top: Tensor, log_total: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float,
) -> Tensor:  # fmt: skip
    call = _prepare(
        logits, target, row_weight, class_weight, ignore_index, label_smoothing, z_loss, softcap, logit_scale
    )  # fmt: skip
    d_x = torch.empty((target.numel(), logits.shape[-1]), dtype=logits.dtype)
    up, extra = (None if t is None else t.reshape(-1).to(call.acc) for t in (d_loss, d_lse))
    tops, log_totals = top.reshape(-1), log_total.reshape(-1)
    for rows, u in _blocks(call, d_x):
        w = rows.where
        slope = _slope(call, u)
        u.sub_(tops[w].unsqueeze(-1))
        if call.s != 1:
            u.mul_(call.s)
        log_p = u.gather(-1, rows.label.unsqueeze(-1)).squeeze(-1) - log_totals[w]
        u.exp_()
        lse, total = call.s * tops[w] + log_totals[w], log_totals[w].exp()
        up_here, extra_here = (None if t is None else t[w] for t in (up, extra))
        _put(d_x, rows, _gradient_(call, rows, u, up_here, extra_here, slope, total, log_p, lse))
    return _finished(d_x, call, logits)


def forward_backward(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None, d_loss: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float,
    metrics: bool, inplace: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = _prepare(
        logits, target, row_weight, class_weight, ignore_index, label_smoothing, z_loss, softcap, logit_scale
    )  # fmt: skip
    there = inplace and call.x.dim() == 2
    d_x = call.x if there else torch.empty((target.numel(), logits.shape[-1]), dtype=logits.dtype)
    out = _outputs(target, logits, metrics)
    ups = torch.ones((), dtype=call.acc).expand(target.numel()) if d_loss is None else d_loss.reshape(-1).to(call.acc)
    for rows, u in _blocks(call, d_x):
        slope = _slope(call, u)
        values, total = _losses(call, rows, u, metrics)
        for o, value in zip(out, values if metrics else values[:3]):
            _put(o, rows, value)
        _, top, log_total, log_p = values[:4]
        lse = call.s * top + log_total
        _put(d_x, rows, _gradient_(call, rows, u, ups[rows.where], None, slope, total, log_p, lse))
    d_logits = _finished(d_x, call, logits)
    return *_shaped(out, target, metrics), logits.copy_(d_logits) if inplace and not there else d_logits


def _finished(d_x: Tensor, call: _Call, logits: Tensor) -> Tensor:
    if call.dropped is not None:
        d_x.masked_fill_(call.dropped.unsqueeze(-1), 0.0)
    return d_x.view(logits.shape)


def forward_backward_(*args: Any) -> tuple[Tensor, ...]:
    """`forward_backward` over the logits, without returning them."""
    return functools.partial(forward_backward, inplace=True)(*args)[:-1]
