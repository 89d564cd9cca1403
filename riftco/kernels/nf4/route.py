"""Which CUDA kernels serve a product with an NF4 weight, and how it is cut. Pure: tests and explain() read it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

FEW_ROWS = 64  # up to so many rows of x a product decodes W itself
SCRATCH_BYTES = 32 << 20  # of decoded weight, for the length of a call
STEP = 64  # elements of a row of W, or rows of it, that "few" decodes at once
PROGRAMS = 264  # two for each multiprocessor of a large GPU; a constant, so that every GPU adds in the same order
LEAST_SPLITS, MOST_SPLITS = 8, 16


@dataclass(frozen=True)
class Tile:
    """Rows of x and outputs of a tile, warps, pipeline stages. For "row": bytes a lane takes at once, rows of W."""

    rows: int
    outputs: int
    warps: int
    stages: int


# One table for what a clock decides. "row" is one warp a program: its look-ups are shuffles inside a warp.
ROW, ROW_SMALL, ROW_LARGE = Tile(16, 4, 1, 1), Tile(16, 2, 1, 1), Tile(8, 8, 1, 1)
SMALL = 2048  # rows of W up to which a GPU wants more programs than ROW gives
MANY, LONG = 16384, 8192  # rows of W, and their elements, from which ROW_LARGE reads faster; of fewer it reads slower
FORWARD = {16: Tile(16, 64, 4, 4), 32: Tile(32, 64, 4, 4), 64: Tile(64, 128, 4, 4)}
BACKWARD = {16: Tile(16, 64, 4, 3), 32: Tile(32, 64, 4, 3), 64: Tile(64, 64, 4, 3)}
GENERAL = {16: Tile(16, 32, 4, 2), 32: Tile(32, 32, 4, 2), 64: Tile(64, 32, 4, 2)}


@dataclass(frozen=True)
class Route:
    """`splits` parts of the reduction, each of `part` elements, are summed in a second stage."""

    name: str
    why: str
    tile: Tile = ROW
    splits: int = 1
    part: int = 0


@functools.lru_cache(1024)  # asked for each product of a step
def route(M: int, N: int, K: int, block_size: int, dtype: torch.dtype, *, backward: bool = False) -> Route:
    """The kernels' name, tile, parts of the reduction, and why.

    "scratch": more than FEW_ROWS rows: stretches of W of at most SCRATCH_BYTES are decoded and multiplied by cuBLAS,
        which pays as soon as W would be decoded twice.
    "row": one row of x in 16 bits, forward: lanes look values up in their warp and multiply outside the matrix unit.
    "few": up to FEW_ROWS rows in 16 bits: matrix units on table values, each scaled by its block's absmax.
    "general": up to FEW_ROWS rows of anything else: float32, blocks that run on across rows, blocks of 32.

    How a reduction is cut depends on W alone, so that a row's result does not depend on how many rows come with it but
    for the kernel that they take. An empty reduction stays with a kernel, which writes its zeros.
    """
    outputs, reduced = (K, N) if backward else (N, K)
    if M > FEW_ROWS and reduced > 0:
        return Route("scratch", f"{M} rows: more than {FEW_ROWS} would decode W twice")
    rows = 16 if M <= 16 else 32 if M <= 32 else 64
    refused = _why_general(K, block_size, dtype)
    if refused or reduced == 0:
        return Route("general", refused or "nothing to sum", GENERAL[rows])
    if M == 1 and not backward:
        tile = ROW_SMALL if N <= SMALL else ROW_LARGE if N >= MANY and K >= LONG else ROW
        return Route("row", f"one row of {dtype}", tile)
    if block_size % STEP:
        return Route("general", f"blocks of {block_size} end inside a step of {STEP}", GENERAL[rows])
    tile = (BACKWARD if backward else FORWARD)[rows]
    tiles = -(-outputs // tile.outputs)
    splits = max(1, min(MOST_SPLITS, max(LEAST_SPLITS, PROGRAMS // tiles), reduced // (4 * STEP)))
    part = -(-reduced // splits // STEP) * STEP
    splits = -(-reduced // part)
    return Route("few", f"{M} rows of {dtype}: up to {FEW_ROWS} read each byte once; {tiles} tiles in {splits} parts",
                 tile, splits, part)  # fmt: skip


def _why_general(K: int, block_size: int, dtype: torch.dtype) -> str:
    """Empty where blocks lie within rows and x has 16 bits."""
    if dtype.itemsize != 2:
        return f"{dtype} is not of 16 bits"
    return "" if K % block_size == 0 else f"blocks of {block_size} run on across rows of {K}"


def forward_routes(dtype: torch.dtype) -> list[tuple[str, str, str]]:
    """(call, route, why) of common shapes, for explain()."""
    return _routes(dtype, False)


def backward_routes(dtype: torch.dtype) -> list[tuple[str, str, str]]:
    return _routes(dtype, True)


def _routes(dtype: torch.dtype, backward: bool) -> list[tuple[str, str, str]]:
    rows = []
    for M in (1, 16, 4096):
        for N, K in ((4096, 4096), (14336, 4096)):
            found = route(M, N, K, 64, dtype, backward=backward)
            rows.append((f"{M} rows, W [{N}, {K}]", found.name, found.why))
    return rows
