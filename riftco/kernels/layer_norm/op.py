"""The contract of layer normalisation: schema, shapes, devices, gradient. Torch-only; imports no kernel."""

from typing import overload

import torch
from torch import Tensor

from .._arguments import check_impl, floating, given, number
from .._contract import Function, define, needs_grad, once_differentiable, same_device
from .._recompute import saved
from . import spec

HERE = "riftco.kernels.layer_norm"


def _fake_fwd(x, residual, weight, bias, eps):
    total = x.new_empty(0)
    if residual is not None:
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32)) for _ in range(2))
    return x.new_empty(x.shape), total, mean, rstd


def _fake_bwd(d_y, d_total, x, weight, bias, mean, rstd, need_x, need_weight, need_bias):
    d_x = x.new_empty(x.shape) if need_x else x.new_empty(0)
    d_weight = weight.new_empty(weight.shape) if need_weight and weight is not None else x.new_empty(0)
    return d_x, d_weight, bias.new_empty(bias.shape) if need_bias and bias is not None else x.new_empty(0)


fwd = define(
    "layer_norm_fwd",
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor total, Tensor mean, Tensor rstd)",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers={
        "cpu": f"{HERE}.cpu:forward",
        "cuda": f"{HERE}.cuda:forward",
        "mps": "riftco.metal.layer_norm:forward",
        "xla": f"{HERE}.spec:forward",
    },
)
bwd = define(
    "layer_norm_bwd",
    "(Tensor d_y, Tensor? d_total, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool need_x,"
    " bool need_weight, bool need_bias) -> (Tensor d_x, Tensor d_weight, Tensor d_bias)",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers={
        "cpu": f"{HERE}.cpu:backward",
        "cuda": f"{HERE}.cuda:backward",
        "mps": "riftco.metal.layer_norm:backward",
        "xla": f"{HERE}.spec:backward",
    },
)


class LayerNorm(Function):
    @staticmethod
    def forward(x, residual, weight, bias, eps):
        return fwd(x, residual, weight, bias, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, residual, weight, bias, ctx.eps = inputs
        _, total, mean, rstd = output
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.save_for_backward(x if residual is None else total, weight, bias, mean, rstd)
        ctx.mark_non_differentiable(*((total, mean, rstd) if residual is None else (mean, rstd)))
        ctx.set_materialize_grads(False)
        ctx.unpacked = None

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y, d_total, _d_mean, _d_rstd):
        x, weight, bias, mean, rstd = saved(ctx)
        need_x, need_residual, need_weight, need_bias = ctx.needs_input_grad[:4]
        need, d_weight, d_bias = need_x or need_residual, None, None
        d_total = d_total if ctx.dtypes[1] is not None else None  # torch.compile sends zeros for what is not there
        d_x = d_total if need else None
        if d_y is not None:
            d_x, d_weight, d_bias = bwd(d_y, d_total, x, weight, bias, mean, rstd, need, need_weight, need_bias)
        d_x, d_residual = (
            d_x.to(dtype) if d_x is not None and needed else None
            for needed, dtype in zip((need_x, need_residual), ctx.dtypes)
        )
        return d_x, d_residual, d_weight if need_weight else None, d_bias if need_bias else None, None

    @staticmethod
    def again(ctx, x, weight, bias, mean, rstd):
        return fwd(x, None, weight, bias, ctx.eps)[0].to(ctx.dtypes[0])


@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, residual: None = None,
    impl: str | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, residual: Tensor,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    residual: Tensor | None, impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    residual: Tensor | None = None, impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Layer normalisation of the last dimension, after adding a residual where one is given.

    total = x + residual; y = (total - mean(total)) / sqrt(var(total) + eps) * weight + bias

    Args:
        x: [..., C], float16/bfloat16/float32/float64, any strides. Differentiable.
        weight: [C], any floating dtype (float64 only beside a float64 x), or None for no scaling. Differentiable.
        bias: as weight, with or without one. Differentiable.
        eps: added to the variance, which divides by C.
        residual: as x, any floating dtype (float64 only beside a float64 x): the residual stream, which x is added to
            in the same pass. Differentiable.
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        y [..., C], contiguous, in x's dtype (float32 under CUDA's autocast, as torch's); with a residual (y, total),
        total in the dtype that x and residual promote to.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.

    Devices: cpu, cuda (Triton), mps (Metal), xla (plain torch).
    Numerics: mean, variance about that mean, weight, bias and their gradients in float32; total is rounded before it is
        normalised, as without fusion; y is rounded once. Deterministic. Saved for the backward: x, or total in its
        stead, one mean and one rstd a row.
    Source: Ba, Kiros & Hinton 2016, "Layer normalization", equation 4.
    """
    _check(x, weight, bias, residual, eps, impl)
    if x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64:
        x = x.float()
    if impl == "spec":
        y, total, *_ = spec.forward(x, residual, weight, bias, eps)
    elif needs_grad(x, residual, weight, bias):
        y, total, *_ = LayerNorm.apply(x, residual, weight, bias, eps)
    else:
        y, total, *_ = fwd(x, residual, weight, bias, eps)
    return y if residual is None else (y, total)


def _check(x, weight, bias, residual, eps, impl) -> None:
    if not floating(x) or x.dim() < 1:
        raise ValueError(f"layer_norm: x must be floating [..., C]; got {given(x)}")
    for name, t, shape in (
        ("weight", weight, x.shape[-1:]),
        ("bias", bias, x.shape[-1:]),
        ("residual", residual, x.shape),
    ):
        if t is None:
            continue
        if not floating(t) or t.shape != shape:
            raise ValueError(f"layer_norm: {name} must be floating {list(shape)}; got {given(t)}")
        if t.dtype == torch.float64 and x.dtype != torch.float64:
            raise ValueError(f"layer_norm: a float64 {name} needs a float64 x; got {x.dtype}")
    number("layer_norm", "eps", eps, "finite and at least 0", least=0)
    check_impl("layer_norm", impl)
    same_device("layer_norm", x=x, weight=weight, bias=bias, residual=residual)
