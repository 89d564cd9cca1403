"""The contract of products with GGUF weights: schemas, shapes, devices, gradient. Torch-only; imports no kernel."""

import torch
from torch import Tensor

from .._arguments import FLOATING, check_impl, floating, given
from .._contract import autocast, define, needs_grad, once_differentiable, same_device
from . import spec
from .weight import GGUFWeight

HERE = "riftco.kernels.gguf_linear"
LAUNCHERS = {"cpu": f"{HERE}.cpu", "cuda": f"{HERE}.cuda", "mps": "riftco.metal.gguf_linear"}


def _fake_fwd(x, packed, bias, format, N, K):
    return x.new_empty((*x.shape[:-1], N))


def _fake_bwd(d_y, packed, format, N, K):
    return d_y.new_empty((*d_y.shape[:-1], K))


def _fake_dequantize(packed, format, N, K, dtype):
    return packed.new_empty((N, K), dtype=dtype)


fwd = define(
    "gguf_linear_fwd",
    "(Tensor x, Tensor packed, Tensor? bias, str format, SymInt N, SymInt K) -> Tensor",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers={device: f"{module}:forward" for device, module in LAUNCHERS.items()},
    routes=f"{HERE}.route:forward_routes",
)
bwd = define(
    "gguf_linear_bwd",
    "(Tensor d_y, Tensor packed, str format, SymInt N, SymInt K) -> Tensor",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers={device: f"{module}:backward" for device, module in LAUNCHERS.items()},
    routes=f"{HERE}.route:backward_routes",
)
dequantize = define(
    "gguf_dequantize",
    "(Tensor packed, str format, SymInt N, SymInt K, ScalarType dtype) -> Tensor",
    fake=_fake_dequantize,
    spec=f"{HERE}.spec:dequantize",
    launchers={device: f"{module}:dequantize" for device, module in LAUNCHERS.items()},
)


class GGUFProduct(torch.autograd.Function):
    """The weight is frozen, so nothing but its bytes is needed again: x is never saved."""

    @staticmethod
    def forward(x, packed, bias, format, N, K):
        return fwd(x, packed, bias, format, N, K)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, packed, bias, *ctx.sizes = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(packed)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y):
        d_x = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = bwd(d_y, *ctx.saved_tensors, *ctx.sizes)
        if ctx.needs_input_grad[2]:
            acc = torch.promote_types(d_y.dtype, torch.float32)
            rows = d_y.unsqueeze(0)  # summed over no dimension at all, a single vector would give a scalar
            d_bias = rows.sum(tuple(range(rows.dim() - 1)), dtype=acc).to(ctx.bias_dtype)
        return d_x, None, d_bias, None, None, None


def gguf_linear(x: Tensor, w: GGUFWeight, bias: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """A linear layer whose frozen weight is held in a GGUF block format.

    y = x W^T + bias with W = dequantize_gguf(w, x.dtype); d_x = d_y W, d_bias = sum of d_y.

    Args:
        x: [..., K], float16/bfloat16/float32/float64, any strides. Differentiable; never saved for the backward.
        w: GGUFWeight of shape (N, K): Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K. Frozen.
        bias: [N], floating; cast to x's dtype. Differentiable.
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        [..., N] in x's dtype. Under autocast x and bias are cast first, as in torch.nn.functional.linear.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, each named.

    Devices: cpu (stretches of at most 16 MiB of decoded weight), cuda (Triton: up to 64 rows W is decoded inside the
        product, above that into a scratch of at most 32 MiB), mps (Metal,
        decoded inside the product), not xla, which has no bitcast for the scales.
    Numerics: W is rounded once to x's dtype; float32 accumulation; deterministic.
    Source: the block formats of ggml, as gguf.dequantize reads them.
    """
    x, bias = autocast(x, bias)
    _check(x, w, bias, impl)
    N, K = w.shape
    args = (x, w.packed, bias, w.format, N, K)
    if impl == "spec":
        return spec.forward(*args)
    return GGUFProduct.apply(*args) if needs_grad(x, bias) else fwd(*args)


def dequantize_gguf(w: GGUFWeight, dtype: torch.dtype) -> Tensor:
    """The weight that the blocks stand for, in float32 arithmetic, rounded once to `dtype`.

    Args:
        w: a GGUFWeight.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        [N, K] on w's device. Not differentiable.

    Raises:
        ValueError: a dtype that is not floating.

    Devices: cpu, cuda (Triton), mps (Metal).
    Numerics: in float32 equal to gguf.dequantize, bit for bit.
    """
    if not isinstance(w, GGUFWeight):
        raise ValueError(f"dequantize_gguf: w must be a GGUFWeight; got {type(w).__name__}")
    if dtype not in FLOATING:
        raise ValueError(f"dequantize_gguf: dtype must be float16, bfloat16, float32 or float64; got {dtype}")
    return dequantize(w.packed, w.format, *w.shape, dtype)


def _check(x, w, bias, impl) -> None:
    if not isinstance(w, GGUFWeight):
        raise ValueError(f"gguf_linear: w must be a GGUFWeight; got {type(w).__name__}")
    N, K = w.shape
    if not floating(x) or x.dim() < 1 or x.shape[-1] != K:
        raise ValueError(f"gguf_linear: x must be floating [..., {K}]; got {given(x)}")
    if bias is not None and (not floating(bias) or tuple(bias.shape) != (N,)):
        raise ValueError(f"gguf_linear: bias must be floating ({N},); got {given(bias)}")
    check_impl("gguf_linear", impl)
    same_device("gguf_linear", x=x, w=w.packed, bias=bias)
