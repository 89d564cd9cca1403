"""Guesses of what comes next, out of what was there before (prompt look-up): free to make, and checked by the model."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 4, 2  # tokens that must be seen again


class Draft:
    """The tokens of one turn, indexed by their n-grams as they come."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], tuple[int, int]] = {}  # n-gram -> where its newest two occurrences end
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        self.tokens.append(token)
        end = len(self.tokens)
        for n in range(SHORTEST, min(LONGEST, end) + 1):
            gram = tuple(self.tokens[end - n :])
            self._after[gram] = (end, self._after.get(gram, (0, 0))[0])

    def next(self, count: int) -> list[int]:
        """`count` tokens as they followed the longest n-gram that the text ends with, where it was seen before; none
        where it was not. A text that repeats itself is taken to go on so."""
        end = len(self.tokens)
        for n in range(min(LONGEST, end), SHORTEST - 1, -1):
            before = self._after[tuple(self.tokens[end - n :])][1]
            if before:
                period = self.tokens[before:]
                return [period[i % len(period)] for i in range(count)]
        return []
