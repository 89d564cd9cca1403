"""Slots: what each holds in the cache, made under which adapters, and what it is doing."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from .bank import AdapterSet


class State(enum.Enum):
    IDLE = "idle"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    LEARNING = "learning"


@dataclass
class Slot:
    """Position i of the slot's cache holds tokens[i], read under the adapters `key`."""

    id: int
    key: AdapterSet = ()
    tokens: list[int] = field(default_factory=list)
    state: State = State.IDLE
    used: int = 0  # the scheduler's clock at its last use
    unsure: int = 0  # rows at its end that may yet be taken back

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
