"""Gated linear units on a CPU: in blocks of rows that stay in the cache, in float32 buffers used again."""

import torch
from torch import Tensor

from .._blocks import Wide, row_blocks
from . import spec

aten = torch.ops.aten


def _activation(g: Tensor, activation: str, out: Tensor) -> Tensor:
    if activation == "silu":
        return aten.silu.out(g, out=out)
    return aten.gelu.out(g, approximate="tanh" if activation == "gelu_tanh" else "none", out=out)


def _times_slope(d: Tensor, g: Tensor, activation: str, out: Tensor) -> Tensor:
    """d * act'(g)."""
    if activation == "silu":
        return aten.silu_backward.grad_input(d, g, grad_input=out)
    if activation == "gelu":
        return aten.gelu_backward.grad_input(d, g, approximate="none", grad_input=out)
    near = g.clamp(-30, 30)  # the slope is 0 or 1 beyond, and powers of g must not become infinite
    return aten.gelu_backward.grad_input(d, near, approximate="tanh", grad_input=out)


def forward(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    gate, up = spec.halves(gate, up)
    out = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    if out.numel() == 0:
        return out
    gates, ups, outs = Wide(gate), Wide(up), Wide(out)
    for at in row_blocks(*gates.rows.shape):
        outs.write(at, _activation(gates.read(at), activation, outs.unfilled(at)).mul_(ups.read(at)))
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
    d_gates, d_ups = (Wide(t) if need else None for t, need in zip(into, (need_gate, need_up)))
    d_outs, (gates, ups) = Wide(d_out), map(Wide, spec.halves(gate, up))
    for at in row_blocks(*gates.rows.shape):
        d, g = d_outs.read(at), gates.read(at)
        if d_gates is not None:
            d_act = torch.mul(d, ups.read(at), out=ups.scratch(at))
            d_gates.write(at, _times_slope(d_act, g, activation, d_gates.unfilled(at)))
        if d_ups is not None:
            d_ups.write(at, _activation(g, activation, d_ups.unfilled(at)).mul_(d))
    return d_gate, d_up
