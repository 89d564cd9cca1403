"""Which keys a query sees, told to riftco's attention without a T x S matrix where a few numbers say it.

transformers describes a mask by a function of (batch, head, query, key) made of known parts; what is made of other
parts (a caller's own or/and functions, blocks of images, chunks) becomes a bool matrix [B, 1, T, S], as for SDPA.

B batch, T query length, S key length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils as hf


class Mask(NamedTuple):
    """The attention_mask of a layer: arguments of riftco's attention. Row t stands at key t + (k_lens or S) - T."""

    T: int
    S: int
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    documents: Tensor | None = None  # cu_seqlens of the B T rows
    key_documents: Tensor | None = None  # of the B S keys, where they differ
    k_lens: Tensor | None = None  # [B]
    visible: Tensor | None = None  # bool [B, 1, 1 or T, S]

    @property
    def ndim(self) -> int:
        """transformers reads it to tell a padding mask [B, S] from one that is ready."""
        return 4


@dataclass(frozen=True)
class Pattern:
    """What a mask function of transformers says, read from the parts it is made of."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    documents: Tensor | None = None  # [B, T]: equal numbers see each other
    restarts: bool = False  # positions are counted within documents

    @property
    def windowed(self) -> bool:
        return self.left is not None or self.right is not None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,  # an int, or a tensor of a static cache
    kv_offset: Any = 0,
    mask_function: Callable = hf.causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Mask:
    """AttentionMaskInterface's function for "riftco". Waits once for an accelerator where a padding mask is given."""
    if isinstance(attention_mask, Mask):  # made before, by `generate`
        return attention_mask
    B, T, S = batch_size, q_length, kv_length
    pattern = None if use_vmap else read(mask_function)
    if pattern is None or not _aligned(pattern, T, S, q_offset, kv_offset):
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        matrix = hf.sdpa_mask(
            B, T, S, q_offset, kv_offset, mask_function, attention_mask, use_vmap=use_vmap, device=device, **options
        )
        assert matrix is not None
        return Mask(T, S, visible=matrix)
    made = Mask(T, S, pattern.causal, (pattern.left, pattern.right))
    end = q_offset + T - kv_offset  # behind the last query's own key
    if pattern.causal and not (isinstance(end, int) and end == S):
        made = made._replace(k_lens=torch.as_tensor(end, device=device).reshape(1).expand(B))
    if pattern.documents is not None:
        return made._replace(documents=_documents(pattern.documents))
    padding = hf.prepare_padding_mask(attention_mask, S, kv_offset)
    if padding is None:
        return made
    if padding.shape[-1] != S or not isinstance(kv_offset, int) or kv_offset:
        padding = padding[:, torch.arange(S, device=padding.device) + kv_offset]
    return _padded(made, padding.bool())


def _aligned(pattern: Pattern, T: int, S: int, q_offset, kv_offset) -> bool:
    """Whether the last query stands at a key that is there; without a window or causality it does not matter."""
    if pattern.documents is not None or pattern.restarts:
        return pattern.documents is not None and T == S
    if not (pattern.causal or pattern.windowed):
        return True
    end = q_offset + T - kv_offset
    if not pattern.causal:  # riftco's windows end with the keys, whatever k_lens
        return isinstance(end, int) and end == S
    return isinstance(end, Tensor) or end <= S


def _padded(made: Mask, valid: Tensor) -> Mask:
    """`made` without the keys that are padding: valid [B, S]."""
    B, (T, S) = valid.shape[0], made[:2]
    shown = made._replace(visible=valid[:, None, None])
    if _tracing() or (T == 1 and S > 1):  # a row of bools costs a decoding step less than to look at them
        return shown
    place = torch.arange(S, device=valid.device)
    asked = valid if made.k_lens is None else valid | (place >= made.k_lens.unsqueeze(-1))
    first, count = valid.int().argmax(-1), valid.sum(-1)
    last = S - valid.flip(-1).int().argmax(-1)
    facts = torch.stack([asked.all(), (first == 0).all(), ((last - first == count) & (count > 0)).all()])
    full, from_start, whole = facts.tolist()
    if full:
        return made
    if not whole:
        return shown
    if made.causal and made.k_lens is None and T == S:
        if from_start:  # padding comes after every token that counts
            return made
        # two documents a sequence: padding, which no row reads; the rest, read by all T rows, the last at its end
        row = S * torch.arange(B, device=first.device)
        rows, keys = (torch.stack([row, row + d], -1).flatten() for d in (torch.zeros_like(first), first))
        return made._replace(documents=_closed(rows, B * S), key_documents=_closed(keys, B * S))
    if not made.causal and from_start and made.window == (None, None):
        return made._replace(k_lens=count)
    return shown


def _documents(ids: Tensor) -> Tensor:
    """cu_seqlens of rows [B, T] whose document's number changes where another begins."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return _closed(starts.flatten().nonzero().flatten(), ids.numel())


def _closed(starts: Tensor, rows: int) -> Tensor:
    return torch.cat([starts, starts.new_tensor([rows])]).to(torch.int32 if rows < 1 << 31 else torch.int64)


def _tracing() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def read(function: Callable) -> Pattern | None:
    """The pattern that a mask function of transformers describes; None if it is made of anything else."""
    if function is hf.causal_mask_function:
        return Pattern(causal=True)
    if function is hf.bidirectional_mask_function:
        return Pattern()
    if _tracing():  # Dynamo cannot look into closures
        return None
    parts = _closure(function)
    if _made_by(function, hf.and_masks):
        return _both([read(f) for f in parts.get("mask_functions", ())])
    if _made_by(function, hf.sliding_window_overlay):
        return Pattern(left=parts["sliding_window"] - 1)
    if _made_by(function, hf.sliding_window_bidirectional_overlay):
        return Pattern(left=parts["sliding_window"], right=parts["sliding_window"])
    if _made_by(function, hf.packed_sequence_mask_function):
        return Pattern(documents=parts["packed_sequence_mask"])
    if _made_by(function, hf.remap_positions_for_packed_sequence):
        inner = read(parts["mask_function"])
        return None if inner is None or inner.documents is not None else replace(inner, restarts=True)
    return None


def _both(parts: list[Pattern | None]) -> Pattern | None:
    """What all parts together show; None where one is unknown."""
    found = Pattern()
    for part in parts:
        if part is None or (part.documents is not None and found.documents is not None):
            return None
        found = Pattern(
            found.causal or part.causal,
            _least(found.left, part.left),
            _least(found.right, part.right),
            part.documents if found.documents is None else found.documents,
            found.restarts or part.restarts,
        )
    return found


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _made_by(function: Callable, factory: Callable) -> bool:
    return getattr(function, "__code__", None) in factory.__code__.co_consts


def _closure(function: Callable) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return {} if code is None else {n: c.cell_contents for n, c in zip(code.co_freevars, cells or ())}
