"""Gated linear units on a CPU: in blocks of rows that stay in the cache, in float32 buffers used again."""

import torch
from torch import Tensor

from .._blocks import Wide, step_of
from . import spec

aten = torch.ops.aten
TWICE_K = 1.5957691216057308  # 2 sqrt(2 / pi)


def _activation(g: Tensor, activation: str, out: Tensor) -> Tensor:
    if activation == "silu":
        return aten.silu.out(g, out=out)
    return aten.gelu.out(g, approximate="tanh" if activation == "gelu_tanh" else "none", out=out)


def _times_slope(d: Tensor, g: Tensor, activation: str, out: Tensor) -> Tensor:
    """d * act'(g), of silu and gelu."""
    if activation == "silu":
        return aten.silu_backward.grad_input(d, g, grad_input=out)
    return aten.gelu_backward.grad_input(d, g, approximate="none", grad_input=out)


def _tanh_form(d: Tensor, g: Tensor, act: Tensor, out: Tensor, spare: Tensor) -> Tensor:
    """d * act'(g) of the tanh form, and act(g) in `act`, by two sigmoids where PyTorch takes two of the dearer tanh.

    act = g s(w) and act' = s(w) (1 + g s(-w) w'), with w = k (g + 0.044715 g^3).
    """
    near = torch.clamp(g, -30, 30, out=spare)  # s is 0 or 1 beyond, and powers of g must not become infinite
    square = torch.mul(near, near, out=out)
    w = torch.mul(near, square, out=act).mul_(0.044715).add_(near).mul_(TWICE_K)
    rest = torch.neg(w, out=spare).sigmoid_().mul_(g)  # s(-w) and not 1 - s(w), which keeps no digits
    s = w.sigmoid_()
    slope = square.mul_(0.134145 * TWICE_K).add_(TWICE_K).mul_(rest).add_(1).mul_(s)
    act.mul_(g)
    return slope.mul_(d)


def forward(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    gate, up = spec.halves(gate, up)
    out = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    if out.numel() == 0:
        return out
    step = step_of(gate.shape[:-1].numel(), gate.shape[-1])
    gates, ups, outs = (Wide(t, step) for t in (gate, up, out))
    for i in range(len(outs)):
        outs.write(i, _activation(gates.read(i), activation, outs.unfilled(i)).mul_(ups.read(i)))
    return out


def backward(
    d_out: Tensor, gate: Tensor, up: Tensor | None, activation: str, need_gate: bool, need_up: bool
) -> tuple[Tensor, Tensor]:
    d_gate = torch.empty(gate.shape if need_gate else 0, dtype=gate.dtype)
    need_up = need_gate if up is None else need_up
    d_up = torch.empty(0 if up is None or not need_up else up.shape, dtype=gate.dtype if up is None else up.dtype)
    if gate.numel() == 0:
        return d_gate, d_up
    into = spec.halves(d_gate, None) if up is None and need_gate else (d_gate, d_up)
    gate, up = spec.halves(gate, up)
    step, tanh = step_of(gate.shape[:-1].numel(), gate.shape[-1]), activation == "gelu_tanh"
    d_outs, gates, ups = (Wide(t, step) for t in (d_out, gate, up))
    acts, rests = Wide(gate, step), Wide(gate, step)  # for their scratch
    d_gates, d_ups = (Wide(t, step) if need else None for t, need in zip(into, (need_gate, need_up)))
    for i in range(len(gates)):
        d, g = d_outs.read(i), gates.read(i)
        if d_gates is not None:
            d_act, slope = torch.mul(d, ups.read(i), out=ups.scratch(i)), d_gates.unfilled(i)
            if tanh:
                act = acts.scratch(i) if d_ups is None else d_ups.unfilled(i)
                d_gates.write(i, _tanh_form(d_act, g, act, slope, rests.scratch(i)))
            else:
                d_gates.write(i, _times_slope(d_act, g, activation, slope))
        if d_ups is not None:
            act = d_ups.unfilled(i)
            if d_gates is None or not tanh:
                _activation(g, activation, act)
            d_ups.write(i, act.mul_(d))
    return d_gate, d_up
