"""What attention means, in plain torch.

B batch, T query length, S key length, H query heads, K key/value heads, G = H // K, D and Dv head dims. Packed
inputs have no B: documents lie one after another and cu_q, cu_k [documents + 1] hold their first rows; cu_k None is
cu_q. Holds all B x H x T x S scores at once.

Scores: s = scale q k^T, then softcap tanh(s / softcap), then + bias; a sink is one more score of a row, without value.
"""

import torch
from torch import Tensor

from .._sinks import sink_gradient, to_sink
from . import philox

HIDDEN = -(2.0**100)  # a bias this low hides its key like -inf: lse could not tell such scores from their sum


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None,
    right: int | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [B, T, H, D], k [B, S, K, D], v [B, S, K, Dv], or packed -> out [B, T, H, Dv], lse [B, H, T] (natural log)."""
    see = visible(q, k, cu_q, cu_k, k_lens, left, right)
    k, v = existing(k, cu_q, cu_k, k_lens), existing(v, cu_q, cu_k, k_lens)
    s = _scores(existing(q, cu_q), k, scale, softcap)
    s = masked(s, see, bias)
    if sinks is not None:
        s = torch.cat([s, sink_scores(sinks, s, cu_q)], -1)
    live = (s.detach() != -torch.inf).any(-1)
    lse = s.masked_fill(~live.unsqueeze(-1), 0.0).logsumexp(-1)  # rows that see no key stay finite for autograd
    p = (s[..., : k.shape[-3]] - lse.unsqueeze(-1)).exp()
    if seed is not None:
        p = p * keep_mask(p, seed, dropout_p)
    out = torch.einsum("...kgts,...skd->...tkgd", p, v.to(p.dtype)).flatten(-3, -2)
    return out.to(q.dtype).contiguous(), lse.masked_fill(~live, -torch.inf).flatten(-3, -2)


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float, dropout_p: float,
    kv_grad_start: int, deterministic: bool, need_q: bool, need_k: bool, need_v: bool, need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """P = exp(s - lse), delta = sum(dO O) - d_lse, dS = P (dO v^T - delta): dq = scale dS k, dk = scale dS^T q,
    dv = P^T dO, d_bias = dS, d_sinks = -exp(sink - lse) delta. A softcap multiplies dS by 1 - tanh^2 on its way to q
    and k; dropout multiplies P in dv and dO v^T by its mask.

    Returns d_q, d_k, d_v (key rows from kv_grad_start on), d_bias, d_sinks, delta [.., H, T] and the exponent of the
    power of two by which float16 kernels multiply dO [documents, H]. What is not needed has zero elements.
    """
    K = k.shape[-2]
    see = visible(q, k, cu_q, cu_k, k_lens, left, right)
    q_in, k_in, v_in = existing(q, cu_q), existing(k, cu_q, cu_k, k_lens), existing(v, cu_q, cu_k, k_lens)
    raw = _scores(q_in, k_in, scale, softcap)
    s = masked(raw, see, bias)
    log_sum = lse.unflatten(-2, (K, -1)).unsqueeze(-1)
    live = log_sum != -torch.inf
    p = torch.where(live, (s - log_sum.masked_fill(~live, 0.0)).exp(), 0.0)
    g = _grouped(existing(d_out, cu_q), K).to(s.dtype)
    delta = (g * _grouped(existing(out, cu_q), K).to(s.dtype)).sum(-1).movedim(-3, -1)  # [.., K, G, T]
    if d_lse is not None:
        delta = delta - d_lse.unflatten(-2, (K, -1)).to(s.dtype).masked_fill(~live.squeeze(-1), 0.0)
    kept = keep_mask(p, seed, dropout_p) if seed is not None else 1.0
    d_q, d_k, d_v = q.new_empty(0), k.new_empty(0), v.new_empty(0)
    d_bias, d_sinks = q.new_empty(0), q.new_empty(0)
    if need_v:
        d_v = torch.einsum("...kgts,...tkgd->...skd", p * kept, g)[..., kv_grad_start:, :, :].to(v.dtype)
    if need_q or need_k or need_bias:
        d_s = p * (torch.einsum("...tkgd,...skd->...kgts", g, v_in.to(s.dtype)) * kept - delta.unsqueeze(-1))
        if bias is not None and need_bias:
            d_bias = d_s.flatten(-4, -3).sum_to_size(bias.shape).to(bias.dtype)
        d_s = d_s * softmax_scale(q, scale)
        if softcap:
            d_s = d_s * (1 - (raw / softcap) ** 2)
        if need_q:
            d_q = torch.einsum("...kgts,...skd->...tkgd", d_s, k_in.to(s.dtype)).flatten(-3, -2).to(q.dtype)
        if need_k:
            x = _grouped(q_in, K).to(s.dtype)
            d_k = torch.einsum("...kgts,...tkgd->...skd", d_s, x)[..., kv_grad_start:, :, :].to(k.dtype)
    delta = delta.flatten(-3, -2)
    if sinks is not None and need_sinks:
        d_sinks = sink_gradient(sinks, lse, delta)
    exponent = dout_exponent(d_out, cu_q) if q.dtype == torch.float16 else q.new_empty(0, dtype=torch.int32)
    return d_q.contiguous(), d_k.contiguous(), d_v.contiguous(), d_bias.contiguous(), d_sinks, delta, exponent


def starts_before(cu: Tensor, row: Tensor) -> Tensor:
    """The document that holds each row: how many start up to it, less one. cu ascending, row int64."""
    if cu.device.type == "xla":  # torch_xla leaves searchsorted to the CPU: by counting starts
        return (cu <= row.unsqueeze(-1)).sum(-1) - 1
    return torch.searchsorted(cu, row, right=True) - 1


def key_range(
    T: int, S: int, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, left: int | None,
    right: int | None, device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Query row i sees the keys lo[i] <= j < hi[i]; both [T], with k_lens [B, T].

    A row is as far from the end of its document's keys as from the end of its rows; the window is around that place.
    """
    i = torch.arange(T, device=device)
    inside = torch.ones_like(i, dtype=torch.bool)
    if cu_q is None:
        k_start, q_end = torch.zeros_like(i), i.new_full((T,), T)
        k_end = i.new_full((T,), S) if k_lens is None else k_lens.long().clamp(0, S).unsqueeze(-1).expand(-1, T)
    else:
        cu_q, cu_k = cu_q.long().contiguous(), (cu_q if cu_k is None else cu_k).long()
        doc = starts_before(cu_q, i)
        inside = (doc >= 0) & (doc < len(cu_q) - 1)
        doc = doc.clamp(0, len(cu_q) - 2)
        q_end, k_start, k_end = cu_q[doc + 1], cu_k[doc], cu_k[doc + 1].clamp(max=S)
    place = k_end - (q_end - i)
    lo = k_start.expand(k_end.shape) if left is None else k_start.maximum(place - left)
    hi = k_end if right is None else k_end.minimum(place + right + 1)
    return lo.where(inside, 0), hi.maximum(lo).where(inside, 0)


