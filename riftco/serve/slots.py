"""Slots: what each holds in the cache, made under which adapters, and what it is doing."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..functional import Cache
from .bank import AdapterSet
from .batch import Refused


class State(enum.Enum):
    IDLE = "idle"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    LEARNING = "learning"


@dataclass
class Slot:
    """Row i of the slot's cache holds tokens[i], read under the adapters `key`."""

    id: int
    key: AdapterSet = ()
    tokens: list[int] = field(default_factory=list)
    state: State = State.IDLE
    used: int = 0  # the engine's clock at its last use

    def cut(self, n: int) -> None:
        """Forget the rows from n on."""
        if not 0 <= n <= len(self.tokens):
            raise Refused(f"slot {self.id} holds {len(self.tokens)} rows; it cannot be cut to {n}")
        del self.tokens[n:]

    def common(self, tokens: Sequence[int], key: AdapterSet) -> int:
        """How many leading rows serve `tokens` under `key` as they are."""
        if self.key != key:
            return 0
        n = 0
        for mine, wanted in zip(self.tokens, tokens):
            if mine != wanted:
                break
            n += 1
        return n


def rows_of_slot(cache: Cache, slot: int, start: int, end: int) -> Tensor:
    """Physical rows of positions [start, end) of a slot."""
    device = cache.layers[0].k.device
    at = torch.tensor([[slot], [start]], device=device)
    return cache.rows(at[0], at[1], end - start)


def snapshot(cache: Cache, slot: int, start: int, end: int) -> list[Tensor]:
    """The stored bytes of a slot's rows, every layer's."""
    rows = rows_of_slot(cache, slot, start, end)
    return [flat.index_select(0, rows) for flat in _stored(cache)]


def restore(cache: Cache, slot: int, start: int, held: Sequence[Tensor]) -> None:
    """Put a snapshot's bytes back, into any slot."""
    rows = rows_of_slot(cache, slot, start, start + len(held[0]))
    for flat, t in zip(_stored(cache), held, strict=True):
        flat.index_copy_(0, rows, t)


def _stored(cache: Cache) -> list[Tensor]:
    parts = (t for layer in cache.layers for t in (layer.k, layer.v, layer.k_scale, layer.v_scale))
    return [t.flatten(0, 1) for t in parts if t is not None]
