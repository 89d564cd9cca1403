"""Which Triton kernels serve a head shape, and with which tiles. Torch-only and pure: tests and explain() read it."""

from dataclasses import dataclass

import torch

ROW_PRODUCTS = 8192  # elements that a program of the rows route multiplies at once: 64 registers a thread


@dataclass(frozen=True)
class Tiles:
    """Query rows M, keys N, warps and pipeline stages of each kernel."""

    fwd: tuple[int, int, int, int]
    dkdv: tuple[int, int, int, int]
    dq: tuple[int, int, int, int]


@dataclass(frozen=True)
class Route:
    name: str
    why: str
    D: int  # head dims padded to what a matrix unit takes
    Dv: int
    tiles: Tiles


# (bytes of an element, padded head dim) -> tiles; all fit the 99 KiB of shared memory that every GPU since Ampere has
TILES = {
    (2, 64): Tiles((128, 64, 4, 2), (64, 64, 8, 2), (64, 64, 4, 2)),
    (2, 128): Tiles((64, 64, 4, 2), (32, 64, 8, 2), (64, 32, 4, 2)),
    (2, 256): Tiles((64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    (2, 512): Tiles((16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    (4, 64): Tiles((32, 32, 4, 1), (32, 32, 8, 1), (32, 32, 4, 1)),
    (4, 128): Tiles((16, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
    (4, 256): Tiles((16, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}


def route(dtype: torch.dtype, D: int, Dv: int) -> Route:
    """The kernels' name, head dims padded to a power of two, tiles, and why.

    "tiled": D == Dv, a multiple of 8 up to 256: whole 16-byte loads and matrix units.
    "padded": other head dims up to 512 (float32: 256), D != Dv included: the same kernels, each operand padded on its
    own, with the tiles of the larger of the two.
    "rows": above that, where no tile of 16 rows fits shared memory: the same kernels with one row a program and
    products summed outside the matrix unit. Slow, for any head dim.
    """
    pad, pad_v = (max(16, 1 << (d - 1).bit_length()) for d in (D, max(Dv, 1)))
    tiles = TILES.get((dtype.itemsize, max(64, pad, pad_v)))
    if tiles is None:
        block = max(1, ROW_PRODUCTS // max(pad, pad_v))
        one = (1, block, 4, 1)
        why = f"head dims {D} and {Dv} leave no room for a tile of 16 rows of {dtype}"
        return Route("rows", why, pad, pad_v, Tiles(one, (block, 1, 4, 1), one))
    if Dv == D and D % 8 == 0 and D <= 256:
        return Route("tiled", f"head dim {D} is a multiple of 8 up to 256", pad, pad_v, tiles)
    why = f"head dims {D} and {Dv} differ" if Dv != D else f"head dim {D} is no multiple of 8 up to 256"
    return Route("padded", why, pad, pad_v, tiles)
