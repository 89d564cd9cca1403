"""The contract of gated linear units: schema, shapes, devices, gradients. Torch-only; imports no kernel."""

import torch
from torch import Tensor

from .._arguments import check_impl, floating, given
from .._contract import Function, define, needs_grad, once_differentiable, same_device
from .._recompute import saved
from . import spec

HERE = "riftco.kernels.swiglu"


def _fake_fwd(gate, up, activation):
    if up is None:
        return gate.new_empty(*gate.shape[:-1], gate.shape[-1] // 2)
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _fake_bwd(d_out, gate, up, activation, need_gate, need_up):
    d_gate = gate.new_empty(gate.shape) if need_gate else gate.new_empty(0)
    return d_gate, up.new_empty(up.shape) if need_up and up is not None else gate.new_empty(0)


fwd = define(
    "swiglu_fwd",
    "(Tensor gate, Tensor? up, str activation) -> Tensor",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers={
        "cpu": f"{HERE}.cpu:forward",
        "cuda": f"{HERE}.cuda:forward",
        "mps": "riftco.metal.swiglu:forward",
        "xla": "riftco.tpu.swiglu:forward",
    },
)
bwd = define(
    "swiglu_bwd",
    "(Tensor d_out, Tensor gate, Tensor? up, str activation, bool need_gate, bool need_up)"
    " -> (Tensor d_gate, Tensor d_up)",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers={
        "cpu": f"{HERE}.cpu:backward",
        "cuda": f"{HERE}.cuda:backward",
        "mps": "riftco.metal.swiglu:backward",
        "xla": "riftco.tpu.swiglu:backward",
    },
)


class GatedLinearUnit(Function):
    @staticmethod
    def forward(gate, up, activation):
        return fwd(gate, up, activation)

    @staticmethod
    def setup_context(ctx, inputs, output):
        gate, up, ctx.activation = inputs
        ctx.save_for_backward(gate, up)
        ctx.unpacked = None

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        gate, up = saved(ctx)
        need_gate, need_up = ctx.needs_input_grad[:2]
        d_gate, d_up = bwd(d_out, gate, up, ctx.activation, need_gate, need_up)
        return d_gate if need_gate else None, d_up if need_up else None, None

    @staticmethod
    def again(ctx, gate, up):
        return fwd(gate, up, ctx.activation)


def swiglu(gate: Tensor, up: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """SwiGLU: silu(gate) * up, with silu(g) = g / (1 + exp(-g)).

    Args:
        gate: [..., F], float16/bfloat16/float32/float64, any strides (the two halves of one fused tensor are read where
            they lie). Differentiable.
        up: as gate. Differentiable; each gradient is computed only if it is asked for. None: gate is [..., 2 F] and
            holds gate and up beside each other, as a fused projection gives them; so does its gradient.
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        [..., F], contiguous, in the dtype that gate and up promote to.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.

    Devices: cpu, cuda (Triton), mps (Metal), xla (plain torch).
    Numerics: float32 inside, rounded once; no finite gate overflows on the way. Deterministic. Saved for the backward:
        gate and up only; the activation is computed again (`recomputed` spares the next layer its input, too).
    Source: Shazeer 2020, "GLU variants improve transformer", equation 6.
    """
    return _gated("swiglu", gate, up, "silu", impl)


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none", impl: str | None = None) -> Tensor:
    """GeGLU: gelu(gate) * up, exact or, with approximate="tanh", in the tanh form (Gemma's).

    gelu(g) = g * Phi(g); tanh form g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3))) / 2. Arguments, result, devices
    and numerics as `swiglu`.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.

    Source: Shazeer 2020, "GLU variants improve transformer", equation 6; Hendrycks & Gimpel 2016, section 2.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"geglu: approximate must be 'none' or 'tanh'; got {approximate!r}")
    return _gated("geglu", gate, up, "gelu_tanh" if approximate == "tanh" else "gelu", impl)


def _gated(name: str, gate: Tensor, up: Tensor | None, activation: str, impl: str | None) -> Tensor:
    _check(name, gate, up, impl)
    if impl == "spec":
        return spec.forward(gate, up, activation)
    if needs_grad(gate, up):
        return GatedLinearUnit.apply(gate, up, activation)
    return fwd(gate, up, activation)


def _check(name: str, gate, up, impl) -> None:
    if up is None:
        if not floating(gate) or gate.dim() < 1 or gate.shape[-1] % 2:
            raise ValueError(f"{name}: one tensor must be floating [..., 2 F]; got {given(gate)}")
    elif not (floating(gate) and floating(up)):
        raise ValueError(f"{name}: gate and up must be floating; got {given(gate, up)}")
    elif gate.dim() < 1 or gate.shape != up.shape:
        raise ValueError(
            f"{name}: gate and up must have one shape [..., F]; got {tuple(gate.shape)} and {tuple(up.shape)}"
        )
    check_impl(name, impl)
    same_device(name, gate=gate, up=up)
