"""RMS normalisation in Triton: the row kernels that it shares with layer_norm, without a mean."""

from torch import Tensor

from .._norm import launch


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, total, _, rstd = launch.forward(x, residual, weight, None, eps, offset, False)
    return y, total, rstd


def backward(
    d_y: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return launch.backward(d_y, d_total, x, weight, None, None, rstd, offset, need_x, need_weight, False)[:2]
