"""riftco's attention as an `attn_implementation` of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ...functional import attention as riftco_attention
from .masks import Mask, mask

NAME = "riftco"


def register() -> None:
    """Add `attn_implementation="riftco"` to transformers: the attention and its masks. May be called again.

    Afterwards `from_pretrained(..., attn_implementation="riftco")` and `model.set_attn_implementation("riftco")` work
    for every model that goes through transformers' AttentionInterface; `riftco.patch` does this and more.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """AttentionInterface's function for "riftco": query [B, H, T, D], key and value [B, K, S, D] -> [B, T, H, D].

    Raises:
        ValueError: what it cannot serve, by name: the weights of attention, a 2-D mask, causal queries of which no
            mask says where among the keys they stand, a position bias over packed documents.
    """
    if kwargs.get("output_attentions"):
        raise ValueError('riftco attention never holds its weights; for output_attentions take "eager"')
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    T, S = q.shape[1], k.shape[1]
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "dropout_p": dropout}
    if isinstance(attention_mask, Tensor):  # a caller's own: it says all there is to say, windows too
        if attention_mask.dim() != 4:
            raise ValueError(f"riftco attention: a mask must be [B, 1 or H, T, S]; got {list(attention_mask.shape)}")
        out: Any = riftco_attention(q, k, v, bias=_joined(attention_mask, position_bias), **options)
        return out, None
    if attention_mask is None:
        attention_mask = _unmasked(module, T, S, is_causal, sliding_window)
    if attention_mask[:2] != (T, S):
        raise ValueError(
            f"riftco attention: the mask is of {attention_mask.T} queries and {attention_mask.S} keys; got {T} and {S}"
        )
    documents, key_documents, k_lens, visible = attention_mask[4:]
    if cu_seq_lens_q is not None and documents is None and k_lens is None and visible is None and q.shape[0] == 1:
        documents, key_documents = cu_seq_lens_q, cu_seq_lens_k  # from a collator that flattens batches
    options |= {"causal": attention_mask.causal, "window": attention_mask.window}
    if documents is None:
        out = riftco_attention(q, k, v, k_lens=k_lens, bias=_joined(visible, position_bias), **options)
        return out, None
    if position_bias is not None:
        raise ValueError("riftco attention: a position bias over packed or left-padded rows is not supported")
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    out = riftco_attention(q, k, v, cu_seqlens_q=documents, cu_seqlens_k=key_documents, **options)
    return out.unflatten(0, (-1, T)), None


def _unmasked(module: nn.Module, T: int, S: int, is_causal: bool | None, sliding_window: int | None) -> Mask:
    """The mask of a call that has none."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        if sliding_window is not None:
            raise ValueError("riftco attention: a window to both sides needs a mask made by transformers' functions")
        return Mask(T, S)
    if T != S and T != 1:
        raise ValueError(
            f"riftco attention: {T} causal queries over {S} keys need a mask that says where the queries stand"
        )
    return Mask(T, S, True, (None if sliding_window is None else sliding_window - 1, None))


def _joined(shown: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """One bias of a mask (bool, or added) and a position bias."""
    if shown is None or bias is None:
        return bias if shown is None else shown
    return torch.where(shown, bias, -torch.inf) if shown.dtype == torch.bool else shown + bias
