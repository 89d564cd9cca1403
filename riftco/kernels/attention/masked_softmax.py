"""The softmax of materialised attention, over rows of which some hold -inf alone. Torch-only; imports no kernel.

PyTorch's own operations but on Apple GPUs, which have a shader for it. Scores of any strides; twice differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._contract import Function, define, needs_grad

HERE = "riftco.kernels.attention.masked_softmax"


def forward(s: Tensor, need_lse: bool) -> tuple[Tensor, Tensor]:
    """s [.., S] -> p = exp(s - lse) in s's dtype, zeros where a row is -inf alone; lse [..] or, unless asked, empty."""
    acc = torch.promote_types(s.dtype, torch.float32)
    dead = (s == -torch.inf).all(-1, keepdim=True)
    p = s.softmax(-1, dtype=acc).masked_fill(dead, 0.0).to(s.dtype)
    if not need_lse:
        return p, s.new_empty(0, dtype=acc)
    return p, s.to(acc).masked_fill(dead, 0.0).logsumexp(-1).masked_fill(dead.squeeze(-1), -torch.inf)


def backward(d_p: Tensor, d_lse: Tensor | None, p: Tensor) -> Tensor:
    """d_s = p (d_p - sum(d_p p) + d_lse)."""
    acc = torch.promote_types(p.dtype, torch.float32)
    return (p.to(acc) * (d_p.to(acc) - _sums(d_p.to(acc), d_lse, p.to(acc)))).to(p.dtype)


def _sums(d_p: Tensor, d_lse: Tensor | None, p: Tensor) -> Tensor:
    sums = (d_p * p).sum(-1, keepdim=True)
    return sums if d_lse is None else sums - d_lse.unsqueeze(-1)


def _fake_fwd(s: Tensor, need_lse: bool) -> tuple[Tensor, Tensor]:
    acc = torch.promote_types(s.dtype, torch.float32)
    return s.new_empty(s.shape), s.new_empty(s.shape[:-1] if need_lse else 0, dtype=acc)


fwd = define(
    "attention_softmax_fwd",
    "(Tensor s, bool need_lse) -> (Tensor p, Tensor lse)",
    fake=_fake_fwd,
    spec=f"{HERE}:forward",
    launchers={
        "cuda": f"{HERE}:forward",
        "mps": "riftco.metal.attention_softmax:forward",
        "xla": f"{HERE}:forward",
    },
)
bwd = define(
    "attention_softmax_bwd",
    "(Tensor d_p, Tensor? d_lse, Tensor p) -> Tensor d_s",
    fake=lambda d_p, d_lse, p: p.new_empty(p.shape),
    spec=f"{HERE}:backward",
    launchers={
        "cuda": f"{HERE}:backward",
        "mps": "riftco.metal.attention_softmax:backward",
        "xla": f"{HERE}:backward",
    },
)


class MaskedSoftmax(Function):
    @staticmethod
    def forward(s, need_lse):
        return fwd(s, need_lse)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d_p, d_lse):
        p, lse = ctx.saved_tensors
        d_p = torch.zeros_like(p) if d_p is None else d_p
        if d_lse is not None:  # that of a row of -inf alone is no number that moves
            d_lse = d_lse.masked_fill(lse == -torch.inf, 0.0)
        return Gradient.apply(d_p, d_lse, p), None


class Gradient(Function):
    """Its own gradient is composed of PyTorch's operations."""

    @staticmethod
    def forward(d_p, d_lse, p):
        return bwd(d_p, d_lse, p)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, h):
        d_p, d_lse, p = ctx.saved_tensors
        along = (h * p).sum(-1, keepdim=True)
        to_lse = None if d_lse is None else along.squeeze(-1)
        return p * (h - along), to_lse, h * (d_p - _sums(d_p, d_lse, p)) - d_p * along


def masked_softmax(s: Tensor, need_lse: bool) -> tuple[Tensor, Tensor]:
    return MaskedSoftmax.apply(s, need_lse) if needs_grad(s) else fwd(s, need_lse)
