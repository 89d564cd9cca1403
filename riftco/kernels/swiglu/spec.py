"""What gated linear units mean, in plain torch: act(gate) * up. F feed-forward size, the last dimension."""

import math

import torch
import torch.nn.functional as nnf
from torch import Tensor


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gate, up), which are the halves of one tensor [..., 2 F] where up is None."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return first, second


def forward(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """gate, up [..., F] -> act(gate) * up in their promoted dtype, rounded once."""
    gate, up = halves(gate, up)
    acc = _acc(gate, up)
    g = gate.to(acc)
    if activation == "silu":
        a = nnf.silu(g)
    else:
        a = nnf.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (a * up.to(acc)).to(torch.promote_types(gate.dtype, up.dtype)).contiguous()


def backward(
    d_out: Tensor, gate: Tensor, up: Tensor | None, activation: str, need_gate: bool, need_up: bool
) -> tuple[Tensor, Tensor]:
    """d_gate = d_out * up * act'(gate), d_up = d_out * act(gate); what is not needed comes back empty.

    silu' = s + g s (1 - s) with s = sigmoid(g); gelu' = Phi(g) + g phi(g); the tanh form is g * sigmoid(2 u) with
    u = sqrt(2 / pi) (g + 0.044715 g^3), so its derivative is s + g s (1 - s) 2 u'.
    Without up, gate [..., 2 F] holds both, and so does d_gate.
    """
    if up is None:
        both = torch.cat(backward(d_out, *halves(gate, None), activation, need_gate, need_gate), -1)
        return both, gate.new_empty(0)
    acc = _acc(gate, up)
    d, g = d_out.to(acc), gate.to(acc)
    near = g.clamp(-30, 30)  # s is 0 or 1 beyond, and powers of g must not become infinite
    if activation == "gelu":
        s = 0.5 * (1 + torch.erf(g * math.sqrt(0.5)))
        slope = s + g * torch.exp(-0.5 * near.square()) / math.sqrt(2 * math.pi)
    else:
        u2, d_u2 = g, torch.ones((), dtype=acc, device=g.device)
        if activation == "gelu_tanh":
            k = 2 * math.sqrt(2 / math.pi)
            u2, d_u2 = k * (near + 0.044715 * near**3), k * (1 + 3 * 0.044715 * near.square())
        s = torch.sigmoid(u2)
        slope = s + g * s * torch.sigmoid(-u2) * d_u2
    d_gate = (d * up.to(acc) * slope).to(gate.dtype).contiguous() if need_gate else gate.new_empty(0)
    d_up = (d * (g * s)).to(up.dtype).contiguous() if need_up else up.new_empty(0)
    return d_gate, d_up


def _acc(gate: Tensor, up: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(gate.dtype, up.dtype), torch.float32)
