"""The contract of NF4 products: schemas, shapes, devices, gradient. Torch-only; imports no kernel."""

import torch
from torch import Tensor

from .._arguments import FLOATING
from .._contract import define
from .._frozen_product import define_product, linear
from . import spec
from .weight import NF4Weight

HERE = "riftco.kernels.nf4"
LAUNCHERS = {"cpu": f"{HERE}.cpu", "cuda": f"{HERE}.cuda", "mps": "riftco.metal.nf4", "xla": f"{HERE}.spec"}


def _fake_dequantize(codes, absmax, numel, block_size, dtype):
    return codes.new_empty(numel, dtype=dtype)


fwd, bwd, *_ = product = define_product(
    "nf4_linear", HERE, spec.forward, LAUNCHERS, "Tensor codes, Tensor absmax", "SymInt N, SymInt K, int block_size"
)
dequantize = define(
    "nf4_dequantize",
    "(Tensor codes, Tensor absmax, SymInt numel, int block_size, ScalarType dtype) -> Tensor",
    fake=_fake_dequantize,
    spec=f"{HERE}.spec:dequantize",
    launchers={device: f"{module}:dequantize" for device, module in LAUNCHERS.items()},
)


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
    if not isinstance(q, NF4Weight):
        raise ValueError(f"nf4_linear: q must be an NF4Weight (see quantize_nf4); got {type(q).__name__}")
    return linear("nf4_linear", product, x, "q", q, bias, impl)


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
