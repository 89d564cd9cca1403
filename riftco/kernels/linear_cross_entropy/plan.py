"""How many rows a slice takes, and why: a pure function of sizes."""

import functools
from dataclasses import dataclass

TILE = 128  # rows of a matmul's tile: a slice that is no multiple of it wastes the last one


@dataclass(frozen=True)
class Plan:
    rows: int  # of a slice; the last slice may be shorter
    slices: int
    why: str
    row_bytes: int  # what a row of a slice holds


@dataclass(frozen=True)
class Filled:
    """What makes some numbers of rows better than others where processors take a tile of d_x each, all at once.

    columns: of a tile, of d_x. processors: of the device. per_slice: what a slice costs besides, in rounds of tiles.
    Measured on an H200 at C 4096, V 128256: d_x of 2048 rows, 256 tiles for 132 processors, ran at 679 TFLOP/s, of 1664
    rows, 208 tiles, at 548; adding to dW costs a slice what half a round of d_x takes.
    """

    columns: int
    processors: int
    per_slice: float

    def cost(self, count: int, rows: int) -> float:
        def of(n: int) -> float:
            return -(-(-(-n // TILE) * self.columns) // self.processors) + self.per_slice

        full, rest = divmod(count, rows)
        return full * of(rows) + (of(rest) if rest else 0.0)

    def parts(self, rows: int) -> tuple[slice, ...]:
        """In how many products the rows' d_x is made. cuBLAS divides the sum over classes among processors where there
        are fewer tiles than half of them, but not for little more: 1024 rows at C 2304, V 256000 took 1.89 ms, twice
        512 rows 1.74."""
        half = -(-rows // (2 * TILE)) * TILE
        idle = self.processors < 2 * -(-rows // TILE) * self.columns <= 1.5 * self.processors
        return (slice(0, half), slice(half, rows)) if idle and half < rows else (slice(0, rows),)

    def whole_rounds(self, most: int) -> set[int]:
        """Numbers of rows up to `most` whose tiles leave few processors idle."""
        rounds = most * self.columns // (TILE * self.processors)
        found = {r * self.processors // self.columns * TILE for r in range(1, rounds + 1)}
        return found - {0}  # a tile of rows has more tiles of d_x than one round takes

    def better(self, count: int, most: int, rows: int) -> int:
        """`rows`, or a number of rows up to `most` that costs less."""
        others = {most // TILE * TILE} | self.whole_rounds(most)
        return min([rows, *sorted(n for n in others if 0 < n <= most)], key=lambda n: self.cost(count, n))


def _padded(count: int, rows: int) -> int:
    """Rows that matmuls take in slices of `rows`, and half a tile a slice for what it costs besides."""
    return count // rows * (-(-rows // TILE) * TILE + TILE // 2) + -(-(count % rows) // TILE) * TILE + TILE // 2


@functools.lru_cache(1024)
def plan(
    count: int, row_bytes: int, slice_bytes: int, most_bytes: int | None = None, filled: Filled | None = None
) -> Plan:  # fmt: skip
    """Slices of equal size, as few as the budget allows: each reads the weight twice and its gradient once or twice.

    count: rows to compute. row_bytes: what a row of a slice holds. most_bytes: a cap of the device on slice_bytes.
    filled: where given, other sizes are taken if they keep the device busier.
    """
    budget = slice_bytes if most_bytes is None else min(slice_bytes, most_bytes)
    most = max(1, budget // max(1, row_bytes))
    if count <= most:
        return Plan(max(1, count), min(count, 1), f"{count} rows fit {budget} bytes", row_bytes)
    rows = -(-count // -(-count // most))
    whole = -(-rows // TILE) * TILE
    if whole <= most:
        rows, text = whole, f"rounded up to {TILE}s"
    elif most >= TILE and _padded(count, most // TILE * TILE) < _padded(count, rows):
        rows, text = most // TILE * TILE, f"of the {TILE}s that fit"
    else:
        text = "of equal size" if most >= budget // max(1, row_bytes) and most > 1 else "a row is the least there is"
    if filled is not None and (better := filled.better(count, most, rows)) != rows:
        rows, text = better, f"of {better} rows, whose tiles fill {filled.processors} processors"
    return Plan(rows, -(-count // rows), f"{most} of {count} rows fit {budget} bytes; slices {text}", row_bytes)
