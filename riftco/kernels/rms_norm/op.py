"""The contract of RMS normalisation: schema, shapes, devices, gradient. Torch-only; imports no kernel."""

import torch
from torch import Tensor

from .._contract import define, needs_grad, once_differentiable, same_device
from . import spec

HERE = "riftco.kernels.rms_norm"


def _fake_fwd(x, weight, eps, offset):
    rstd = x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape), rstd


def _fake_bwd(d_y, x, weight, rstd, offset, need_x, need_weight):
    d_x = x.new_empty(x.shape) if need_x else x.new_empty(0)
    return d_x, weight.new_empty(weight.shape) if need_weight and weight is not None else x.new_empty(0)


fwd = define(
    "rms_norm_fwd",
    "(Tensor x, Tensor? weight, float eps, float offset) -> (Tensor y, Tensor rstd)",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers={"cuda": f"{HERE}.cuda:forward", "mps": f"{HERE}.spec:forward", "xla": f"{HERE}.spec:forward"},
)
bwd = define(
    "rms_norm_bwd",
    "(Tensor d_y, Tensor x, Tensor? weight, Tensor rstd, float offset, bool need_x, bool need_weight)"
    " -> (Tensor d_x, Tensor d_weight)",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers={"cuda": f"{HERE}.cuda:backward", "mps": f"{HERE}.spec:backward", "xla": f"{HERE}.spec:backward"},
)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, eps, offset):
        return fwd(x, weight, eps, offset)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, ctx.offset = inputs
        ctx.save_for_backward(x, weight, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y, _d_rstd):
        x, weight, rstd = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        d_x, d_weight = bwd(d_y, x, weight, rstd, ctx.offset, need_x, need_weight)
        return d_x if need_x else None, d_weight if need_weight else None, None, None


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, impl: str | None = None
) -> Tensor:
    """Root-mean-square normalisation of the last dimension.

    y = x / sqrt(mean(x^2) + eps) * (weight + offset)

    Args:
        x: [..., C], float16/bfloat16/float32/float64, any strides. Differentiable.
        weight: [C], any floating dtype (float64 only beside a float64 x), or None for no scaling. Differentiable.
        eps: added to the mean of squares.
        offset: added to the weight; 1.0 is Gemma's (1 + weight). Not used without a weight.
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        y [..., C], contiguous, in x's dtype, under autocast too.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.

    Devices: cpu, cuda (Triton), mps and xla (plain torch).
    Numerics: statistics, weight and the weight's gradient in float32; the normalised value stays in float32 until y is
        rounded once (transformers' Llama norm rounds it to x's dtype before the weight is multiplied, so that in 16
        bit the two differ by that rounding). Deterministic. Saved for the backward: x and one rstd a row.
    Source: Zhang & Sennrich 2019, "Root mean square layer normalization", equation 4.
    """
    _check(x, weight, impl)
    if impl == "spec":
        return spec.forward(x, weight, eps, offset)[0]
    if needs_grad(x, weight):
        return RMSNorm.apply(x, weight, eps, offset)[0]
    return fwd(x, weight, eps, offset)[0]


def _check(x, weight, impl) -> None:
    if x.dim() < 1 or not x.is_floating_point():
        raise ValueError(f"rms_norm: x must be floating [..., C]; got {x.dtype} {tuple(x.shape)}")
    if weight is not None:
        if weight.shape != x.shape[-1:] or not weight.is_floating_point():
            raise ValueError(
                f"rms_norm: weight must be floating [{x.shape[-1]}]; got {weight.dtype} {tuple(weight.shape)}"
            )
        if weight.dtype == torch.float64 and x.dtype != torch.float64:
            raise ValueError(f"rms_norm: a float64 weight needs a float64 x; got {x.dtype}")
    if impl not in (None, "spec"):
        raise ValueError(f"rms_norm: impl must be None or 'spec'; got {impl!r}")
    same_device("rms_norm", x=x, weight=weight)
