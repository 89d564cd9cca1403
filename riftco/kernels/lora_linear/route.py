"""Which comes first on CUDA, the base products or the adapters. Pure: tests and the memory predictor read it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

FEW_ROWS = 64  # up to so many rows a frozen format's own kernel makes y, and can add to nothing


class Route(NamedTuple):
    name: str
    why: str


@functools.lru_cache(1024)  # asked for each product of a step
def route(rows: int, listed: bool) -> Route:
    """ "adapters first": their part is written, and each base product is added into it by the matrix product itself,
    which costs no reading of its own. "base first": the adapters' part is added to what the base products made.
    """
    if listed:
        return Route("base first", "rows are listed: the others keep the base's bytes")
    if rows <= FEW_ROWS:
        return Route("base first", f"{rows} rows: up to {FEW_ROWS} a frozen format's own kernel makes y")
    return Route("adapters first", f"{rows} rows: the products add what lies there at no cost")


def routes(dtype: torch.dtype) -> list[tuple[str, str, str]]:
    """(call, route, why) of common shapes, for explain()."""
    calls = (("16 rows", 16, False), ("4096 rows", 4096, False), ("4096 rows, some of them listed", 4096, True))
    return [(call, *route(rows, listed)) for call, rows, listed in calls]
