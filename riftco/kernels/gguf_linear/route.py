"""Which CUDA kernels serve a product with a GGUF weight, and how it is cut. Pure: tests and explain() read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROWS = 4  # up to so many rows of x each lane takes words of W, whole
# units of a block, each of which a lane takes at once: 4 bytes of codes or, in Q4_K and Q5_K, 8
UNITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 4, "Q5_1": 4, "Q8_0": 8, "Q4_K": 16, "Q5_K": 16, "Q6_K": 32}
FEW_ROWS = 64  # up to so many rows of x a product decodes W itself
SCRATCH_BYTES = 32 << 20  # of decoded weight, for the length of a call
PROGRAMS = 264  # two for each multiprocessor of a large GPU; a constant, so that every GPU adds in the same order
MOST_SPLITS = 16


@dataclass(frozen=True)
class RowTile:
    """Lanes of a program, each with a unit of a row of W at a time, and its warps: how a row is summed depends on them
    alone. For one row of x and for more: rows of W a program, and whether bytes are read a step ahead."""

    lanes: int
    warps: int
    one: tuple[int, bool]
    more: tuple[int, bool]


ROW_TILES = {
    "Q4_0": RowTile(128, 4, (4, False), (4, True)),
    "Q4_1": RowTile(128, 4, (8, True), (4, True)),
    "Q5_0": RowTile(128, 4, (8, True), (4, True)),
    "Q5_1": RowTile(128, 4, (8, True), (4, True)),
    "Q8_0": RowTile(128, 4, (4, False), (4, True)),
    "Q4_K": RowTile(64, 2, (4, True), (8, False)),
    "Q5_K": RowTile(64, 2, (4, True), (8, False)),
    "Q6_K": RowTile(128, 4, (4, False), (4, False)),
}
# bytes of an element of x -> outputs of a tile, reduced elements of a step, warps, pipeline stages
TILES = {2: (32, 64, 4, 2), 4: (32, 32, 4, 2), 8: (32, 32, 4, 1)}


@dataclass(frozen=True)
class Route:
    """`splits` parts of the reduction, each of `part` elements, are summed in a second stage."""

    name: str
    why: str
    rows: int = 0
    outputs: int = 0
    step: int = 0
    warps: int = 4
    stages: int = 2
    splits: int = 1
    part: int = 0
    ahead: bool = False


def route(M: int, outputs: int, reduced: int, dtype: torch.dtype, format: str, *, backward: bool = False) -> Route:
    """The kernels' name, tile, parts of the reduction, and why.

    "row": up to ROWS rows, forward: lanes take words of packed bytes, scaled once a group.
    "few": W is decoded inside the product, which reads each packed byte once.
    "scratch": stretches of W of at most SCRATCH_BYTES are decoded and multiplied by cuBLAS, as soon as "few" would
        decode W twice.

    How a reduction is cut depends on W alone, so that a row's result does not depend on how many rows come with it. An
    empty reduction stays with "few", which writes its zeros.
    """
    if M > FEW_ROWS and reduced > 0:
        return Route("scratch", f"{M} rows: more than {FEW_ROWS} would decode W twice")
    if M <= ROWS and reduced > 0 and not backward and dtype.itemsize <= 4:
        t = ROW_TILES[format]
        most, ahead = t.one if M <= 1 else t.more
        each = next((n for n in (8, 4) if n <= most and outputs >= n * PROGRAMS), 2)
        why = f"{M} rows: up to {ROWS} meet words of packed bytes; {each} rows of W a program"
        return Route("row", why, next(n for n in (1, 2, 4) if n >= M), each, t.lanes, t.warps, ahead=ahead)
    tile, step, warps, stages = TILES[dtype.itemsize]
    tiles = -(-outputs // tile)
    splits = max(1, min(MOST_SPLITS, PROGRAMS // max(tiles, 1), reduced // (4 * step)))
    part = -(-reduced // splits // step) * step
    splits = max(1, -(-reduced // max(part, 1)))
    rows = 16 if M <= 16 else 32 if M <= 32 else 64
    why = f"{M} rows: up to {FEW_ROWS} read each packed byte once; {tiles} tiles in {splits} parts"
    return Route("few", why, rows, tile, step, warps, stages, splits, part)


def forward_routes(dtype: torch.dtype) -> list[tuple[str, str, str]]:
    """(call, route, why) of common shapes in Q4_K, for explain()."""
    return _routes(dtype, ((4096, 4096), (14336, 4096)))


def backward_routes(dtype: torch.dtype) -> list[tuple[str, str, str]]:
    return _routes(dtype, ((4096, 4096), (4096, 14336)), backward=True)


def _routes(
    dtype: torch.dtype, shapes: tuple[tuple[int, int], ...], *, backward: bool = False
) -> list[tuple[str, str, str]]:
    rows = []
    for M in (1, 16, 4096):
        for outputs, reduced in shapes:
            found = route(M, outputs, reduced, dtype, "Q4_K", backward=backward)
            rows.append((f"{M} rows, {reduced} -> {outputs}", found.name, found.why))
    return rows
