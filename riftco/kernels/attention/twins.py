"""Other libraries' signatures on `attention`. No logic of its own beyond layouts and names.

B batch, T query length, S key length, H query heads, K key/value heads, D and Dv head dims.
"""

import torch
from torch import Tensor

from .op import attention


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
