"""Launches csrc/metal/cross_entropy.metal; the contract is riftco/kernels/cross_entropy/op.py."""

import torch
from torch import Tensor

from ..kernels._launch import as_rows
from ..kernels.cross_entropy.spec import no_metrics
from . import launch


def forward(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = ignore_index, label_smoothing, z_loss, softcap, logit_scale
    return _forward(logits, target, row_weight, class_weight, None, options, metrics, None)


def forward_backward(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None, d_loss: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = ignore_index, label_smoothing, z_loss, softcap, logit_scale
    d_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return *_forward(logits, target, row_weight, class_weight, d_loss, options, metrics, d_logits), d_logits


def forward_backward_(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None, d_loss: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradient is written over the logits."""
    options = ignore_index, label_smoothing, z_loss, softcap, logit_scale
    return _forward(logits, target, row_weight, class_weight, d_loss, options, metrics, logits)


def backward(
    d_loss: Tensor | None, d_lse: Tensor | None, logits: Tensor, target: Tensor, row_weight: Tensor | None,
    class_weight: Tensor | None, top: Tensor, log_total: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float,
) -> Tensor:  # fmt: skip
    d_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if d_logits.numel() == 0:
        return d_logits
    options = ignore_index, label_smoothing, z_loss, softcap, logit_scale
    inputs, numbers, reals = _prepared(
        logits, d_logits, target, row_weight, class_weight, d_loss, d_lse, options, False, True
    )
    _launch("bwd", [d_logits], [*inputs, _upstream(d_lse)[0], top.contiguous(), log_total.contiguous()], numbers, reals)
    return d_logits


def scale_(g: Tensor, scale: Tensor) -> None:
    if g.numel():
        launch(
            "cross_entropy", "cross_entropy_scale", [g.dtype], [g], [scale.float()], [g.numel()],
            groups=-(-g.numel() // 1024), threads=g.numel(),
        )  # fmt: skip


def _forward(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None, d_loss: Tensor | None,
    options: tuple, metrics: bool, d_logits: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows = [torch.empty(target.shape, dtype=torch.float32, device=logits.device) for _ in range(5 if metrics else 3)]
    places = [torch.empty(target.shape, dtype=torch.int64, device=logits.device)] if metrics else []
    made = (*rows, *places) if metrics else (*rows, *no_metrics(logits))
    if target.numel() == 0 or logits.shape[-1] == 0:
        return made
    inputs, numbers, reals = _prepared(
        logits, d_logits, target, row_weight, class_weight, d_loss, None, options, metrics, d_logits is not None
    )
    unused = logits.new_empty(0) if d_logits is None else d_logits
    _launch("fwd", [*made, unused], inputs, numbers, reals)
    return made


def _prepared(logits, d_logits, target, row_weight, class_weight, d_loss, d_lse, options, metrics, grad):
    """(inputs up to d_loss, numbers, reals) as the shader wants them."""
    x, *strides = as_rows(logits)
    out_strides = (1, 0, 0, 0)
    if d_logits is not None:
        out, *of_rows = as_rows(d_logits)
        if out is not d_logits:
            raise NotImplementedError("cross_entropy: no two strides describe these rows; the gradient needs a copy")
        out_strides = (*of_rows, out.stride(-1))
    up, stride_up = _upstream(d_loss)
    _, stride_lse = _upstream(d_lse)
    weights = None if class_weight is None else class_weight.float().contiguous()
    inputs = [
        x, target.contiguous(), None if row_weight is None else row_weight.contiguous(), weights,
        None if weights is None else weights.sum(), up,
    ]  # fmt: skip
    ignore_index, *reals = options
    flags = [t is not None for t in (row_weight, class_weight, d_loss, d_lse)]
    numbers = [
        *strides, x.stride(-1), *out_strides, stride_up, stride_lse, target.numel(), logits.shape[-1], ignore_index,
        *flags, metrics, grad,
    ]  # fmt: skip
    return inputs, numbers, reals


def _launch(kernel: str, outputs: list[Tensor], inputs: list[Tensor | None], numbers: list, reals: list) -> None:
    logits, target = inputs[0], inputs[1]
    assert logits is not None and target is not None
    launch(
        "cross_entropy", f"cross_entropy_{kernel}", [logits.dtype, target.dtype], outputs, inputs, numbers, reals,
        groups=target.numel(), threads=logits.shape[-1],
    )  # fmt: skip


def _upstream(d: Tensor | None) -> tuple[Tensor | None, int]:
    """(float32 values, the stride of a row): the expanded scalar that a sum or mean sends back stays one."""
    if d is None:
        return None, 0
    d = d.float()
    return (d, 0) if all(s == 0 for s in d.stride()) else (d.contiguous(), 1)