def visible(
    q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, left: int | None,
    right: int | None,
) -> Tensor:  # fmt: skip
    """[T, S] or, with k_lens, [B, 1, 1, T, S]: True where a query row sees a key."""
    T, S = q.shape[-3], k.shape[-3]
    lo, hi = key_range(T, S, cu_q, cu_k, k_lens, left, right, q.device)
    j = torch.arange(S, device=q.device)
    see = (j >= lo.unsqueeze(-1)) & (j < hi.unsqueeze(-1))
    return see if k_lens is None else see[:, None, None]


def softmax_scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def row_bias_gradient(bias: Tensor, sinks: Tensor | None, lse: Tensor, delta: Tensor, d_lse: Tensor | None) -> Tensor:
    """Gradient of a bias [1 or B, 1 or H, 1 or T, 1]; lse, delta, d_lse [B, H, T].

    One number for all keys of a row moves nothing between them: what is left of it goes to the sink and to lse. A sum
    of the scores' gradients would find this as a small difference of large numbers, of which D is rounded.
    """
    rows = torch.zeros_like(lse) if sinks is None else to_sink(sinks, lse, delta)
    rows = rows if d_lse is None else rows + d_lse.masked_fill(lse == -torch.inf, 0.0)
    return rows.unsqueeze(-1).sum_to_size(bias.shape).to(bias.dtype)


