"""DoRA's part beside the adapter: the norm of each row of W + scale * B A, and the rescaled output.

y = gain * z + bias with z = x W^T + scale * dropout(x) A^T B^T and gain = magnitude / norm, one number a feature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._contract import Function, autocast, define, needs_grad, once_differentiable
from .._frozen_product import bias_gradient
from .._frozen_weight import FrozenWeight
from . import rescale as spec

HERE = "riftco.kernels.lora_linear"
SCRATCH_BYTES = 32 << 20  # of float32 rows of W held at once
LAUNCHERS = {"cpu": "rescale", "cuda": "rescale_cuda", "mps": "rescale", "xla": "rescale"}


def _fake_bwd(d_y, z, gain, need_z, need_gain):
    return z.new_empty(z.shape if need_z else 0), gain.new_empty(gain.shape if need_gain else 0)


fwd = define(
    "lora_rescale_fwd",
    "(Tensor z, Tensor gain, Tensor? bias) -> Tensor",
    fake=lambda z, gain, bias: z.new_empty(z.shape),
    spec=f"{HERE}.rescale:forward",
    launchers={device: f"{HERE}.{file}:forward" for device, file in LAUNCHERS.items()},
)
bwd = define(
    "lora_rescale_bwd",
    "(Tensor d_y, Tensor z, Tensor gain, bool need_z, bool need_gain) -> (Tensor d_z, Tensor d_gain)",
    fake=_fake_bwd,
    spec=f"{HERE}.rescale:backward",
    launchers={device: f"{HERE}.{file}:backward" for device, file in LAUNCHERS.items()},
)


class Rescaled(Function):
    """z is kept, as PEFT keeps it: y would do where no gain is 0, at the price of digits where the bias is large."""

    @staticmethod
    def forward(z, gain, bias):
        return fwd(z, gain, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        z, gain, bias = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(z if ctx.needs_input_grad[1] else None, gain)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y):
        z, gain = ctx.saved_tensors
        need_z, need_gain, need_bias = ctx.needs_input_grad
        d_z, d_gain = bwd(d_y, d_y if z is None else z, gain, need_z, need_gain)
        d_bias = None
        if need_bias:
            d_bias = bias_gradient(d_y, ctx.bias_dtype)
        return d_z if need_z else None, d_gain if need_gain else None, d_bias


def rescale(z: Tensor, gain: Tensor, bias: Tensor | None, impl: str | None = None) -> Tensor:
    """gain * z + bias in float32 (float64 in float64), rounded to z's dtype."""
    gain = gain.to(torch.promote_types(z.dtype, torch.float32))
    (bias,) = (None,) if bias is None else autocast(bias)
    if impl == "spec":
        return spec.forward(z, gain, bias)
    return Rescaled.apply(z, gain, bias) if needs_grad(z, gain, bias) else fwd(z, gain, bias)


@torch.no_grad()
def weight_norm(weight: Tensor | FrozenWeight, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """||W + scale * B A|| of each row [N], in float32 (float64 in float64): a few rows of W at a time.

    A constant to autograd (section 4.3 of the paper).
    """
    N, C = weight.shape
    D = torch.promote_types(torch.promote_types(lora_a.dtype, lora_b.dtype), torch.float32)
    if isinstance(weight, Tensor):
        D = torch.promote_types(D, weight.dtype)
    a, b = lora_a.to(D), lora_b.to(D)
    step = max(1, SCRATCH_BYTES // (max(C, 1) * D.itemsize))
    norms = []
    for lo in range(0, N, step):
        hi = min(lo + step, N)
        block = weight[lo:hi].to(D) if isinstance(weight, Tensor) else weight.decoded(lo, hi, D)
        norms.append(torch.linalg.vector_norm(torch.addmm(block, b[lo:hi], a, alpha=scale), dim=1))
    return torch.cat(norms) if norms else a.new_empty(0)
