"""The contract of attention: schemas, shapes, devices, gradient. Torch-only; imports no kernel.

B batch, T query length, S key length, H query heads, K key/value heads, D and Dv head dims.
"""

import itertools

import torch
from torch import Tensor

from .._contract import checks_enabled, define, needs_grad, once_differentiable, same_device
from . import spec

HERE = "riftco.kernels.attention"


def _fake_fwd(q, k, v, cu_q, cu_k, causal, scale):
    acc = torch.promote_types(q.dtype, torch.float32)
    *lead, T, H, _ = q.shape
    return q.new_empty((*lead, T, H, v.shape[-1])), q.new_empty((*lead, H, T), dtype=acc)


def _fake_bwd(d_out, q, k, v, out, lse, cu_q, cu_k, causal, scale, need_q, need_k, need_v):
    return tuple(t.new_empty(t.shape if need else 0) for t, need in ((q, need_q), (k, need_k), (v, need_v)))


fwd = define(
    "attention_fwd",
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_q, Tensor? cu_k, bool causal, float? scale) -> (Tensor out, Tensor lse)",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers={
        "cpu": f"{HERE}.cpu:forward",
        "cuda": f"{HERE}.cuda:forward",
        "mps": f"{HERE}.spec:forward",
        "xla": "riftco.tpu.attention:forward",
    },
)
bwd = define(
    "attention_bwd",
    "(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? cu_q, Tensor? cu_k, bool causal, "
    "float? scale, bool need_q, bool need_k, bool need_v) -> (Tensor d_q, Tensor d_k, Tensor d_v)",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers={
        "cpu": f"{HERE}.cpu:backward",
        "cuda": f"{HERE}.cuda:backward",
        "mps": f"{HERE}.spec:backward",
        "xla": "riftco.tpu.attention:backward",
    },
)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, cu_q, cu_k, causal, scale):
        return fwd(q, k, v, cu_q, cu_k, causal, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, cu_q, cu_k, ctx.causal, ctx.scale = inputs
        out, lse = output
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
        ctx.mark_non_differentiable(lse)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, _d_lse):
        need = ctx.needs_input_grad[:3]
        grads = bwd(d_out, *ctx.saved_tensors, ctx.causal, ctx.scale, *need)
        return *(g if n else None for g, n in zip(grads, need)), None, None, None, None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention that never holds a T x S matrix (but for float64, which runs the spec).

    out[t, h] = sum_s softmax_s(scale * q[t, h] . k[s, h // G])  v[s, h // G], with G = H // K query heads a key head.

    Args:
        q: [B, T, H, D], or packed [total, H, D] with cu_seqlens_q; float16/bfloat16/float32/float64, any strides
            (head dim contiguous is fastest). Differentiable.
        k: [B, S, K, D] or packed [total_k, K, D], H % K == 0. Differentiable.
        v: [B, S, K, Dv] or packed [total_k, K, Dv]. Differentiable.
        causal: query row t of a sequence sees the keys s <= t + S - T (aligned at the bottom right). A row that sees
            no key gives 0, lse -inf and zero gradients.
        scale: default D ** -0.5.
        cu_seqlens_q: [documents + 1], int32 or int64, ascending from 0: document n is the rows cu[n] to cu[n + 1].
            Empty documents are fine; rows from cu[-1] on give exactly 0, output and gradients, whatever they hold.
        cu_seqlens_k: the same for k and v; default cu_seqlens_q.
        max_seqlen_q: longest document, as callers of flash-attn have it; only RIFTCO_CHECK=1 reads it: the kernels
            find documents by cu_seqlens alone.
        max_seqlen_k: the same for k.
        return_lse: also return the log-sum-exp of the scaled scores, [B, H, T] or packed [H, total], float32
            (float64 for float64), not differentiable.
        impl: "spec" runs the plain-torch meaning under autograd (double backward works; holds T x S scores).

    Returns:
        out [B, T, H, Dv] or [total, H, Dv] in q's dtype; with return_lse (out, lse).

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named; with RIFTCO_CHECK=1 also
            cu_seqlens that do not ascend from 0 to at most the number of rows, or a document above max_seqlen.

    Under autocast q, k, v are cast to its dtype, as PyTorch does.
    Devices: cpu and xla (blocked), cuda (Triton), mps (plain torch, holds T x S scores).
    Numerics: float32 accumulation and softmax; P and dS are rounded once to 16 bit on CUDA for 16-bit inputs; in
    float16 dO is brought into range by a power of two a document and head, undone exactly. No atomics: equal between
    runs. A NaN in one document can reach other documents that share a tile of rows with it.
    Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2; Milakov & Gimelshein 2018 for the online softmax.
    """
    q, k, v = _autocast(q, k, v)
    if cu_seqlens_k is cu_seqlens_q:
        cu_seqlens_k = None  # Dynamo takes a tensor once; launchers read None as cu_seqlens_q
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, impl)
    if checks_enabled():
        check_documents("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)
        cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        check_documents("cu_seqlens_k", cu_k, k.shape[0], max_seqlen_k)
    args = (q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale)
    if impl == "spec":
        out, lse = spec.forward(*args)
        lse = lse.detach()
    elif needs_grad(q, k, v):
        out, lse = Attention.apply(*args)
    else:
        out, lse = fwd(*args)
    return (out, lse) if return_lse else out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention's twin.

    query [..., H, T, D], key [..., K, S, D], value [..., K, S, Dv]. `is_causal` is aligned at the top left, as PyTorch
    defines it (row t sees the keys s <= t). The result is a transposed view of [B, T, H, Dv]. See `attention` for
    devices and numerics.

    Raises:
        NotImplementedError: attn_mask or dropout_p, each by name.
        ValueError: shapes that do not fit; K != H without enable_gqa.
    """
    if attn_mask is not None:
        raise NotImplementedError("scaled_dot_product_attention: attn_mask is not supported; see is_causal")
    if dropout_p != 0.0:
        raise NotImplementedError(f"scaled_dot_product_attention: dropout_p must be 0.0; got {dropout_p}")
    if min(query.dim(), key.dim(), value.dim()) < 2 or not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            "scaled_dot_product_attention: query, key, value must be [..., heads, length, head dim] with equal leading "
            f"dimensions; got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    q, k, v = (_heads_last(t) for t in (query, key, value))
    if q.shape[2] != k.shape[2] and not enable_gqa:
        raise ValueError(
            f"scaled_dot_product_attention: {q.shape[2]} query heads and {k.shape[2]} key heads need enable_gqa=True"
        )
    T, S = q.shape[1], k.shape[1]
    if is_causal and T > S:  # rows past the square see every key
        square = attention(q[:, :S], k, v, causal=True, scale=scale)
        out = torch.cat([square, attention(q[:, S:], k, v, scale=scale)], 1)  # type: ignore[list-item]
    elif is_causal:
        out = attention(q, k[:, :T], v[:, :T], causal=True, scale=scale)  # type: ignore[assignment]
    else:
        out = attention(q, k, v, scale=scale)  # type: ignore[assignment]
    return out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])


