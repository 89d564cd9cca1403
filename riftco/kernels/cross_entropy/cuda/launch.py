"""Launches rows.py; the contract is op.py."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._launch import as_rows, on
from .. import spec
from ..route import of_call
from ..spec import no_metrics
from . import rows as kernels
from .route import Plan, plan

LARGEST_INT = 2**31 - 1
FEW = 1 << 17  # rows that one program counts


class _Rows(NamedTuple):
    """Logits as rows, and the numbers of the options as the kernels take them."""

    x: Tensor
    strides: tuple[int, int, int, int]  # inner, outer stride, inner stride, stride of a class
    row_weight: Tensor | None
    class_weight: Tensor | None
    weight_sum: Tensor | None
    numbers: tuple  # ignore_index, smoothing, z_loss, cap, slope, s, scale
    flags: dict
    plan: Plan
    wide: bool


def _rows(logits, row_weight, class_weight, options: tuple, fresh: bool, metrics: bool = False) -> _Rows:
    """fresh: a gradient is written to contiguous rows of its own."""
    ignore_index, label_smoothing, z_loss, softcap, logit_scale = options
    V = logits.shape[-1]
    x, inner, outer, step = as_rows(logits)
    stride = x.stride(-1) if V > 1 else 1
    numbers = (
        ignore_index, label_smoothing, z_loss, softcap or 1.0, logit_scale / (softcap or 1.0),
        1.0 if softcap else logit_scale, logit_scale,
    )  # fmt: skip
    flags = {
        "HAS_ROW_WEIGHT": row_weight is not None, "CLASS": class_weight is not None, "SMOOTH": label_smoothing > 0,
        "SOFTCAP": softcap > 0,
    }  # fmt: skip
    even = V % 16 == 0  # what Triton sees of integers
    aligned = stride == 1 and all(n % 16 == 0 for n in (outer, step, x.data_ptr())) and (even or not fresh)
    chosen = plan(V, x.dtype.itemsize, aligned, metrics, even and not (flags["SMOOTH"] or flags["SOFTCAP"]))
    wide = (V + chosen.R * chosen.T * chosen.E) * stride > LARGEST_INT
    weight_sum = None if class_weight is None else class_weight.sum()
    row_weight = None if row_weight is None else row_weight.contiguous()
    return _Rows(x, (inner, outer, step, stride), row_weight, class_weight, weight_sum, numbers, flags, chosen, wide)


def _in_use(rows: _Rows, metrics: bool) -> frozenset[str]:
    used = {"metrics": metrics, "weight": rows.flags["CLASS"]}
    used |= {"softcap": rows.flags["SOFTCAP"], "smoothing": rows.flags["SMOOTH"]}
    return frozenset(name for name, held in used.items() if held)


def _per_row(t: Tensor | None) -> tuple[Tensor | None, int]:
    """(tensor, its stride over rows): 0 for the expanded scalar that a sum or mean sends back."""
    if t is None or all(s == 0 for s in t.stride()):
        return t, 0
    return t.contiguous(), 1


def _forward(logits, target, row_weight, class_weight, d_loss, g: Tensor | None, options, metrics: bool):
    V, N = logits.shape[-1], target.numel()
    out = [torch.empty(target.shape, dtype=torch.float32, device=logits.device) for _ in range(5 if metrics else 3)]
    if metrics:
        out.append(torch.empty(target.shape, dtype=torch.int64, device=logits.device))
    if N and V:
        rows = _rows(logits, row_weight, class_weight, options, g is not None and g is not logits, metrics)
        inner, *x_strides = rows.strides
        if g is logits:  # as_rows must not have copied what is to be written over
            g_strides = x_strides
            if rows.x is not logits:
                raise ValueError("cross_entropy: inplace=True needs logits whose rows two strides describe")
        else:
            g_strides = [inner * V, V, 1]
        up, stride_up = _per_row(d_loss)
        ring = of_call(rows.x, N, rows.strides[:3], _in_use(rows, metrics)).ring
        if g is not None and ring is not None:
            from . import hopper

            hopper.forward_backward(
                rows.x, rows.strides[:3], g, (g_strides[0], g_strides[1]), target.contiguous(), rows.row_weight, up,
                stride_up, out, options[0], options[2], options[4], ring,
            )  # fmt: skip
            return *out, *no_metrics(logits)
        with on(logits):
            kernels.forward_rows[(N,)](
                rows.x, g, target.contiguous(), rows.row_weight, rows.class_weight, rows.weight_sum, up,
                *out, *[None] * (6 - len(out)), inner, *x_strides, *g_strides, stride_up, V, *rows.numbers,
                GRAD=g is not None, HAS_UP=up is not None, **rows.flags, METRICS=metrics, WIDE=rows.wide,
                OPAQUE=logits.is_cuda and rows.x.element_size() == 2, KEEP=rows.plan.keep,
                R=rows.plan.R, T=rows.plan.T, E=rows.plan.E, num_warps=rows.plan.warps,
            )  # fmt: skip
    return tuple(out) if metrics else (*out, *no_metrics(logits))


def forward(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = (ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    return _forward(logits, target, row_weight, class_weight, None, None, options, metrics)


def forward_backward(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None, d_loss: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float,
    metrics: bool, inplace: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = (ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    g = logits if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return *_forward(logits, target, row_weight, class_weight, d_loss, g, options, metrics), g


def forward_backward_(*args: Any) -> tuple[Tensor, ...]:
    """`forward_backward` over the logits, without returning them."""
    return functools.partial(forward_backward, inplace=True)(*args)[:-1]


def backward(
    d_loss: Tensor | None, d_lse: Tensor | None, logits: Tensor, target: Tensor, row_weight: Tensor | None,
    class_weight: Tensor | None, top: Tensor, log_total: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float,
) -> Tensor:  # fmt: skip
    d_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if d_logits.numel() == 0:
        return d_logits
    options = (ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    rows = _rows(logits, row_weight, class_weight, options, True)
    (up, stride_up), (up_lse, stride_lse) = _per_row(d_loss), _per_row(d_lse)
    with on(logits):
        kernels.backward_rows[(target.numel(),)](
            rows.x, d_logits, target.contiguous(), rows.row_weight, rows.class_weight, rows.weight_sum, up, up_lse,
            top.contiguous(), log_total.contiguous(), *rows.strides, stride_up, stride_lse, logits.shape[-1],
            *rows.numbers, HAS_UP=up is not None, HAS_UP_LSE=up_lse is not None, **rows.flags, WIDE=rows.wide,
            R=rows.plan.R, T=rows.plan.T, E=rows.plan.E, num_warps=rows.plan.warps,
        )  # fmt: skip
    return d_logits


def labelled(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    if target.numel() > FEW:
        return spec.labelled(target, ignore_index)
    over, reciprocal = (torch.empty((), dtype=torch.float32, device=target.device) for _ in range(2))
    with on(target):
        kernels.count_labelled[(1,)](
            target.contiguous(), over, reciprocal, target.numel(), ignore_index, BLOCK=8192, num_warps=16
        )
    return over, reciprocal


def scale_(g: Tensor, scale: Tensor) -> None:
    """g *= scale, read on the device; g is one piece of memory."""
    if g.numel():
        with on(g):
            kernels.scale_unless_one[(min(1024, -(-g.numel() // 8192)),)](g, scale, g.numel(), BLOCK=8192, num_warps=8)
