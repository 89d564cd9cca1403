"""Launches csrc/metal/layer_norm.metal; the contract is riftco/kernels/layer_norm/op.py."""

from torch import Tensor

from . import _norm


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _norm.forward("layer_norm", x, residual, weight, bias, eps, 0.0, True)


def backward(
    d_y: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    needs = need_x, need_weight, need_bias
    return _norm.backward("layer_norm", d_y, d_total, x, weight, bias, mean, rstd, 0.0, *needs)
