"""The contract of RMS normalisation: schema, shapes, devices, gradient. Torch-only; imports no kernel."""

from typing import overload

import torch
from torch import Tensor

from .._arguments import check_impl, floating, given, number
from .._contract import Function, define, needs_grad, once_differentiable, same_device
from .._recompute import saved
from . import spec

HERE = "riftco.kernels.rms_norm"


def _fake_fwd(x, residual, weight, eps, offset):
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape, dtype=sum_dtype(x, residual))
    rstd = x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape), total, rstd


def _fake_bwd(d_y, d_total, x, weight, rstd, offset, need_x, need_weight):
    d_x = x.new_empty(x.shape) if need_x else x.new_empty(0)
    return d_x, weight.new_empty(weight.shape) if need_weight and weight is not None else x.new_empty(0)


def sum_dtype(x: Tensor, residual: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, residual.dtype)


fwd = define(
    "rms_norm_fwd",
    "(Tensor x, Tensor? residual, Tensor? weight, float eps, float offset) -> (Tensor y, Tensor total, Tensor rstd)",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers={
        "cpu": f"{HERE}.cpu:forward",
        "cuda": f"{HERE}.cuda:forward",
        "mps": "riftco.metal.rms_norm:forward",
        "xla": f"{HERE}.spec:forward",
    },
)
bwd = define(
    "rms_norm_bwd",
    "(Tensor d_y, Tensor? d_total, Tensor x, Tensor? weight, Tensor rstd, float offset, bool need_x, bool need_weight)"
    " -> (Tensor d_x, Tensor d_weight)",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers={
        "cpu": f"{HERE}.cpu:backward",
        "cuda": f"{HERE}.cuda:backward",
        "mps": "riftco.metal.rms_norm:backward",
        "xla": f"{HERE}.spec:backward",
    },
)


class RMSNorm(Function):
    @staticmethod
    def forward(x, residual, weight, eps, offset):
        return fwd(x, residual, weight, eps, offset)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, residual, weight, ctx.eps, ctx.offset = inputs
        _, total, rstd = output
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.save_for_backward(x if residual is None else total, weight, rstd)
        ctx.mark_non_differentiable(*((total, rstd) if residual is None else (rstd,)))
        ctx.set_materialize_grads(False)
        ctx.unpacked = None

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y, d_total, _d_rstd):
        x, weight, rstd = saved(ctx)
        need_x, need_residual, need_weight = ctx.needs_input_grad[:3]
        need, d_weight = need_x or need_residual, None
        d_total = d_total if ctx.dtypes[1] is not None else None  # torch.compile sends zeros for what is not there
        d_x = d_total if need else None
        if d_y is not None:
            d_x, d_weight = bwd(d_y, d_total, x, weight, rstd, ctx.offset, need, need_weight)
        d_x, d_residual = (
            d_x.to(dtype) if d_x is not None and needed else None
            for needed, dtype in zip((need_x, need_residual), ctx.dtypes)
        )
        return d_x, d_residual, d_weight if need_weight else None, None, None

    @staticmethod
    def again(ctx, x, weight, rstd):
        return fwd(x, None, weight, ctx.eps, ctx.offset)[0].to(ctx.dtypes[0])


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, residual: None = None, offset: float = 0.0,
    impl: str | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, residual: Tensor, offset: float = 0.0,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, residual: Tensor | None, offset: float = 0.0,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, residual: Tensor | None = None,
    offset: float = 0.0, impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Root-mean-square normalisation of the last dimension, after adding a residual where one is given.

    total = x + residual; y = total / sqrt(mean(total^2) + eps) * (weight + offset)

    Args:
        x: [..., C], float16/bfloat16/float32/float64, any strides. Differentiable.
        weight: [C], any floating dtype (float64 only beside a float64 x), or None for no scaling. Differentiable.
        eps: added to the mean of squares.
        residual: as x, any floating dtype (float64 only beside a float64 x): the residual stream, which x is added to
            in the same pass. Differentiable.
        offset: added to the weight; 1.0 is Gemma's (1 + weight). Not used without a weight.
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        y [..., C], contiguous, in x's dtype, under autocast too; with a residual (y, total), total in the dtype that x
        and residual promote to, as vLLM's norm, Liger's fused one and flash-attn's prenorm give them.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.

    Devices: cpu, cuda (Triton), mps (Metal), xla (plain torch).
    Numerics: statistics, weight and the weight's gradient in float32; total is rounded before it is normalised, as
        without fusion; the normalised value stays in float32 until y is rounded once (transformers' Llama norm rounds
        it to x's dtype before the weight is multiplied, so that in 16 bit the two differ by that rounding).
        Deterministic. Saved for the backward: x, or total in its stead, and one rstd a row.
    Source: Zhang & Sennrich 2019, "Root mean square layer normalization", equation 4.
    """
    _check(x, weight, residual, eps, offset, impl)
    if impl == "spec":
        y, total, _ = spec.forward(x, residual, weight, eps, offset)
    elif needs_grad(x, residual, weight):
        y, total, _ = RMSNorm.apply(x, residual, weight, eps, offset)
    else:
        y, total, _ = fwd(x, residual, weight, eps, offset)
    return y if residual is None else (y, total)


def _check(x, weight, residual, eps, offset, impl) -> None:
    if not floating(x) or x.dim() < 1:
        raise ValueError(f"rms_norm: x must be floating [..., C]; got {given(x)}")
    if weight is not None:
        if not floating(weight) or weight.shape != x.shape[-1:]:
            raise ValueError(f"rms_norm: weight must be floating [{x.shape[-1]}]; got {given(weight)}")
        if weight.dtype == torch.float64 and x.dtype != torch.float64:
            raise ValueError(f"rms_norm: a float64 weight needs a float64 x; got {x.dtype}")
    if residual is not None:
        if not floating(residual) or residual.shape != x.shape:
            raise ValueError(f"rms_norm: residual must be floating {tuple(x.shape)}; got {given(residual)}")
        if residual.dtype == torch.float64 and x.dtype != torch.float64:
            raise ValueError(f"rms_norm: a float64 residual needs a float64 x; got {x.dtype}")
    number("rms_norm", "eps", eps, "finite and at least 0", least=0)
    number("rms_norm", "offset", offset, "finite")
    check_impl("rms_norm", impl)
    same_device("rms_norm", x=x, weight=weight, residual=residual)
