"""PyTorch's attention functions on `attention`. No logic of their own beyond layouts and names.

B batch, T query length, S key length, H query heads, K key/value heads, D and Dv head dims.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .._arguments import flags, floating, given
from .op import attention
from .rows import packed_rows


class AuxRequest(NamedTuple):
    """torch.nn.attention.varlen.AuxRequest's twin: what varlen_attn returns beside its output."""

    lse: bool = False


class Aux(Protocol):
    """Anything with an `lse` flag: PyTorch's AuxRequest or this file's."""

    @property
    def lse(self) -> bool: ...


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

    Args:
        query: [..., H, T, D], with no H at all [T, D]; float16/bfloat16/float32/float64. Differentiable.
        key: [..., K, S, D]. Differentiable. Leading dimensions broadcast, heads among them.
        value: [..., K, S, Dv]. Differentiable.
        attn_mask: broadcastable to [..., H, T, S]: bool, False hides a key, or floating, added to the scaled scores,
            -inf allowed. Read where it lies: a mask for all heads or batches is never expanded. Differentiable if
            floating. torch.nn.attention.bias' causal_upper_left and causal_lower_right cost no mask.
        dropout_p: applied whatever the mode of any module, as in PyTorch; below 1. The mask is a function of torch's
            seed and of (batch, head, row, key): see `attention`.
        is_causal: row t sees the keys s <= t: aligned at the top left, also where T != S, as PyTorch defines it.
            (`attention` and flash-attn align at the bottom right.)
        scale: default D ** -0.5.
        enable_gqa: K may be any divisor of H: query head h reads key head h // (H // K).

    Returns:
        [..., H, T, Dv] in query's dtype, a transposed view of [B, T, H, Dv]. A row that sees no key gives 0.

    Raises:
        ValueError: attn_mask together with is_causal; shapes, dtypes or options that do not fit, each named.

    See `attention` for devices, autocast and numerics.
    """
    name = "scaled_dot_product_attention"
    flags(name, is_causal=is_causal, enable_gqa=enable_gqa)
    if not (floating(query) and floating(key) and floating(value)):
        raise ValueError(f"{name}: query, key, value must be floating; got {given(query, key, value)}")
    masks = isinstance(attn_mask, Tensor) and attn_mask.dtype == torch.bool
    if attn_mask is not None and not masks and not floating(attn_mask):
        raise ValueError(f"{name}: attn_mask must be bool or floating; got {given(attn_mask)}")
    if attn_mask is not None and is_causal:
        raise ValueError(f"{name}: attn_mask and is_causal cannot be combined; put the causal mask into attn_mask")
    shapes = f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError(f"{name}: query, key, value must be [..., heads, length, head dim]; got {shapes}")
    q, k, v = (t.unsqueeze(0) if t.dim() == 2 else t for t in (query, key, value))
    try:
        lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except RuntimeError:
        raise ValueError(f"{name}: the leading dimensions of query, key, value do not fit: {shapes}") from None
    if 1 in (k.shape[-3], v.shape[-3]):
        K = max(k.shape[-3], v.shape[-3])
        k, v = (t if t.shape[-3] == K else t.expand(*t.shape[:-3], K, -1, -1) for t in (k, v))
    H, K, T, S = q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2]
    if H != K and not enable_gqa:
        if H == 1:
            q, H = q.expand(*q.shape[:-3], K, -1, -1), K
        elif K != 1:
            raise ValueError(f"{name}: {H} query heads and {K} key heads need enable_gqa=True; got {shapes}")
    q, k, v = (_heads_last(t, lead) for t in (q, k, v))
    diagonal = 0 if is_causal else None  # row t sees the keys s <= t + diagonal
    if attn_mask is not None and type(attn_mask) is not Tensor:
        attn_mask, diagonal = _causal_bias(attn_mask, T, S)
    window: tuple[None, int | None] = (None, None)
    if diagonal is not None and diagonal < S - T:  # no row sees the keys beyond the last row's
        k, v, window = k[:, : T + diagonal], v[:, : T + diagonal], (None, 0)
    elif diagonal is not None:
        window = (None, diagonal - (S - T))
    bias = None if attn_mask is None else _bias(attn_mask, lead, H, T, S)
    out = attention(q, k, v, bias=bias, window=window, dropout_p=dropout_p, scale=scale)
    assert isinstance(out, Tensor)  # a pair only with return_lse
    flat = query.dim() == key.dim() == value.dim() == 2
    return out.transpose(1, 2).reshape(*lead, *(() if flat else (H,)), T, v.shape[-1])


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Aux | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """torch.nn.attention.varlen.varlen_attn's twin (torch 2.13's signature), on every device and in every dtype.

    Args:
        query: [total, H, D], documents one after another. Differentiable.
        key: [total_k, K, D]; with block_table pages [pages, rows of a page, K, D]. Differentiable, pages too (in
            PyTorch seqused_k and block_table are for inference).
        value: [total_k, K, Dv] or pages. Differentiable.
        cu_seq_q: int32 or int64 [N + 1]: document n is the rows cu[n] to cu[n + 1].
        cu_seq_k: the same for key and value; None is allowed with seqused_k and block_table.
        max_q: the longest document; RIFTCO_CHECK=1 checks it.
        max_k: the longest document of keys; with seqused_k or block_table at least the most keys of one document.
        return_aux: an object with a flag `lse`, as AuxRequest: also return the log-sum-exp.
        scale: default D ** -0.5.
        window_size: (left, right), -1 for no limit, aligned at the bottom right; (-1, 0) is causal.
        enable_gqa: K may be any divisor of H.
        seqused_k: int32 or int64 [N]: only the first keys of each document exist; masks end there.
        block_table: int32 or int64 [N, pages a document], needs seqused_k: where each document's pages lie.
        num_splits: accepted for the signature's sake: no kernel splits keys here.

    Returns:
        out [total, H, Dv]; with return_aux.lse (out, lse [H, total] float32). Both differentiable.

    Raises:
        ValueError: shapes, dtypes or options that do not fit, each named.

    seqused_k and block_table copy the rows in use, once a call, to at most N x max_k rows. See `attention`.
    """
    flags("varlen_attn", enable_gqa=enable_gqa)
    if not (floating(query) and floating(key) and floating(value)) or min(query.dim(), key.dim()) < 3:
        raise ValueError(
            f"varlen_attn: query, key, value must be floating [total, heads, D]; got {given(query, key, value)}"
        )
    H, K = query.shape[-2], key.shape[-2]
    if H != K and not enable_gqa:
        raise ValueError(f"varlen_attn: {H} query heads and {K} key heads need enable_gqa=True")
    if block_table is not None and seqused_k is None:
        raise ValueError("varlen_attn: block_table needs seqused_k")
    if cu_seq_k is None and block_table is None:
        raise ValueError("varlen_attn: cu_seq_k may be None only with seqused_k and block_table")
    if seqused_k is not None:
        key, value, cu_seq_k = packed_rows(key, value, cu_seq_k, seqused_k, block_table, max_k)
    out = attention(
        query, key, value, scale=scale, window=window_size, cu_seqlens_q=cu_seq_q, cu_seqlens_k=cu_seq_k,
        max_seqlen_q=max_q, max_seqlen_k=max_k, return_lse=True,
    )  # fmt: skip
    assert isinstance(out, tuple)
    return out if return_aux is not None and return_aux.lse else out[0]


def _causal_bias(mask: Tensor, T: int, S: int) -> tuple[Tensor | None, int | None]:
    """(mask, None), or (None, diagonal) of PyTorch's CausalBias, a tensor without elements of its own."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(mask, CausalBias):
        return mask, None
    if (mask.seq_len_q, mask.seq_len_kv) != (T, S):
        raise ValueError(
            f"scaled_dot_product_attention: attn_mask is a causal bias of {mask.seq_len_q} x {mask.seq_len_kv}; "
            f"the scores are {T} x {S}"
        )
    return None, 0 if mask.variant == CausalVariant.UPPER_LEFT else S - T


def _heads_last(t: Tensor, lead: torch.Size) -> Tensor:
    """[..., H, T, D] -> [B, T, H, D], B the product of lead."""
    return t.expand(*lead, *t.shape[-3:]).reshape(lead.numel(), *t.shape[-3:]).transpose(1, 2)


def _bias(mask: Tensor, lead: torch.Size, H: int, T: int, S: int) -> Tensor:
    """[..., H, T, S], any of them 1 or missing -> 4 dimensions, the first of them 1 or B.

    A copy only where some of several leading dimensions are expanded.
    """
    full = (*lead, H, T, S)
    shape = (1,) * (len(full) - mask.dim()) + tuple(mask.shape)
    if len(shape) > len(full) or any(m not in (1, f) for m, f in zip(shape, full)):
        raise ValueError(
            f"scaled_dot_product_attention: attn_mask must broadcast to {list(full)}; got {list(mask.shape)}"
        )
    mask = mask.reshape(shape)
    if any(size != 1 for size in shape[:-3]):
        mask = mask.expand(*lead, *shape[-3:])
    return mask.reshape(mask.shape[:-3].numel(), *shape[-3:])
