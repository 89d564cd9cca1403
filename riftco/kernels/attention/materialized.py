"""The materialised route: matmul, masked softmax, matmul, under autograd. It holds all T x S scores of every head and
keeps their probabilities for the backward, [B, H, T, S] float32 where the flash route keeps [B, H, T].

In packed inputs every row's scores reach over all documents, so that memory grows with the square of their sum.
"""

import torch
from torch import Tensor

from . import spec
from .masked_softmax import masked_softmax


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None,
    right: int | None, softcap: float, dropout_p: float, return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Shapes and meaning as spec.forward; differentiable, twice too. lse is empty unless asked for."""
    see = spec.visible(q, k, cu_q, cu_k, k_lens, left, right)
    x, keys, values = (
        _heads_first(spec.existing(t, *which), k.shape[-2])
        for t, which in ((q, (cu_q,)), (k, (cu_q, cu_k, k_lens)), (v, (cu_q, cu_k, k_lens)))
    )
    s = (x * spec.softmax_scale(q, scale)) @ keys.mT  # [.., K, G, T, S]
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = spec.masked(s, see, bias)
    if sinks is not None:
        s = torch.cat([s, spec.sink_scores(sinks, s, cu_q)], -1)
    p, lse = masked_softmax(s, return_lse)
    p = p[..., : k.shape[-3]]
    if seed is not None:
        p = p * spec.keep_mask(p, seed, dropout_p)
    out = (p @ values).flatten(-4, -3).transpose(-3, -2)
    return out.to(q.dtype).contiguous(), lse.flatten(-3, -2) if return_lse else lse


def _heads_first(t: Tensor, K: int) -> Tensor:
    """[.., T, H, D] -> [.., K, G, T, D] in float32 (float64 stays)."""
    t = t.to(torch.promote_types(t.dtype, torch.float32))
    return t.unflatten(-2, (K, t.shape[-2] // max(K, 1))).movedim(-4, -2)
