"""Linear + cross-entropy over slices of rows: a slice's logits become its losses, then its gradient, in one buffer.

Device-neutral; cuda.py, cpu.py and plain.py say how a slice of logits is turned into losses.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .spec import live

NO_OPTIONS = (0.0, 0.0, 0.0, 1.0)  # label_smoothing, z_loss, softcap, logit_scale of cross-entropy


@dataclass(frozen=True)
class Loss:
    """How one device turns a slice of logits [n, V] into losses.

    forward(logits, target, row_weight, ignore_index) -> (loss, lse); it may overwrite the logits.
    forward_backward_(logits, target, row_weight, d_loss, ignore_index) -> (loss, lse); logits become their gradient.
    temporaries(dtype): bytes per logit that these two hold beside the logits.
    most_bytes: a cap on slice_bytes, where larger slices are slower.
    host_counts: the host sees values at once, so that counting rows costs no wait.
    """

    forward: Callable
    forward_backward_: Callable
    temporaries: Callable[[torch.dtype], int]
    most_bytes: int | None = None
    host_counts: bool = False


def losses_by(forward: Callable) -> Callable:
    """`Loss.forward` of a cross-entropy launcher that takes every option."""

    def losses(logits, target, row_weight, ignore_index):
        loss, top, log_total, *_ = forward(logits, target, row_weight, None, ignore_index, *NO_OPTIONS, False)
        return loss, top + log_total

    return losses


def gradients_by(forward_backward_: Callable) -> Callable:
    """`Loss.forward_backward_` of a cross-entropy launcher that takes every option."""

    def gradients(logits, target, row_weight, d_loss, ignore_index):
        args = (logits, target, row_weight, None, d_loss, ignore_index, *NO_OPTIONS, False)
        loss, top, log_total, *_ = forward_backward_(*args)
        return loss, top + log_total

    return gradients


class Rows:
    """The rows that are computed, and the slices they come in."""

    def __init__(self, ce: Loss, x, weight, target, row_weight, ignore_index, slice_bytes, n_labelled):
        V, C = weight.shape
        self.x, self.C, self.total = x, C, target.numel()
        self.target = target.reshape(-1)
        self.weight = None if row_weight is None else row_weight.reshape(-1)
        self.live = live(self.target, self.weight, ignore_index)
        self.index, self.all_live = _select(self.live, n_labelled, ce.host_counts)
        self.flat = x.view(self.total, C) if _one_stride(x) else None
        self.count = self.total if self.index is None else self.index.numel()
        row_bytes = (
            V * (x.dtype.itemsize + ce.temporaries(x.dtype)) + 2 * C * x.dtype.itemsize
        )  # gathered x, its gradient
        budget = slice_bytes if ce.most_bytes is None else min(slice_bytes, ce.most_bytes)
        most = max(1, budget // row_bytes)
        pieces = max(1, -(-self.count // most))
        self.step = max(1, -(-self.count // pieces))  # equal slices: a short last one would waste a matmul
        self.short = None  # on a device that must not be waited for: whether n_labelled left labelled rows out
        if self.index is not None and n_labelled is not None and not ce.host_counts:
            self.short = self.live.sum() > self.count

    def slices(self):
        """(where, x [n, C], target [n], row_weight [n]) of each slice; `where` addresses it among all rows."""
        for lo in range(0, self.count, self.step):
            hi = min(lo + self.step, self.count)
            where = slice(lo, hi) if self.index is None else self.index[lo:hi]
            yield where, self._rows_of_x(where), self.target[where], None if self.weight is None else self.weight[where]

    def _rows_of_x(self, where) -> Tensor:
        if self.flat is not None:
            x = self.flat[where]
        else:
            rows = torch.arange(where.start, where.stop, device=self.x.device) if isinstance(where, slice) else where
            x = self.x[torch.unravel_index(rows, self.x.shape[:-1])]
        return x if self.all_live else x.masked_fill(~self.live[where].unsqueeze(-1), 0.0)  # 0 * NaN would reach dW


def _select(live: Tensor, n_labelled: int | None, host_counts: bool) -> tuple[Tensor | None, bool]:
    """(indices of the rows to compute, or None for all; whether all of them are known to carry loss).

    n_labelled: an upper bound on the rows that carry loss, -1 for "compute all", None for "count them": that waits
    for an accelerator, and is not done while a CUDA graph is captured or on XLA.
    """
    waits = live.device.type == "xla" or (live.is_cuda and torch.cuda.is_current_stream_capturing())
    if n_labelled == -1 or (n_labelled is None and waits):
        return None, False
    if n_labelled is None or host_counts:
        index = live.nonzero().squeeze(1)
        if n_labelled is not None and index.numel() > n_labelled:
            raise ValueError(
                f"linear_cross_entropy: n_labelled={n_labelled}, but {index.numel()} rows carry a label and a weight"
            )
        return (None if index.numel() == live.numel() else index), True
    if n_labelled >= live.numel():
        return None, False
    # labelled rows first, each group in order; what is left of n_labelled are rows that give 0
    return live.logical_not().byte().sort(stable=True).indices[:n_labelled], False


def _one_stride(x: Tensor) -> bool:
    """Whether the leading dimensions of x merge into one without a copy."""
    dims = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1]) if size != 1]
    return x.numel() == 0 or all(a[1] == b[1] * b[0] for a, b in itertools.pairwise(dims))


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _put(out: Tensor, where, value: Tensor) -> None:
    if isinstance(where, slice):
        out[where] = value
    else:
        out.index_copy_(0, where, value)


def _accumulate(d_weight: Tensor, g: Tensor, x: Tensor, beta: int) -> None:
    """d_weight = beta * d_weight + g^T x, in d_weight's dtype."""
    if d_weight.dtype == g.dtype and beta:
        d_weight.addmm_(g.t(), x)
    elif d_weight.dtype == g.dtype:
        torch.mm(g.t(), x, out=d_weight)
    elif g.is_cuda:  # 16-bit operands, float32 result: one matmul, no wider copy
        if beta:
            torch.addmm(d_weight, g.t(), x, out_dtype=d_weight.dtype, out=d_weight)
        else:
            torch.mm(g.t(), x, out_dtype=d_weight.dtype, out=d_weight)
    else:
        wide = x.to(d_weight.dtype)
        step = max(1, (8 << 20) // (4 * max(1, g.shape[0])))  # widen g a few columns at a time
        for lo in range(0, g.shape[1], step):
            columns = slice(lo, lo + step)
            out, narrow = d_weight[columns], g[:, columns].t().to(d_weight.dtype)
            if beta:
                out.addmm_(narrow, wide)
            else:  # not addmm with beta=0, which torch_xla leaves to the CPU
                torch.mm(narrow, wide, out=out)


def forward(
    ce: Loss, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, row_weight: Tensor | None,
    ignore_index: int, slice_bytes: int, n_labelled: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op linear_cross_entropy_fwd; spec.forward says what it means."""
    with torch.autocast(x.device.type, enabled=False):
        rows = Rows(ce, x, weight, target, row_weight, ignore_index, slice_bytes, n_labelled)
        loss, lse = _outputs(rows, x)
        buffer = x.new_empty(rows.step, weight.shape[0])
        for where, xs, ys, ws in rows.slices():
            logits = _matmul(xs, weight, bias, buffer[: xs.shape[0]])
            part, part_lse = ce.forward(logits, ys, ws, ignore_index)
            _put(loss, where, part)
            _put(lse, where, part_lse)
        return _finish(rows, loss, target), lse.view(target.shape)


def backward(
    ce: Loss, d_loss: Tensor | None, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
    row_weight: Tensor | None, ignore_index: int, slice_bytes: int, n_labelled: int | None,
    accum_dtype: torch.dtype, need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The op linear_cross_entropy_bwd; spec.backward says what it means."""
    with torch.autocast(x.device.type, enabled=False):
        rows = Rows(ce, x, weight, target, row_weight, ignore_index, slice_bytes, n_labelled)
        V, C = weight.shape
        loss, lse = _outputs(rows, x)
        upstream = None if d_loss is None else d_loss.reshape(-1)
        buffer = x.new_empty(rows.step, V)
        make = x.new_empty if rows.index is None else x.new_zeros  # rows that are dropped keep a gradient of 0
        d_x = make((rows.total, C)) if need_x else x.new_empty(0)
        wide = torch.promote_types(weight.dtype, accum_dtype)
        d_weight = weight.new_empty((V, C) if need_weight else 0, dtype=wide)
        d_bias = loss.new_zeros(V if need_bias else 0)
        if need_weight and rows.count == 0:
            d_weight.zero_()
        for step, (where, xs, ys, ws) in enumerate(rows.slices()):
            logits = _matmul(xs, weight, bias, buffer[: xs.shape[0]])
            ds = None if upstream is None else upstream[where]
            part, part_lse = ce.forward_backward_(logits, ys, ws, ds, ignore_index)
            _put(loss, where, part)
            _put(lse, where, part_lse)
            if need_x and isinstance(where, slice):
                torch.mm(logits, weight, out=d_x[where])
            elif need_x:
                d_x.index_copy_(0, where, torch.mm(logits, weight))
            if need_weight:
                _accumulate(d_weight, logits, xs, beta=min(step, 1))
            if need_bias:
                d_bias += logits.sum(0, dtype=d_bias.dtype)
        loss, lse = _finish(rows, loss, target), lse.view(target.shape)
        return loss, lse, d_x.view(x.shape) if need_x else d_x, d_weight, d_bias


def _outputs(rows: Rows, x: Tensor) -> tuple[Tensor, Tensor]:
    make = x.new_empty if rows.index is None else x.new_zeros
    dtype = torch.promote_types(x.dtype, torch.float32)
    return make(rows.total, dtype=dtype), make(rows.total, dtype=dtype)


def _finish(rows: Rows, loss: Tensor, target: Tensor) -> Tensor:
    if rows.short is not None:
        loss.masked_fill_(rows.short, torch.nan)
    return loss.view(target.shape)
