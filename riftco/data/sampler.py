"""The order of training: seeded, reproducible, and resumed from a few numbers. Independent of torch's generators."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import DataError
from .geometry import INT32_MAX


class ShuffledOrder:
    """Endless indices of `count` examples: each epoch is a fresh permutation drawn from its own random.Random.

    An epoch's permutation depends on the seed and the epoch's number only, so the state is three numbers.
    """

    def __init__(self, count: int, seed: int):
        if count < 1:
            raise DataError("cannot draw from an empty dataset")
        self.count, self.seed, self.epoch, self.position = count, seed, 0, 0
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        order = list(range(self.count))
        random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order

    def peek(self) -> int:
        """The next example."""
        return self._order[self.position]

    def advance(self) -> None:
        """Go past it; behind the last one begins an epoch in another order."""
        self.position += 1
        if self.position == self.count:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._permutation()

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count, "seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if (state["count"], state["seed"]) != (self.count, self.seed):
            raise DataError(
                f"the saved order is of {state['count']} examples with seed {state['seed']}; "
                f"this run has {self.count} with seed {self.seed}"
            )
        if not 0 <= state["position"] < self.count or state["epoch"] < 0:
            raise DataError(f"the saved order has no position {state['position']} in epoch {state['epoch']}")
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._permutation()


class WindowSampler:
    """Windows of a token corpus for training from scratch.

    A corpus of N tokens has N - T starts for context T; every row of every batch draws one uniformly, independently
    and with replacement, so windows may repeat and a batch may be larger than the number of distinct windows.

    Args:
        tokens: the corpus, N ids; borrowed, not copied.
        context: T; N must exceed it.
        batch: rows B of a batch.
        seed: of this sampler's own random.Random.
    """

    def __init__(self, tokens: Sequence[int], context: int, batch: int, seed: int):
        if context < 1 or batch < 1:
            raise DataError(f"context and batch must be 1 or more; got {context} and {batch}")
        if batch * context > INT32_MAX:
            raise OverflowError(f"a batch of {batch} x {context} tokens does not fit 32-bit offsets")
        if len(tokens) <= context:
            raise DataError(f"the corpus has {len(tokens)} tokens; a context of {context} needs at least {context + 1}")
        self.tokens, self.context, self.batch = tokens, context, batch
        self.starts = len(tokens) - context
        self._random = random.Random(seed)

    def draw(self) -> list[int]:
        """The starts of the next batch's rows."""
        return [self._random.randrange(self.starts) for _ in range(self.batch)]

    def next(self) -> tuple[list[list[int]], list[list[int]]]:
        """Inputs and next-token targets, B rows of T each."""
        inputs, targets = [], []
        for start in self.draw():
            window = list(self.tokens[start : start + self.context + 1])
            inputs.append(window[:-1])
            targets.append(window[1:])
        return inputs, targets

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = self._random.getstate()
        return {"random": [version, list(internal), gauss]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), gauss))
