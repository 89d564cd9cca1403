"""Launches csrc/metal/swiglu.metal; the contract is riftco/kernels/swiglu/op.py."""

import torch
from torch import Tensor

from ..kernels._launch import as_rows
from ..kernels.swiglu.spec import halves
from . import launch

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")  # by their number in the shader
STRETCH = 1024


def forward(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    gate, up = _one_dtype(*halves(gate, up))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        _run("swiglu_fwd", [out], (gate, up), None, activation, False, False)
    return out


def backward(
    d_out: Tensor, gate: Tensor, up: Tensor | None, activation: str, need_gate: bool, need_up: bool
) -> tuple[Tensor, Tensor]:
    if up is None:
        both = backward(d_out, *halves(gate, None), activation, need_gate, need_gate)
        return torch.cat(both, -1), gate.new_empty(0)
    dtypes = gate.dtype, up.dtype
    gate, up = _one_dtype(gate, up)
    d_gate, d_up = (
        torch.empty(gate.shape if need else 0, dtype=gate.dtype, device=gate.device) for need in (need_gate, need_up)
    )
    if gate.numel():
        _run("swiglu_bwd", [d_gate, d_up], (gate, up), d_out.to(gate.dtype), activation, need_gate, need_up)
    return d_gate.to(dtypes[0]), d_up.to(dtypes[1])


def _run(kernel: str, outputs: list[Tensor], pair: tuple[Tensor, Tensor], d_out, activation, need_gate, need_up):
    N, F = pair[0].shape[:-1].numel(), pair[0].shape[-1]
    g, *g_strides = as_rows(pair[0])
    u, *u_strides = as_rows(pair[1])
    d, *d_strides = (None, 1, 0, 0) if d_out is None else as_rows(d_out)
    launch(
        "swiglu", kernel, [g.dtype], outputs, [g, u] if d is None else [d, g, u],
        [*g_strides, g.stride(-1), *u_strides, u.stride(-1), *d_strides, 0 if d is None else d.stride(-1),
         N, F, ACTIVATIONS.index(activation), need_gate, need_up],
        groups=N * -(-F // STRETCH), threads=F,
    )  # fmt: skip


def _one_dtype(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype that they promote to: a copy of the narrower one, where they differ at all."""
    wide = torch.promote_types(gate.dtype, up.dtype)
    return gate.to(wide), up.to(wide)
