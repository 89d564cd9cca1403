"""flash-attn 2's functions on `attention`: its names, order and defaults. The one over a cache is in kvcache_twins.py.

B batch, T query length, S key length, H query heads, K key/value heads, D and Dv head dims. lse is [B, H, T], packed
[H, total].
"""

from typing import Any

from torch import Tensor

from .._arguments import flags, floating, given
from .alibi import key_bias, row_shift
from .op import attention
from .rows import packed_rows

Window = tuple[int | None, int | None]
Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """flash_attn.flash_attn_func's twin (2.8's signature), in every dtype, on every device, for any head dim.

    Args:
        q: [B, T, H, D]. Differentiable.
        k: [B, S, K, D], H % K == 0. Differentiable.
        v: [B, S, K, Dv]. Differentiable.
        dropout_p: set it to 0 in evaluation, as there.
        softmax_scale: default D ** -0.5.
        causal: aligned at the bottom right: row t sees the keys s <= t + S - T.
        window_size: (left, right) around that place, inclusive; -1 or None for no limit.
        softcap: > 0 caps the scaled scores at +-softcap.
        alibi_slopes: floating [H] or [B, H]: -slope |t + S - T - s| is added to the scores. Differentiable. Under
            `causal` this costs a bias [.., H, 1, S]; without, a bias of all scores [.., H, T, S].
        deterministic: the same gradients in every run, dq included; False leaves it to
            torch.use_deterministic_algorithms.
        return_attn_probs: return (out, softmax_lse, probabilities) as flash-attn does. The probabilities never exist
            here: an empty tensor stands for them, as in flash-attn without dropout.
        learnable_sink: floating [H], as flash-attn 4 has it: `attention`'s sinks. Differentiable.
        return_lse: return (out, lse), as flash-attn 4 does.

    Returns:
        out [B, T, H, Dv]. lse [B, H, T] float32 is differentiable; where a row sees no key out is 0 and lse -inf
        (flash-attn 2 says inf).

    Raises:
        ValueError: shapes, dtypes or options that do not fit, each named.
    """
    bias = shift = None
    if alibi_slopes is not None:
        if not (floating(q) and floating(k)) or min(q.dim(), k.dim()) != 4:
            raise ValueError(f"flash_attn_func: q and k must be floating [B, T, heads, D]; got {given(q, k)}")
        flags("flash_attn_func", causal=causal)
        bias = key_bias(alibi_slopes, q.shape, k.shape[1], None, causal)
        shift = row_shift(alibi_slopes, q.shape[1]) if causal else None
    out, lse = _attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, deterministic, bias=bias, sinks=learnable_sink
    )
    return _result(out, lse if shift is None else lse + shift, return_attn_probs, return_lse)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv [B, T, 3, H, D], which is differentiable and read where it lies."""
    q, k, v = _unpack("flash_attn_qkvpacked_func", "qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q [B, T, H, D] and kv [B, S, 2, K, D], both differentiable and read where they lie."""
    k, v = _unpack("flash_attn_kvpacked_func", "kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """flash_attn.flash_attn_varlen_func's twin (2.8's signature): packed documents.

    Args beyond `flash_attn_func`'s:
        q: [total, H, D]; k: [total_k, K, D]; v: [total_k, K, Dv]. Differentiable.
        cu_seqlens_q: int32 or int64 [documents + 1]: document n is the rows cu[n] to cu[n + 1]; empty ones are fine.
            Rows from cu[-1] on give exactly 0.
        cu_seqlens_k: the same for k and v; with block_table only their differences count.
        max_seqlen_q: the longest document; only RIFTCO_CHECK=1 reads it.
        max_seqlen_k: the same for k; with block_table at least the most keys of a document.
        block_table: int32 or int64 [documents, pages a document]: k and v are pages [pages, rows of a page, K, D].
            The rows in use are copied, once a call, to documents x max_seqlen_k rows. Differentiable.

    Returns:
        out [total, H, Dv]; lse [H, total].

    Raises:
        ValueError: shapes, dtypes or options that do not fit, each named.
        NotImplementedError: alibi_slopes: packed documents take no bias.
    """
    if alibi_slopes is not None:
        raise NotImplementedError("flash_attn_varlen_func: alibi_slopes are not supported for packed documents")
    if block_table is not None:
        k, v, cu_seqlens_k = packed_rows(k, v, None, cu_seqlens_k.diff(), block_table, max_seqlen_k)
    out, lse = _attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, deterministic, sinks=learnable_sink,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    return _result(out, lse, return_attn_probs, return_lse)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of qkv [total, 3, H, D], which is differentiable and read where it lies."""
    q, k, v = _unpack("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q [total, H, D] and kv [total_k, 2, K, D], both differentiable."""
    k, v = _unpack("flash_attn_varlen_kvpacked_func", "kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _attend(
    q, k, v, dropout_p, scale, causal, window, softcap, deterministic: bool, **options: Any
) -> tuple[Tensor, Tensor]:
    pair = attention(
        q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, dropout_p=dropout_p, return_lse=True,
        deterministic=True if deterministic else None, **options,
    )  # fmt: skip
    assert isinstance(pair, tuple)
    return pair


def _result(out: Tensor, lse: Tensor, return_attn_probs: bool, return_lse: bool) -> Result:
    if return_attn_probs:
        return out, lse, out.new_empty(0)
    return (out, lse) if return_lse else out


def _unpack(name: str, argument: str, packed: Tensor, parts: int, dims: int) -> tuple[Tensor, ...]:
    if packed.dim() != dims or packed.shape[-3] != parts:
        lead = "B, T" if dims == 5 else "total"
        raise ValueError(f"{name}: {argument} must be [{lead}, {parts}, heads, D]; got {tuple(packed.shape)}")
    return packed.unbind(-3)
