"""Attention on CUDA: results without elements, and which kernels serve the others (route.py)."""

import torch
from torch import Tensor

from ..._contract import load
from ..route import route_of
from ..spec import sink_gradient
from . import portable_backward, portable_forward

EXACT_CAP = 1000.0  # above it the tanh of the kernels for Hopper, which lose 1e-7 of the cap, shows in 16 bits


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None,
    right: int | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if q.numel() == 0:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        return out, q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    cu_q, cu_k, k_lens, sinks = _vectors(cu_q, cu_k, k_lens, sinks)
    left, right = _limits(left, right, q.shape[-3], k.shape[-3])
    options = _options(k_lens, bias, sinks, seed, left, right, softcap) | _unusual(k, v, k_lens, scale)
    hopper = route_of(q, k, v, cu_q=cu_q, options=options).name == "hopper"
    launcher = load(f"{__name__}.hopper.forward:forward") if hopper else portable_forward.forward
    return launcher(q, k, v, cu_q, cu_k, k_lens, bias, sinks, seed, scale, left, right, softcap, dropout_p)


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float, dropout_p: float,
    kv_grad_start: int, deterministic: bool, need_q: bool, need_k: bool, need_v: bool, need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if q.numel() == 0:
        return _nothing(q, k, v, lse, cu_q, bias, sinks, kv_grad_start, need_q, need_k, need_v, need_bias, need_sinks)
    cu_q, cu_k, k_lens, sinks = _vectors(cu_q, cu_k, k_lens, sinks)
    left, right = _limits(left, right, q.shape[-3], k.shape[-3])
    options = _options(k_lens, bias, sinks, seed, left, right, softcap, kv_grad_start)
    hopper = route_of(q, k, v, backward=True, cu_q=cu_q, options=options).name == "hopper"
    wide = "_wide" if q.shape[-1] > 128 else ""
    launcher = load(f"{__name__}.hopper.backward{wide}:backward") if hopper else portable_backward.backward
    d_q, d_k, d_v, d_bias, d_sinks, delta, exponent = launcher(
        d_out, d_lse, q, k, v, out, lse, cu_q, cu_k, k_lens, bias, sinks, seed, scale, left, right, softcap,
        dropout_p, kv_grad_start, deterministic, need_q, need_k, need_v, need_bias, need_sinks,
    )  # fmt: skip
    if sinks is not None and need_sinks:
        d_sinks = sink_gradient(sinks, lse, delta)
    return d_q, d_k, d_v, d_bias, d_sinks, delta, exponent


def _vectors(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Kernels read these few numbers side by side; callers may hold them in a column of a table or expanded."""
    return tuple(t if t is None else t.contiguous() for t in tensors)


def _limits(left: int | None, right: int | None, T: int, S: int) -> tuple[int | None, int | None]:
    """Windows that no row can feel, and that int32 might not hold, are none."""
    return None if left is None or left >= S else left, None if right is None or right >= T else right


def _options(k_lens, bias, sinks, seed, left, right, softcap, kv_grad_start=0) -> frozenset[str]:
    """Names of the options in use that a kernel must know."""
    used = dict(k_lens=k_lens is not None, bias=bias is not None, sinks=sinks is not None, dropout=seed is not None,
                softcap=softcap > 0, window=left is not None or right not in (None, 0),
                kv_grad_start=kv_grad_start > 0, far_softcap=softcap > EXACT_CAP)  # fmt: skip
    return frozenset(name for name, there in used.items() if there)


def _unusual(k, v, k_lens, scale) -> frozenset[str]:
    """What the forward for Hopper cannot do and hardly any call asks for.

    It finds the largest score before it scales, and lets the hardware end each sequence where its own keys end, which
    needs batches that lie whole rows apart.
    """
    apart = k_lens is None or all(
        t.shape[0] < 2 or (t.stride(1) > 0 and t.stride(0) % t.stride(1) == 0) for t in (k, v)
    )
    used = {"scale <= 0": scale is not None and not scale > 0, "k_lens of batches with odd strides": not apart}
    return frozenset(name for name, there in used.items() if there)


def _nothing(
    q, k, v, lse, cu_q, bias, sinks, kv_grad_start, need_q, need_k, need_v, need_bias, need_sinks
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Without query rows every gradient is 0."""
    docs = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    return (
        q.new_zeros(q.shape if need_q else 0),
        *(t.new_zeros(t[..., kv_grad_start:, :, :].shape if need else 0) for t, need in ((k, need_k), (v, need_v))),
        q.new_zeros(0) if bias is None or not need_bias else bias.new_zeros(bias.shape),
        q.new_zeros(0) if sinks is None or not need_sinks else sinks.new_zeros(sinks.shape),
        torch.zeros_like(lse),
        q.new_zeros((docs, q.shape[-2]) if q.dtype == torch.float16 else 0, dtype=torch.int32),
    )
