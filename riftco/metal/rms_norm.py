"""Launches csrc/metal/rms_norm.metal; the contract is riftco/kernels/rms_norm/op.py."""

from torch import Tensor

from . import _norm


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, total, _, rstd = _norm.forward("rms_norm", x, residual, weight, None, eps, offset, False)
    return y, total, rstd


def backward(
    d_y: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    made = _norm.backward("rms_norm", d_y, d_total, x, weight, None, None, rstd, offset, need_x, need_weight, False)
    return made[:2]