def _heads_last(t: Tensor) -> Tensor:
    """[..., H, T, D] (H may be missing) -> [B, T, H, D]."""
    t = t.unsqueeze(0) if t.dim() == 2 else t
    return t.reshape(t.shape[:-3].numel(), *t.shape[-3:]).transpose(1, 2)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def check_documents(name: str, cu: Tensor | None, rows: int, longest: int | None) -> None:
    """ValueError where cu_seqlens cannot be what it says, as RIFTCO_CHECK=1 asks. Costs a synchronisation."""
    if cu is None:
        return
    starts = cu.tolist()
    if starts[0] != 0 or any(a > b for a, b in itertools.pairwise(starts)) or starts[-1] > rows:
        raise ValueError(f"attention: {name} must ascend from 0 to at most {rows} rows; got {starts}")
    found = max(b - a for a, b in itertools.pairwise(starts))
    if longest is not None and found > longest:
        raise ValueError(f"attention: {name} holds a document of {found} rows, above max_seqlen {longest}")


def _check(q, k, v, cu_q, cu_k, impl) -> None:
    dims = 4 if cu_q is None else 3
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == dims:
        wanted = "[B, T, heads, head dim]" if dims == 4 else "[total, heads, head dim] with cu_seqlens"
        raise ValueError(f"attention: q, k, v must be {wanted}; got {shapes}")
    if cu_q is None and cu_k is not None:
        raise ValueError("attention: cu_seqlens_k needs cu_seqlens_q")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"attention: q, k, v must share a floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if dims == 4 and not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"attention: batch sizes differ: {shapes}")
    if k.shape[-3] != v.shape[-3] or k.shape[-2] != v.shape[-2]:
        raise ValueError(f"attention: k and v must have the same length and heads; got {shapes}")
    if q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        raise ValueError(f"attention: q and k must have the same head dim, at least 1; got {shapes}")
    H, K = q.shape[-2], k.shape[-2]
    if K == 0 or H % K:
        raise ValueError(f"attention: query heads must be a multiple of key heads; got {H} and {K}")
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu is not None and (cu.dtype not in (torch.int32, torch.int64) or cu.dim() != 1 or len(cu) < 2):
            raise ValueError(
                f"attention: {name} must be int32 or int64 [documents + 1]; got {cu.dtype} {tuple(cu.shape)}"
            )
    if cu_q is not None and cu_k is not None and len(cu_q) != len(cu_k):
        raise ValueError(f"attention: cu_seqlens_q and cu_seqlens_k differ in length: {len(cu_q)} and {len(cu_k)}")
    if impl not in (None, "spec"):
        raise ValueError(f"attention: impl must be None or 'spec'; got {impl!r}")
    same_device("attention", q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
