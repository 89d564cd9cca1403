"""Examples in memory to packed micro-batches, in a seeded order that resumes from a few numbers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

from .batch import Batch, pack
from .chat import Example
from .errors import DataError
from .geometry import INT32_MAX
from .packing import shuffled_rows


class Loader:
    """Micro-batches of at most `tokens` tokens each, documents packed by best fit; a micro-batch ends with its epoch.

    An epoch is a fresh permutation that depends on the seed and the epoch's number only.

    Args:
        examples: the dataset.
        tokens: most tokens of a micro-batch; every example must fit.
        seed: of the order.
        epochs: stop after so many; None goes on for ever.
    """

    def __init__(self, examples: Sequence[Example], tokens: int, seed: int, epochs: int | None = None):
        check_tokens(tokens)
        if not examples:
            raise DataError("cannot draw from an empty dataset")
        if long := [e for e in examples if len(e) - 1 > tokens]:
            longest, others = max(long, key=len), f", as {len(long) - 1} others do not" if len(long) > 1 else ""
            raise DataError(
                f"line {longest.line}: an example of {len(longest)} tokens does not fit --batch-tokens {tokens}"
                f"{others}; raise it to {len(longest) - 1} or more, or cut with --truncate --max-length {tokens + 1}"
            )
        self.examples, self.tokens, self.seed, self.epochs = examples, tokens, seed, epochs
        self.epoch, self.position = 0, 0
        self._lengths = [len(e) - 1 for e in examples]
        self._rows = self._epoch(0)

    @property
    def most_documents(self) -> int:
        """No micro-batch has more."""
        sums = itertools.accumulate(sorted(self._lengths))
        return max(1, sum(total <= self.tokens for total in sums))

    def _epoch(self, epoch: int) -> list[list[int]]:
        rng = random.Random(f"{self.seed}/{epoch}")
        order = list(range(len(self.examples)))
        rng.shuffle(order)
        return shuffled_rows(order, self._lengths, self.tokens, rng)

    def next(self) -> Batch | None:
        """The next micro-batch, or None after the last epoch."""
        if self.epochs is not None and self.epoch >= self.epochs:
            return None
        row = self._rows[self.position]
        self.position += 1
        if self.position == len(self._rows):
            self.epoch, self.position = self.epoch + 1, 0
            self._rows = self._epoch(self.epoch)
        return pack([self.examples[i] for i in row], row)

    def count(self) -> int:
        """How many micro-batches are left until the last epoch ends."""
        if self.epochs is None:
            raise DataError("a loader without a number of epochs does not end")
        if self.epoch >= self.epochs:
            return 0
        return len(self._rows) - self.position + sum(len(self._epoch(e)) for e in range(self.epoch + 1, self.epochs))

    def sequential(self) -> list[Batch]:
        """Every example once, in the file's order: for evaluation."""
        batches, start, used = [], 0, 0
        for i, length in enumerate(self._lengths):
            if used + length > self.tokens:
                batches.append(pack(self.examples[start:i], range(start, i)))
                start, used = i, 0
            used += length
        return [*batches, pack(self.examples[start:], range(start, len(self.examples)))]

    def state_dict(self) -> dict[str, int]:
        return {
            "count": len(self.examples),
            "tokens": self.tokens,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        mine = self.state_dict()
        for name, what in (("count", "examples"), ("tokens", "tokens a micro-batch"), ("seed", "as its seed")):
            if state[name] != mine[name]:
                raise DataError(f"the saved order has {state[name]} {what}; this run has {mine[name]}")
        rows = self._rows if state["epoch"] == self.epoch else self._epoch(max(state["epoch"], 0))
        if not 0 <= state["position"] < len(rows) or state["epoch"] < 0:
            raise DataError(f"the saved order has no position {state['position']} in epoch {state['epoch']}")
        self.epoch, self.position, self._rows = state["epoch"], state["position"], rows


def check_tokens(tokens: int) -> None:
    if tokens < 1:
        raise DataError(f"a micro-batch needs 1 token or more; got {tokens}")
    if tokens > INT32_MAX:
        raise OverflowError(f"a micro-batch of {tokens} tokens does not fit the 32-bit offsets of packed sequences")
