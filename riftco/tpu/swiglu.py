"""Gated linear units for XLA: the spec, with GELU's left tail cut where its factor rounds to 0 in float32.

XLA's erf and tanh may stop some bits short of -1, and -60000 times those bits is not 0.
"""

import torch
from torch import Tensor

from ..kernels.swiglu import spec

TAIL = -6.0  # GELU is -6e-9 there, and its slope -4e-8


def forward(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    gate, up = spec.halves(gate, up)
    return spec.forward(_cut(gate, activation), up, activation)


def backward(
    d_out: Tensor, gate: Tensor, up: Tensor | None, activation: str, need_gate: bool, need_up: bool
) -> tuple[Tensor, Tensor]:
    if up is None:
        both = backward(d_out, *spec.halves(gate, None), activation, need_gate, need_gate)
        return torch.cat(both, -1), gate.new_empty(0)
    return spec.backward(d_out, _cut(gate, activation), up, activation, need_gate, need_up)


def _cut(gate: Tensor, activation: str) -> Tensor:
    return gate.clamp(min=TAIL) if activation != "silu" and gate.dtype != torch.float64 else gate
