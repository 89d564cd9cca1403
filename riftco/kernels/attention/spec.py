"""What attention means, in plain torch.

B batch, T query length, S key length, H query heads, K key/value heads, G = H // K, D and Dv head dims. Packed
inputs have no B: documents lie one after another and cu_q, cu_k [documents + 1] hold their first rows; cu_k None is
cu_q.
Holds all B x H x T x S scores at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """q [B, T, H, D], k [B, S, K, D], v [B, S, K, Dv], or packed -> out [B, T, H, Dv], lse [B, H, T] (natural log)."""
    see = visible(q.shape[-3], k.shape[-3], cu_q, cu_k, causal, q.device)
    live = see.any(-1)
    k, v = _inside(k, cu_q, cu_k), _inside(v, cu_q, cu_k)
    s = _scores(_inside(q, cu_q), k, scale).masked_fill(~see, -torch.inf)
    lse = s.masked_fill(~live.unsqueeze(-1), 0.0).logsumexp(-1)  # rows that see no key stay finite for autograd
    p = (s - lse.unsqueeze(-1)).exp()
    out = torch.einsum("...kgts,...skd->...tkgd", p, v.to(p.dtype)).flatten(-3, -2)
    return out.to(q.dtype).contiguous(), lse.masked_fill(~live, -torch.inf).flatten(-3, -2)


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    causal: bool, scale: float | None, need_q: bool, need_k: bool, need_v: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """P = exp(scale q k^T - lse), dS = P (dO v^T - sum(dO O)): dq = scale dS k, dk = scale dS^T q, dv = P^T dO.

    A gradient that is not needed comes back with zero elements.
    """
    see = visible(q.shape[-3], k.shape[-3], cu_q, cu_k, causal, q.device)
    q_in, k_in, v_in = _inside(q, cu_q), _inside(k, cu_q, cu_k), _inside(v, cu_q, cu_k)
    s = _scores(q_in, k_in, scale)
    scale = softmax_scale(q, scale)
    log_sum = lse.unflatten(-2, (k.shape[-2], -1)).unsqueeze(-1)
    p = (s - log_sum.masked_fill(~see.any(-1).unsqueeze(-1), 0.0)).exp().masked_fill(~see, 0.0)
    g = _grouped(_inside(d_out, cu_q), k.shape[-2]).to(s.dtype)
    d_q, d_k, d_v = q.new_empty(0), k.new_empty(0), v.new_empty(0)
    if need_v:
        d_v = torch.einsum("...kgts,...tkgd->...skd", p, g).to(v.dtype).contiguous()
    if need_q or need_k:
        delta = (g * _grouped(out, k.shape[-2]).to(s.dtype)).sum(-1)  # [.., T, K, G]
        d_p = torch.einsum("...tkgd,...skd->...kgts", g, v_in.to(s.dtype))
        d_s = p * (d_p - delta.movedim(-3, -1).unsqueeze(-1)) * scale
        if need_q:
            d_q = torch.einsum("...kgts,...skd->...tkgd", d_s, k_in.to(s.dtype)).flatten(-3, -2).to(q.dtype)
        if need_k:
            x = _grouped(q_in, k.shape[-2]).to(s.dtype)
            d_k = torch.einsum("...kgts,...tkgd->...skd", d_s, x).to(k.dtype)
    return d_q.contiguous(), d_k.contiguous(), d_v


def key_range(
    T: int, S: int, cu_q: Tensor | None, cu_k: Tensor | None, causal: bool, device: torch.device,
    document_of: Callable[[Tensor, Tensor], Tensor] = lambda cu, row: torch.searchsorted(cu, row, right=True) - 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Query row i sees the keys lo[i] <= j < hi[i]; both [T]. Causal masks end at the bottom right of a document."""
    i = torch.arange(T, device=device)
    if cu_q is None:
        q_end, k_start, k_end = i.new_full((T,), T), torch.zeros_like(i), i.new_full((T,), S)
        inside = torch.ones_like(i, dtype=torch.bool)
    else:
        cu_q, cu_k = cu_q.long(), (cu_q if cu_k is None else cu_k).long()
        doc = document_of(cu_q, i)
        inside = (doc >= 0) & (doc < len(cu_q) - 1)
        doc = doc.clamp(0, len(cu_q) - 2)
        q_end, k_start, k_end = cu_q[doc + 1], cu_k[doc], cu_k[doc + 1].clamp(max=S)
    hi = k_end - (q_end - 1 - i) if causal else k_end
    return k_start.where(inside, 0), hi.maximum(k_start).where(inside, 0)


def visible(T: int, S: int, cu_q: Tensor | None, cu_k: Tensor | None, causal: bool, device: torch.device) -> Tensor:
    """[T, S], True where query row i sees key j."""
    lo, hi = key_range(T, S, cu_q, cu_k, causal, device)
    j = torch.arange(S, device=device)
    return (j >= lo.unsqueeze(-1)) & (j < hi.unsqueeze(-1))


def softmax_scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _grouped(x: Tensor, K: int) -> Tensor:
    """[.., H, D] -> [.., K, G, D]: query head h reads key/value head h // G."""
    return x.unflatten(-2, (K, x.shape[-2] // max(K, 1)))


def _scores(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    acc = torch.promote_types(q.dtype, torch.float32)
    s = torch.einsum("...tkgd,...skd->...kgts", _grouped(q, k.shape[-2]).to(acc), k.to(acc))
    return s * softmax_scale(q, scale)


def _inside(x: Tensor, cu_q: Tensor | None, cu_k: Tensor | None = None) -> Tensor:
    """Rows of no document become 0: whatever they hold, even NaN, must not reach a result."""
    cu = cu_q if cu_k is None else cu_k
    if cu is None:
        return x
    row = torch.arange(x.shape[0], device=x.device)
    return x.masked_fill(((row < cu[0]) | (row >= cu[-1]))[:, None, None], 0.0)