def dout_exponent(d_out: Tensor, cu_q: Tensor | None) -> Tensor:
    """int32 [documents, H]: 2 ** exponent brings the largest |dO| of a document and head into [4, 8)."""
    largest = (
        d_out.detach().float().abs().nan_to_num(0.0, 0.0, 0.0).amax(-1) if d_out.numel() else d_out.float().sum(-1)
    )
    if cu_q is None:
        largest = largest.amax(-2) if largest.shape[-2] else largest.new_zeros(d_out.shape[0], d_out.shape[-2])
    else:
        docs, i = len(cu_q) - 1, torch.arange(len(largest), device=cu_q.device)
        doc = starts_before(cu_q.long().contiguous(), i)
        doc = torch.where((doc >= 0) & (doc < docs), doc, docs)  # rows of no document go where nobody looks
        largest = largest.new_zeros(docs + 1, largest.shape[-1]).scatter_reduce(
            0, doc.unsqueeze(-1).expand_as(largest), largest, "amax"
        )[:docs]
    bit = torch.arange(62, device=largest.device)  # frexp by counting powers of two from float16's least on, as no
    powers = torch.ones_like(bit) << bit  # device but CPU and CUDA has frexp
    exponent = 27 - (largest.unsqueeze(-1) * 2.0**24 >= powers).sum(-1)
    return exponent.masked_fill(largest == 0, 0).to(torch.int32)


def _grouped(x: Tensor, K: int) -> Tensor:
    """[.., H, D] -> [.., K, G, D]: query head h reads key/value head h // G."""
    return x.unflatten(-2, (K, x.shape[-2] // max(K, 1)))


def _scores(q: Tensor, k: Tensor, scale: float | None, softcap: float) -> Tensor:
    acc = torch.promote_types(q.dtype, torch.float32)
    s = torch.einsum("...tkgd,...skd->...kgts", _grouped(q, k.shape[-2]).to(acc), k.to(acc))
    s = s * softmax_scale(q, scale)
    return softcap * torch.tanh(s / softcap) if softcap else s


def masked(s: Tensor, see: Tensor, bias: Tensor | None) -> Tensor:
    """s [.., K, G, T, S] with the bias added and -inf where a row does not see a key."""
    if bias is not None:
        B, K, G, T, S = s.shape
        bias = bias.expand(B, K * G, T, S).unflatten(1, (K, G))
        if bias.dtype == torch.bool:
            see = see & bias
        else:
            s = s + without_lowest(bias).to(s.dtype)
    return s.masked_fill(~see, -torch.inf)


def without_lowest(bias: Tensor) -> Tensor:
    """A floating bias with -inf for values that only mean to hide, such as torch.finfo's lowest."""
    return bias.masked_fill(bias <= HIDDEN, -torch.inf)


def sink_scores(sinks: Tensor, s: Tensor, cu_q: Tensor | None) -> Tensor:
    """[.., K, G, T, 1]: the sink of each row; rows of no document have none."""
    column = sinks.to(s.dtype).view(s.shape[-4], s.shape[-3], 1, 1).expand(*s.shape[:-1], 1)
    found = exist(s.shape[-2], cu_q)
    return column if found is None else column.masked_fill(~found.unsqueeze(-1), -torch.inf)


def keep_mask(p: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
    """p's dropout mask over 1 - dropout_p: 0 where a probability is dropped."""
    *lead, K, G, T, S = p.shape
    heads = torch.arange(p.shape[:-2].numel(), device=p.device).view(*lead, K, G, 1, 1)
    rows, keys = torch.arange(T, device=p.device).view(-1, 1), torch.arange(S, device=p.device)
    return philox.keep(seed, heads, rows, keys, dropout_p).to(p.dtype) / (1 - dropout_p)


def exist(rows: int, cu: Tensor | None, lengths: Tensor | None = None) -> Tensor | None:
    """Which of so many rows a document holds, bool [rows], or are within `lengths`, [B, rows]; None: all."""
    if lengths is not None:
        return torch.arange(rows, device=lengths.device) < lengths.unsqueeze(-1)
    if cu is None:
        return None
    row = torch.arange(rows, device=cu.device)
    return (row >= cu[0]) & (row < cu[-1])


def existing(x: Tensor, cu_q: Tensor | None, cu_k: Tensor | None = None, k_lens: Tensor | None = None) -> Tensor:
    """Rows of no document and keys beyond k_lens become 0: whatever they hold, even NaN, must not reach a result."""
    found = exist(x.shape[-3], cu_q if cu_k is None else cu_k, k_lens)
    return x if found is None else x.masked_fill(~found[..., None, None], 0.0)
