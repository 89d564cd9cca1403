"""The contract of NF4 products: schemas, shapes, devices, gradient. Torch-only; imports no kernel."""

import torch
from torch import Tensor

from .._arguments import FLOATING, check_impl, floating, given
from .._contract import autocast, define, needs_grad, once_differentiable, same_device
from . import spec
from .weight import NF4Weight

HERE = "riftco.kernels.nf4"
LAUNCHERS = {"cpu": f"{HERE}.cpu", "cuda": f"{HERE}.cuda", "mps": "riftco.metal.nf4", "xla": f"{HERE}.spec"}


def _fake_fwd(x, codes, absmax, bias, N, K, block_size):
    return x.new_empty((*x.shape[:-1], N))


def _fake_bwd(d_y, codes, absmax, N, K, block_size):
    return d_y.new_empty((*d_y.shape[:-1], K))


def _fake_dequantize(codes, absmax, numel, block_size, dtype):
    return codes.new_empty(numel, dtype=dtype)


fwd = define(
    "nf4_linear_fwd",
    "(Tensor x, Tensor codes, Tensor absmax, Tensor? bias, SymInt N, SymInt K, int block_size) -> Tensor",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers={device: f"{module}:forward" for device, module in LAUNCHERS.items()},
    routes=f"{HERE}.route:forward_routes",
)
bwd = define(
    "nf4_linear_bwd",
    "(Tensor d_y, Tensor codes, Tensor absmax, SymInt N, SymInt K, int block_size) -> Tensor",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers={device: f"{module}:backward" for device, module in LAUNCHERS.items()},
    routes=f"{HERE}.route:backward_routes",
)
dequantize = define(
    "nf4_dequantize",
    "(Tensor codes, Tensor absmax, SymInt numel, int block_size, ScalarType dtype) -> Tensor",
    fake=_fake_dequantize,
    spec=f"{HERE}.spec:dequantize",
    launchers={device: f"{module}:dequantize" for device, module in LAUNCHERS.items()},
)


class NF4Product(torch.autograd.Function):
    """The weight is frozen, so nothing but its codes is needed again: x is never saved."""

    @staticmethod
    def forward(x, codes, absmax, bias, N, K, block_size):
        return fwd(x, codes, absmax, bias, N, K, block_size)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, codes, absmax, bias, *ctx.sizes = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(codes, absmax)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y):
        d_x = d_bias = None
        if ctx.needs_input_grad[0]:
            codes, absmax = ctx.saved_tensors
            d_x = bwd(d_y, codes, absmax, *ctx.sizes)
        if ctx.needs_input_grad[3]:
            acc = torch.promote_types(d_y.dtype, torch.float32)
            rows = d_y.unsqueeze(0)  # summed over no dimension at all, a single vector would give a scalar
            d_bias = rows.sum(tuple(range(rows.dim() - 1)), dtype=acc).to(ctx.bias_dtype)
        return d_x, None, None, d_bias, None, None, None


def nf4_linear(x: Tensor, q: NF4Weight, bias: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """A linear layer whose frozen weight is held in 4-bit NormalFloat.

    y = x W^T + bias with W = dequantize_nf4(q, x.dtype); d_x = d_y W, d_bias = sum of d_y.

    Args:
        x: [..., K], float16/bfloat16/float32/float64, any strides. Differentiable; never saved for the backward.
        q: NF4Weight of shape (N, K), as made by `quantize_nf4` or loaded from a bitsandbytes state_dict. Frozen.
        bias: [N], floating; cast to x's dtype. Differentiable.
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        [..., N] in x's dtype. Under autocast x and bias are cast first, as in torch.nn.functional.linear.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, each named.

    Devices: cpu (stretches of at most 16 MiB of decoded weight), cuda (Triton: up to 64 rows W is decoded inside the
        product, above that into a scratch of at most 32 MiB), mps (Metal, inside the product), xla (plain torch,
        the weight whole for the call).
    Numerics: W is rounded once to x's dtype, as in bitsandbytes; for one row on cuda not at all. For up to 64 rows on
        cuda in 16 bits the table's values are rounded instead (not for d_x), and absmax scales the sums. float32
        accumulation; deterministic.
    Source: Dettmers et al. 2023, "QLoRA", equations 5 and 6.
    """
    x, bias = autocast(x, bias)
    _check(x, q, bias, impl)
    N, K = q.shape
    args = (x, q.codes, q.scale, bias, N, K, q.block_size)
    if impl == "spec":
        return spec.forward(*args)
    return NF4Product.apply(*args) if needs_grad(x, bias) else fwd(*args)


def dequantize_nf4(q: NF4Weight, dtype: torch.dtype) -> Tensor:
    """The weight that the 4-bit codes stand for: code table value * absmax in float32, rounded once to `dtype`.

    Args:
        q: an NF4Weight of any shape.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        A tensor of q's shape on q's device. Not differentiable.

    Raises:
        ValueError: a dtype that is not floating.

    Devices: cpu, cuda (Triton), mps (Metal), xla.
    Numerics: equal to bitsandbytes.functional.dequantize_4bit.
    """
    if not isinstance(q, NF4Weight):
        raise ValueError(f"dequantize_nf4: q must be an NF4Weight (see quantize_nf4); got {type(q).__name__}")
    if dtype not in FLOATING:
        raise ValueError(f"dequantize_nf4: dtype must be float16, bfloat16, float32 or float64; got {dtype}")
    return dequantize(q.codes, q.scale, q.numel(), q.block_size, dtype).view(q.shape)


def _check(x, q, bias, impl) -> None:
    if not isinstance(q, NF4Weight):
        raise ValueError(f"nf4_linear: q must be an NF4Weight (see quantize_nf4); got {type(q).__name__}")
    if len(q.shape) != 2:
        raise ValueError(f"nf4_linear: q must have shape (N, K); got {tuple(q.shape)}")
    N, K = q.shape
    if not floating(x) or x.dim() < 1 or x.shape[-1] != K:
        raise ValueError(f"nf4_linear: x must be floating [..., {K}]; got {given(x)}")
    if bias is not None and (not floating(bias) or tuple(bias.shape) != (N,)):
        raise ValueError(f"nf4_linear: bias must be floating ({N},); got {given(bias)}")
    check_impl("nf4_linear", impl)
    same_device("nf4_linear", x=x, q=q.codes, bias=bias)
