"""Layer normalisation in Triton: the row kernels that it shares with rms_norm, with a mean."""

from torch import Tensor

from .._norm import launch


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return launch.forward(x, residual, weight, bias, eps, 0.0, True)


def backward(
    d_y: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return launch.backward(d_y, d_total, x, weight, bias, mean, rstd, 0.0, need_x, need_weight, need_bias)
