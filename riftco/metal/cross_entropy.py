"""Launches csrc/metal/cross_entropy.metal; the contract is riftco/kernels/cross_entropy/op.py."""

import torch
from torch import Tensor

from ..kernels._launch import as_rows
from . import ops, source


def forward(logits: Tensor, target: Tensor, row_weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    loss = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    if loss.numel() == 0:
        return loss, lse
    x, inner, stride_outer, stride_inner = as_rows(logits)
    weight = None if row_weight is None else row_weight.contiguous()
    ops().cross_entropy_fwd(
        source("cross_entropy"), x, target.contiguous(), weight, loss, lse, ignore_index, inner, stride_outer,
        stride_inner,
    )  # fmt: skip
    return loss, lse


def backward(
    d_loss: Tensor, logits: Tensor, target: Tensor, row_weight: Tensor | None, lse: Tensor, ignore_index: int
) -> Tensor:
    d_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if d_logits.numel() == 0:
        return d_logits
    x, inner, stride_outer, stride_inner = as_rows(logits)
    weight = None if row_weight is None else row_weight.contiguous()
    one_value = all(s == 0 for s in d_loss.stride())  # the expanded scalar that a sum or mean sends back
    ops().cross_entropy_bwd(
        source("cross_entropy"), d_loss if one_value else d_loss.contiguous(), x, target.contiguous(), weight,
        lse.contiguous(), d_logits, ignore_index, inner, stride_outer, stride_inner, 0 if one_value else 1,
    )  # fmt: skip
    return d_logits
