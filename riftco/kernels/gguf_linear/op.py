"""The contract of products with GGUF weights: schemas, shapes, devices, gradient. Torch-only; imports no kernel."""

import torch
from torch import Tensor

from .._arguments import FLOATING
from .._contract import define
from .._frozen_product import define_product, linear
from . import spec
from .weight import GGUFWeight

HERE = "riftco.kernels.gguf_linear"
LAUNCHERS = {"cpu": f"{HERE}.cpu", "cuda": f"{HERE}.cuda", "mps": "riftco.metal.gguf_linear"}


def _fake_dequantize(packed, format, N, K, dtype):
    return packed.new_empty((N, K), dtype=dtype)


fwd, bwd, *_ = product = define_product(
    "gguf_linear", HERE, spec.forward, LAUNCHERS, "Tensor packed", "str format, SymInt N, SymInt K"
)
dequantize = define(
    "gguf_dequantize",
    "(Tensor packed, str format, SymInt N, SymInt K, ScalarType dtype) -> Tensor",
    fake=_fake_dequantize,
    spec=f"{HERE}.spec:dequantize",
    launchers={device: f"{module}:dequantize" for device, module in LAUNCHERS.items()},
)


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
    Numerics: W is rounded once to x's dtype, or, for up to 4 rows on cuda, not at all; float32 accumulation;
        deterministic.
    Source: the block formats of ggml, as gguf.dequantize reads them.
    """
    if not isinstance(w, GGUFWeight):
        raise ValueError(f"gguf_linear: w must be a GGUFWeight; got {type(w).__name__}")
    return linear("gguf_linear", product, x, "w", w, bias, impl)


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
