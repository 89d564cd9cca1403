"""Which CUDA kernels serve a product with a GGUF weight, and how it is cut. Pure: tests and explain() read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FEW_ROWS = 64  # up to so many rows of x a product decodes W itself
SCRATCH_BYTES = 32 << 20  # of decoded weight, for the length of a call
PROGRAMS = 264  # two for each multiprocessor of a large GPU; a constant, so that every GPU adds in the same order
MOST_SPLITS = 16
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


def route(M: int, outputs: int, reduced: int, dtype: torch.dtype) -> Route:
    """ "few": W is decoded inside the product, which reads each packed byte once. "scratch": stretches of W of at most
    SCRATCH_BYTES are decoded and multiplied by cuBLAS, as soon as "few" would decode W twice.

    How a reduction is cut depends on W alone, so that a row's result does not depend on how many rows come with it. An
    empty reduction stays with the kernel, which writes its zeros.
    """
    if M > FEW_ROWS and reduced > 0:
        return Route("scratch", f"{M} rows: more than {FEW_ROWS} would decode W twice")
    tile, step, warps, stages = TILES[dtype.itemsize]
    tiles = -(-outputs // tile)
    splits = max(1, min(MOST_SPLITS, PROGRAMS // max(tiles, 1), reduced // (4 * step)))
    part = -(-reduced // splits // step) * step
    splits = max(1, -(-reduced // max(part, 1)))
    rows = 16 if M <= 16 else 32 if M <= 32 else 64
    why = f"{M} rows: up to {FEW_ROWS} read each packed byte once; {tiles} tiles in {splits} parts"
    return Route("few", why, rows, tile, step, warps, stages, splits, part)


def forward_routes(dtype: torch.dtype) -> list[tuple[str, str, str]]:
    """(call, route, why) of common shapes, for explain()."""
    return _routes(dtype, ((4096, 4096), (14336, 4096)))


def backward_routes(dtype: torch.dtype) -> list[tuple[str, str, str]]:
    return _routes(dtype, ((4096, 4096), (4096, 14336)))


def _routes(dtype: torch.dtype, shapes: tuple[tuple[int, int], ...]) -> list[tuple[str, str, str]]:
    rows = []
    for M in (1, 16, 4096):
        for outputs, reduced in shapes:
            found = route(M, outputs, reduced, dtype)
            rows.append((f"{M} rows, {reduced} -> {outputs}", found.name, found.why))
    return rows
