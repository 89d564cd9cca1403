"""Launches csrc/metal/cross_entropy.metal; the contract is riftco/kernels/cross_entropy/op.py."""

import torch
from torch import Tensor

from ..kernels._launch import as_rows
from ..kernels.cross_entropy.spec import no_metrics
from . import ops, source


def forward(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse(
        weight=class_weight is not None, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
        logit_scale=logit_scale != 1, return_metrics=metrics,
    )  # fmt: skip
    loss = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    parts = torch.empty((2, *target.shape), dtype=torch.float32, device=logits.device)  # top and log_total
    if loss.numel() == 0:
        return loss, parts[0], parts[1], *no_metrics(logits)
    x, inner, stride_outer, stride_inner = as_rows(logits)
    weight = None if row_weight is None else row_weight.contiguous()
    ops().cross_entropy_fwd(
        source("cross_entropy"), x, target.contiguous(), weight, loss, parts, ignore_index, inner, stride_outer,
        stride_inner,
    )  # fmt: skip
    return loss, parts[0].clone(), parts[1].clone(), *no_metrics(logits)


def backward(
    d_loss: Tensor | None, d_lse: Tensor | None, logits: Tensor, target: Tensor, row_weight: Tensor | None,
    class_weight: Tensor | None, top: Tensor, log_total: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float,
) -> Tensor:  # fmt: skip
    _refuse(**{"the gradient of return_lse": d_lse is not None})
    assert d_loss is not None
    d_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if d_logits.numel() == 0:
        return d_logits
    x, inner, stride_outer, stride_inner = as_rows(logits)
    weight = None if row_weight is None else row_weight.contiguous()
    one_value = all(s == 0 for s in d_loss.stride())  # the expanded scalar that a sum or mean sends back
    ops().cross_entropy_bwd(
        source("cross_entropy"), d_loss if one_value else d_loss.contiguous(), x, target.contiguous(), weight,
        torch.stack((top, log_total)), d_logits, ignore_index, inner, stride_outer, stride_inner, 0 if one_value else 1,
    )  # fmt: skip
    return d_logits


def _refuse(**options) -> None:
    if asked := [name for name, value in options.items() if value]:
        raise NotImplementedError(f"cross_entropy: no {', '.join(asked)} in the mps kernel; impl='spec' has all of it")
