"""How many rows a slice takes, and why: a pure function of sizes."""

import functools
from dataclasses import dataclass

TILE = 128  # rows of a matmul's tile: a slice that is no multiple of it wastes the last one


@dataclass(frozen=True)
class Plan:
    rows: int  # of a slice; the last slice may be shorter
    slices: int
    why: str


@functools.lru_cache(1024)
def plan(count: int, row_bytes: int, slice_bytes: int, most_bytes: int | None = None) -> Plan:
    """Slices of equal size, as few as the budget allows: each reads the weight twice and its gradient once or twice.

    count: rows to compute. row_bytes: what a row of a slice holds. most_bytes: a cap of the device on slice_bytes.
    """
    budget = slice_bytes if most_bytes is None else min(slice_bytes, most_bytes)
    most = max(1, budget // max(1, row_bytes))
    if count <= most:
        return Plan(max(1, count), min(count, 1), f"{count} rows fit {budget} bytes")
    rows = -(-count // -(-count // most))
    whole = -(-rows // TILE) * TILE
    if whole <= most:
        rows, text = whole, f"rounded up to {TILE}s"
    else:
        text = "of equal size" if most >= budget // max(1, row_bytes) and most > 1 else "a row is the least there is"
    return Plan(rows, -(-count // rows), f"{most} of {count} rows fit {budget} bytes; slices {text}")
