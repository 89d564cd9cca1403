"""Which documents share a row: best fit, longest first."""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence

WINDOW = 4096  # documents that are packed together: bounds the work, and what shuffling can mix in a stream


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of indices into `lengths`, each row's sum at most `capacity`; every index once.

    The longest document goes first, each into the fullest row that still takes it. At most 11/9 of the least possible
    number of rows, plus one.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (space left, row), ascending
    if lengths and min(lengths) < 0:
        raise ValueError(f"lengths must be at least 0; got {min(lengths)}")
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(room, (lengths[i], -1))
        if at == len(room):
            if lengths[i] > capacity:
                raise ValueError(f"a document of {lengths[i]} tokens does not fit a row of {capacity}")
            space, row = capacity, len(rows)
            rows.append([])
        else:
            space, row = room.pop(at)
        rows[row].append(i)
        bisect.insort(room, (space - lengths[i], row))
    return rows


def shuffled_rows(order: Sequence[int], lengths: Sequence[int], capacity: int, rng: random.Random) -> list[list[int]]:
    """The documents `order` as packed rows: a window of them at a time by best fit, the rows of a window shuffled, so
    that long documents do not come first."""
    out: list[list[int]] = []
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        rows = [[window[i] for i in row] for row in best_fit([lengths[d] for d in window], capacity)]
        rng.shuffle(rows)
        out += rows
    return out
