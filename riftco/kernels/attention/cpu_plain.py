"""Plain float32 attention on the CPU: PyTorch's own flash kernel, where nothing is asked of it that it does not know.

It is one call where cpu.py makes some twenty per block, and as exact in float32; in bfloat16 its dK and dV are not.
"""

import torch
from torch import Tensor

MOST = 128  # head dims above which cpu.py's matmuls are as fast
LEAST = torch.finfo(torch.float32).tiny
_aten = torch.ops.aten


def why_not(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, left: int | None, right: int | None,
    *others: Tensor | float | None,
) -> str:  # fmt: skip
    """ "" where PyTorch's kernel computes the call; else what it does not know. others: options that must be unset."""
    if any(o is not None and not (isinstance(o, float) and o == 0.0) for o in others):
        return "only plain calls"
    if q.dtype != torch.float32 or q.shape[-1] != v.shape[-1] or q.shape[-1] > MOST:
        return f"only float32 with equal head dims up to {MOST}"
    if q.dim() != 4 or 0 in q.shape or 0 in k.shape:
        return "only batches that are not empty"
    T, S = q.shape[1], k.shape[1]
    if (left is not None and left < S - 1) or not (right is None or right >= T - 1 or (right == 0 and T == S)):
        return "only full or causal attention, the latter of as many rows as keys"
    if scale is not None and _causal(q, k, right) and not scale > LEAST:
        return "only positive scales of causal scores: it multiplies by them what it has hidden with -inf"
    return ""


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, right: int | None) -> tuple[Tensor, Tensor]:
    """out [B, T, H, D] and lse [B, H, T]; scale: of the scores."""
    heads = (_heads(t, q.shape[-2]) for t in (q, k, v))
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, _causal(q, k, right), scale=scale)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def lost(out: Tensor, lse: Tensor) -> bool:
    """Whether a row has no number among its scores: all NaN or all -inf, PyTorch may make it 0 with lse 0."""
    return not lse.all() and bool(((lse == 0) & ~out.any(-1).transpose(1, 2)).any())


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    right: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """d_q, d_k, d_v and delta [B, H, T]."""
    H, K = q.shape[-2], k.shape[-2]
    g, x, keys, values, o = (_heads(t, H) for t in (d_out, q, k, v, out))
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, x, keys, values, o, lse, 0.0, _causal(q, k, right), scale=scale
    )
    d_q, d_k, d_v = (t.transpose(1, 2) for t in grads)
    if H != K:
        d_k, d_v = (t.unflatten(2, (K, H // K)).sum(3) for t in (d_k, d_v))
    delta = (d_out * out).sum(-1).transpose(1, 2).contiguous()
    return d_q.contiguous(), d_k.contiguous(), d_v.contiguous(), delta


def _causal(q: Tensor, k: Tensor, right: int | None) -> bool:
    return right == 0 and q.shape[1] == k.shape[1]  # a last row alone sees every key


def _heads(t: Tensor, H: int) -> Tensor:
    """[B, T, K, D] as [B, H, T, D] with elements of a row side by side; query head h reads key head h // (H // K).

    Rows one element apart, as of `unfold`, are copied: PyTorch would lay its result out as they are, and write past it.
    """
    t = t if t.stride(-1) == 1 and 1 not in t.stride()[:-1] else t.contiguous()
    t = t if t.shape[2] == H else t.repeat_interleave(H // t.shape[2], 2)
    return t.transpose(1, 2)
