"""flash_attn_with_kvcache on `attention_with_cache`, or on `attention` where that has no such option.

B batch, T query length, N new keys, H query heads, K key/value heads, D head dim, W rows of a slot.
"""

import torch
from torch import Tensor

from .._arguments import flags, floating, given, indices, whole
from .._contract import checks_enabled, needs_grad
from ..cached_attention import Cache, CacheLayer, attention_with_cache
from ..rope.op import rope
from .alibi import key_bias, row_shift
from .op import attention

NAME = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn.flash_attn_with_kvcache's twin (2.8's signature); differentiable, which flash-attn's is not.

    Appends k, v to the caches, in place, and attends to all that each slot then holds.

    Args:
        q: [B, T, H, D]. Differentiable.
        k_cache: [slots, W, K, D]; with block_table pages [pages, rows of a page, K, D]. Any floating dtype. A constant
            to autograd: its rows must not change before the backward, those beyond a slot's length may.
        v_cache: as k_cache.
        k: [B, N, K, D], written to rows cache_seqlens, cache_seqlens + 1, ... of each slot. Differentiable.
        v: [B, N, K, D]. Differentiable.
        rotary_cos: [positions, R / 2]: q and k are turned by `rope` before, k at its place in the cache, q at the same
            places if causal or a window is given, else all at cache_seqlens. Needs k.
        rotary_sin: as rotary_cos.
        cache_seqlens: int, or int32 or int64 [B]: rows of each slot before this call. Default: all W. Needed with k.
        cache_batch_idx: int32 or int64 [B]: the slot of each sequence; default 0, 1, ...
        cache_leftpad: int32 or int64 [B]: the first row of each slot that exists.
        block_table: int32 or int64 [B, pages a slot]. Entries of pages not in use may hold anything.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as `flash_attn_func`; aligned at the end of the keys.
        rotary_interleaved: pairs (2 i, 2 i + 1) instead of (i, i + R / 2).
        num_splits: accepted for the signature's sake.
        return_softmax_lse: also return lse [B, H, T] float32.

    Returns:
        out [B, T, H, D], or (out, lse), both differentiable. A slot that holds nothing gives 0 and lse -inf.

    Raises:
        ValueError: arguments that do not fit, each named; with RIFTCO_CHECK=1 also lengths beyond the cache.

    The cache is read where it lies, by `attention_with_cache`: no copy, forward or backward. Copied once a call are the
    slots in use where that has no such option: T > 1 without causal, alibi_slopes, cache_leftpad.
    """
    flags(NAME, causal=causal, rotary_interleaved=rotary_interleaved)
    _check(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table
    )
    B, T = q.shape[:2]
    cache = Cache((CacheLayer(k_cache, v_cache),), block_table)
    held = _lengths(cache_seqlens, B, cache.window, q.device)
    slots = torch.arange(B, dtype=held.dtype, device=q.device) if cache_batch_idx is None else cache_batch_idx
    new = 0 if k is None else k.shape[1]
    if checks_enabled() and B and not bool(((held >= 0) & (held + new <= cache.window)).all()):
        raise ValueError(
            f"{NAME}: cache_seqlens {held.tolist()} and {new} new rows do not fit a cache of {cache.window} rows"
        )
    if k is None or v is None:
        k, v = (t.new_empty((B, 0, *t.shape[2:]), dtype=q.dtype) for t in (k_cache, v_cache))
    elif rotary_cos is not None and rotary_sin is not None:
        start = held if cache_leftpad is None else held - cache_leftpad
        steps = T if causal or any(side not in (None, -1) for side in window_size) else 1
        tables = rotary_cos.float(), rotary_sin.float()
        q = _turned(q, *tables, start, steps, rotary_interleaved)
        k = _turned(k, *tables, start, new, rotary_interleaved)
    if new:
        cache.write(0, cache.rows(slots, held, B * new), k.flatten(0, 1), v.flatten(0, 1))
    if (causal or T == 1) and alibi_slopes is None and cache_leftpad is None:
        left = None if window_size[0] == -1 else window_size[0]
        pair = attention_with_cache(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cache, 0, slots, held, scale=softmax_scale,
            window=(left, None), softcap=softcap, return_lse=True,
        )  # fmt: skip
        out, lse = pair[0].unflatten(0, (B, T)), pair[1].unflatten(1, (B, T)).transpose(0, 1)
    else:
        out, lse = _copied(q, k, v, cache, slots, held, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           cache_leftpad)  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def _copied(
    q, k, v, cache: Cache, slots: Tensor, held: Tensor, scale, causal, window, softcap, slopes, leftpad
) -> tuple[Tensor, Tensor]:
    """Through `attention`, over a copy of the slots in use."""
    of, W = cache.layers[0], cache.window
    keys, values = (
        t.data[slots.long() if cache.block_table is None else cache.block_table.long().clamp(0, len(t) - 1)]
        for t in (of.k, of.v)
    )
    if cache.block_table is not None:  # entries of pages not in use may hold anything
        keys, values = keys.flatten(1, 2), values.flatten(1, 2)
    if needs_grad(k, v):
        at = held.long().unsqueeze(-1) + torch.arange(k.shape[1], device=q.device)
        place = torch.arange(len(q), device=q.device).unsqueeze(-1), at
        keys, values = keys.index_put(place, k.to(keys.dtype)), values.index_put(place, v.to(values.dtype))
    lens = held + k.shape[1]
    bias = shift = None
    if slopes is not None:
        bias = key_bias(slopes, q.shape, W, lens, causal)
        shift = row_shift(slopes, q.shape[1]) if causal else None
    if leftpad is not None:
        exists = torch.arange(W, device=q.device) >= leftpad.view(-1, 1, 1, 1)
        keys, values = (t.masked_fill(~exists.view(-1, W, 1, 1), 0.0) for t in (keys, values))  # they may hold NaN
        bias = exists if bias is None else bias.masked_fill(~exists, -torch.inf)
    pair = attention(
        q, keys.to(q.dtype), values.to(q.dtype), causal=causal, scale=scale, window=window, softcap=softcap, bias=bias,
        k_lens=lens, return_lse=True,
    )  # fmt: skip
    assert isinstance(pair, tuple)
    return pair[0], pair[1] if shift is None else pair[1] + shift


def _lengths(cache_seqlens: int | Tensor | None, B: int, W: int, device: torch.device) -> Tensor:
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    return torch.full((B,), W if cache_seqlens is None else cache_seqlens, dtype=torch.int32, device=device)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, start: Tensor, steps: int, interleaved: bool) -> Tensor:
    """x [B, N, heads, D] turned at start, start + 1, ...; at start alone if steps is 1."""
    positions = start.unsqueeze(-1) + torch.arange(steps, device=x.device, dtype=start.dtype)
    return rope(x, x[:, :, :0], cos, sin, positions=positions, interleaved=interleaved)[0]


def _check(q, k_cache, v_cache, k, v, cos, sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table) -> None:
    if not (floating(q) and floating(k_cache) and floating(v_cache)) or q.dim() != 4 or k_cache.dim() != 4:
        raise ValueError(
            f"{NAME}: q, k_cache and v_cache must be floating of 4 dimensions; got {given(q, k_cache, v_cache)}"
        )
    B = q.shape[0]
    if k_cache.shape != v_cache.shape:
        raise ValueError(
            f"{NAME}: k_cache and v_cache must have one shape; got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if (k is None) != (v is None):
        raise ValueError(f"{NAME}: k and v must be given together")
    if v is not None and not floating(v):
        raise ValueError(f"{NAME}: v must be floating as k; got {given(v)}")
    if k is not None and (not floating(k) or k.dim() != 4 or k.shape[0] != B or k.shape[2:] != k_cache.shape[2:]):
        wanted = [B, "new", *k_cache.shape[2:]]
        raise ValueError(f"{NAME}: k must be floating {wanted} as q and k_cache have it; got {given(k)}")
    if k is not None and cache_seqlens is None:
        raise ValueError(f"{NAME}: k and v need cache_seqlens: where to write them")
    if (cos is None) != (sin is None):
        raise ValueError(f"{NAME}: rotary_cos and rotary_sin must be given together")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table is not None and not floating(table):
            raise ValueError(f"{NAME}: {name} must be floating [positions, R / 2]; got {given(table)}")
    if cos is not None and k is None:
        raise ValueError(f"{NAME}: rotary_cos and rotary_sin need k and v")
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError(f"{NAME}: cache_batch_idx and block_table cannot be combined; reorder block_table")
    for name, t in (("cache_seqlens", cache_seqlens), ("cache_batch_idx", cache_batch_idx),
                    ("cache_leftpad", cache_leftpad)):  # fmt: skip
        if name == "cache_seqlens" and t is not None and not isinstance(t, Tensor):
            whole(NAME, name, t, f"at least 0, or int32 or int64 [{B}]", least=0)
        elif t is not None and (not indices(t) or t.shape != (B,)):
            raise ValueError(f"{NAME}: {name} must be int32 or int64 [{B}]; got {given(t)}")
    if block_table is not None and (not indices(block_table) or block_table.dim() != 2 or len(block_table) != B):
        raise ValueError(f"{NAME}: block_table must be int32 or int64 [{B}, pages]; got {given(block_table)}")
    if block_table is None and cache_batch_idx is None and len(k_cache) < B:
        raise ValueError(f"{NAME}: {B} sequences, but the cache has {len(k_cache)} slots; give cache_batch_idx")
