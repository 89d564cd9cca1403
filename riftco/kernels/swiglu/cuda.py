"""Gated linear units in Triton: elementwise over rows that may lie apart, one program per stretch of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import as_rows, cdiv, next_power_of_2, on
from . import spec

BLOCK_F = 2048


@triton.jit
def _row(n, inner, stride_o, stride_i):
    return (n // inner) * stride_o + (n % inner) * stride_i


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))  # never above 1, so that nothing overflows
    # exactly 0 where exp(-x) is beyond float32, as in PyTorch's x / (1 + exp(-x)): an infinite factor then gives NaN
    return tl.where(x >= 0, 1.0, tl.where(x < -88.72284, 0.0, e)) / (1.0 + e)


@triton.jit
def _gate(g, ACTIVATION: tl.constexpr):
    """(s, slope): the activation is g * s, its derivative is slope."""
    near = tl.minimum(tl.maximum(g, -30.0), 30.0)  # s is 0 or 1 beyond, and powers of g must not become infinite
    if ACTIVATION == "gelu":
        s = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        slope = s + g * tl.exp(-0.5 * near * near) * 0.3989422804014327
    elif ACTIVATION == "gelu_tanh":
        u2 = 1.5957691216057308 * (near + 0.044715 * near * near * near)
        s = _sigmoid(u2)
        slope = s + g * s * _sigmoid(-u2) * 1.5957691216057308 * (1.0 + 0.134145 * near * near)
    else:
        s = _sigmoid(g)
        slope = s + g * s * _sigmoid(-g)
    return s, slope


@triton.jit
def _glu_fwd(
    out_ptr, gate_ptr, up_ptr,
    g_inner, g_stride_o, g_stride_i, g_stride_f, u_inner, u_stride_o, u_stride_i, u_stride_f, F, blocks,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) // blocks
    f = (tl.program_id(0).to(tl.int64) % blocks) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate_ptr + _row(n, g_inner, g_stride_o, g_stride_i) + f * g_stride_f, mask=f < F, other=0.0)
    u = tl.load(up_ptr + _row(n, u_inner, u_stride_o, u_stride_i) + f * u_stride_f, mask=f < F, other=0.0)
    g = g.to(tl.float32)
    s, _ = _gate(g, ACTIVATION)
    tl.store(out_ptr + n * F + f, g * s * u.to(tl.float32), mask=f < F)


@triton.jit
def _glu_bwd(
    d_gate_ptr, d_up_ptr, d_out_ptr, gate_ptr, up_ptr,
    pitch, d_inner, d_stride_o, d_stride_i, d_stride_f, g_inner, g_stride_o, g_stride_i, g_stride_f,
    u_inner, u_stride_o, u_stride_i, u_stride_f, F, blocks,
    NEED_GATE: tl.constexpr, NEED_UP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) // blocks
    f = (tl.program_id(0).to(tl.int64) % blocks) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(d_out_ptr + _row(n, d_inner, d_stride_o, d_stride_i) + f * d_stride_f, mask=f < F, other=0.0)
    g = tl.load(gate_ptr + _row(n, g_inner, g_stride_o, g_stride_i) + f * g_stride_f, mask=f < F, other=0.0)
    d = d.to(tl.float32)
    g = g.to(tl.float32)
    s, slope = _gate(g, ACTIVATION)
    if NEED_GATE:
        u = tl.load(up_ptr + _row(n, u_inner, u_stride_o, u_stride_i) + f * u_stride_f, mask=f < F, other=0.0)
        tl.store(d_gate_ptr + n * pitch + f, d * u.to(tl.float32) * slope, mask=f < F)
    if NEED_UP:
        tl.store(d_up_ptr + n * pitch + f, d * (g * s), mask=f < F)


def _grid(t: Tensor) -> tuple[int, int, int]:
    """(programs, stretches of a row, elements of a stretch)."""
    F = t.shape[-1]
    block = min(BLOCK_F, next_power_of_2(max(F, 16)))
    blocks = cdiv(F, block)
    return t.shape[:-1].numel() * blocks, blocks, block


def forward(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    gate, up = spec.halves(gate, up)
    dtype = gate.dtype if gate.dtype == up.dtype else torch.promote_types(gate.dtype, up.dtype)
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    if out.numel() == 0:
        return out
    programs, blocks, block = _grid(gate)
    g, *g_strides = as_rows(gate)
    u, *u_strides = as_rows(up)
    with on(gate):
        _glu_fwd[(programs,)](
            out, g, u, *g_strides, g.stride(-1), *u_strides, u.stride(-1), gate.shape[-1], blocks,
            ACTIVATION=activation, BLOCK=block,
        )  # fmt: skip
    return out


def backward(
    d_out: Tensor, gate: Tensor, up: Tensor | None, activation: str, need_gate: bool, need_up: bool
) -> tuple[Tensor, Tensor]:
    d_gate = torch.empty(gate.shape if need_gate else 0, dtype=gate.dtype, device=gate.device)
    need_up = need_gate if up is None else need_up
    d_up = torch.empty(
        0 if up is None or not need_up else up.shape, dtype=gate.dtype if up is None else up.dtype, device=gate.device
    )
    if gate.numel() == 0:
        return d_gate, d_up
    into = spec.halves(d_gate, None) if up is None and need_gate else (d_gate, d_up)
    pitch = gate.shape[-1]  # of the gradients' rows
    gate, up = spec.halves(gate, up)
    programs, blocks, block = _grid(gate)
    d, *d_strides = as_rows(d_out)
    g, *g_strides = as_rows(gate)
    u, *u_strides = as_rows(up)
    with on(gate):
        _glu_bwd[(programs,)](
            *into, d, g, u, pitch, *d_strides, d.stride(-1), *g_strides, g.stride(-1), *u_strides, u.stride(-1),
            gate.shape[-1], blocks, NEED_GATE=need_gate, NEED_UP=need_up, ACTIVATION=activation, BLOCK=block,
        )  # fmt: skip
    return d_gate, d_up
