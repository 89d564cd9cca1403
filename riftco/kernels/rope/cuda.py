"""Rotary position embedding in Triton: a program takes one token, all heads of q and then of k, and may write in place
because it loads both elements of a pair before it stores either.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import as_batch, next_power_of_2, on

TILE = 2048  # pairs held at once


@triton.jit
def _turn_heads(
    out_ptr, x_ptr, out_stride_h, out_stride_d, stride_h, stride_d, H, D, c, s, half,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    for start in range(0, H, HEADS):
        h = (start + tl.arange(0, HEADS).to(tl.int64))[:, None]
        if INTERLEAVED:  # pairs are loaded as they lie, so that neighbours come in one access
            d = tl.arange(0, 2 * BLOCK).to(tl.int64)[None, :]
            mask = (h < H) & (d < 2 * half)
            pairs = tl.load(x_ptr + h * stride_h + d * stride_d, mask=mask, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(pairs, [HEADS, BLOCK, 2]))
            pairs = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [HEADS, 2 * BLOCK])
            tl.store(out_ptr + h * out_stride_h + d * out_stride_d, pairs, mask=mask)
        else:
            first = tl.arange(0, BLOCK).to(tl.int64)[None, :]
            second = first + half
            mask = (h < H) & (first < half)
            a = tl.load(x_ptr + h * stride_h + first * stride_d, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(x_ptr + h * stride_h + second * stride_d, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + h * out_stride_h + first * out_stride_d, a * c - b * s, mask=mask)
            tl.store(out_ptr + h * out_stride_h + second * out_stride_d, b * c + a * s, mask=mask)
        if REST:
            for start_d in range(2 * half, D, BLOCK):
                rest = (start_d + tl.arange(0, BLOCK).to(tl.int64))[None, :]
                kept = tl.load(x_ptr + h * stride_h + rest * stride_d, mask=(h < H) & (rest < D), other=0.0)
                tl.store(out_ptr + h * out_stride_h + rest * out_stride_d, kept, mask=(h < H) & (rest < D))


@triton.jit
def _rope(
    q_out_ptr, q_ptr, k_out_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr,
    qo_b, qo_t, qo_h, qo_d, q_b, q_t, q_h, q_d, ko_b, ko_t, ko_h, ko_d, k_b, k_t, k_h, k_d,
    cos_p, cos_i, sin_p, sin_i, p_b, p_t, T, max_position, half, H, K, Dq, Dk,
    HAS_POSITIONS: tl.constexpr, HAS_K: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, REST_Q: tl.constexpr, REST_K: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64) // T
    t = tl.program_id(0).to(tl.int64) % T
    p = tl.load(positions_ptr + b * p_b + t * p_t).to(tl.int64) if HAS_POSITIONS else t
    i = tl.arange(0, BLOCK).to(tl.int64)[None, :]
    live = i < half
    inside = (p >= 0) & (p < max_position)
    c = tl.load(cos_ptr + p * cos_p + i * cos_i, mask=live & inside, other=float("nan"))
    s = tl.load(sin_ptr + p * sin_p + i * sin_i, mask=live & inside, other=float("nan"))
    if TRANSPOSE:
        s = -s
    _turn_heads(
        q_out_ptr + b * qo_b + t * qo_t, q_ptr + b * q_b + t * q_t, qo_h, qo_d, q_h, q_d, H, Dq,
        c, s, half, INTERLEAVED, HEADS, BLOCK, REST_Q,
    )  # fmt: skip
    if HAS_K:
        _turn_heads(
            k_out_ptr + b * ko_b + t * ko_t, k_ptr + b * k_b + t * k_t, ko_h, ko_d, k_h, k_d, K, Dk,
            c, s, half, INTERLEAVED, HEADS, BLOCK, REST_K,
        )  # fmt: skip


def _launch(out: list[Tensor], x: list[Tensor], cos, sin, positions, interleaved: bool, transpose: bool) -> None:
    """One launch for one or two tensors."""
    if x[0].shape[:-2].numel() == 0:
        return
    (q_out, q), (k_out, k) = [(as_batch(o), as_batch(t)) for o, t in zip((out[0], out[-1]), (x[0], x[-1]))]
    B, T, H, D = q.shape
    if positions is not None:
        positions = positions.reshape(B, T)
    half = cos.shape[1]
    block = next_power_of_2(max(half, 16))
    heads = max(1, min(next_power_of_2(max(H, k.shape[2], 1)), TILE // block))
    with on(q):
        _rope[(B * T,)](
            q_out, q, k_out, k, cos, sin, positions,
            *q_out.stride(), *q.stride(), *k_out.stride(), *k.stride(), *cos.stride(), *sin.stride(),
            *((0, 0) if positions is None else positions.stride()),
            T, cos.shape[0], half, H, k.shape[2], D, k.shape[3],
            HAS_POSITIONS=positions is not None, HAS_K=len(x) == 2, INTERLEAVED=interleaved, TRANSPOSE=transpose,
            HEADS=heads, BLOCK=block, REST_Q=2 * half < D, REST_K=k.shape[3] > 2 * half,
        )  # fmt: skip


def forward(
    x: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, transpose: bool
) -> list[Tensor]:
    out = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in x]
    _launch(out, x, cos, sin, positions, interleaved, transpose)
    return out


def inplace(x: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
    _launch(x, x, cos, sin, positions, interleaved, False)
