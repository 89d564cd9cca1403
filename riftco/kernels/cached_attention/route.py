"""Tiles and pieces of the Triton kernels for a head shape. Torch-only and pure: tests and explain() read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROW_PRODUCTS = 8192  # elements that a program multiplies at once where no matrix unit serves
DECODE_ROWS = 8  # rows of a run up to which it counts as decoding
LEAST_CHUNK = 512  # cached rows of a piece, at least
DECODE_TILE = 64  # query rows times heads of a group that one program of a decoding step takes
ENOUGH = 200 << 10  # bytes of shared memory that a block has on datacentre GPUs since Hopper
MOST_PIECES = 64  # more pieces a row cost more to join than they gain


@dataclass(frozen=True)
class Tile:
    """Query rows (times heads of the group) M, keys N, warps and pipeline stages."""

    M: int
    N: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """A launch: its tile, tiles of rows, pieces of the prefix (1 + the new keys' own, or 1 in all), rows of a piece."""

    tile: Tile
    n_tiles: int
    pieces: int
    chunk: int
    programs: int
    decode: bool = False


# (bytes of an element of q, padded head dim) -> tiles; they fit 99 KiB of shared memory, "large" ones ENOUGH
TILES = {
    "fwd": {
        (2, 64): Tile(128, 64, 4, 2), (2, 128): Tile(64, 64, 4, 2), (2, 256): Tile(64, 32, 4, 2),
        (2, 512): Tile(16, 32, 8, 1), (4, 64): Tile(32, 32, 4, 1), (4, 128): Tile(16, 32, 4, 1),
        (4, 256): Tile(16, 16, 4, 1),
    },
    "decode": {
        (2, 64): Tile(16, 128, 4, 3), (2, 128): Tile(16, 64, 4, 3), (2, 256): Tile(16, 32, 4, 3),
        (2, 512): Tile(16, 16, 4, 2), (4, 64): Tile(16, 32, 4, 2), (4, 128): Tile(16, 16, 4, 2),
        (4, 256): Tile(16, 16, 4, 1),
    },
    "dq": {
        (2, 64): Tile(64, 64, 4, 2), (2, 128): Tile(64, 64, 4, 2), (2, 256): Tile(64, 16, 4, 2),
        (2, 512): Tile(16, 16, 8, 1), (4, 64): Tile(32, 32, 4, 1), (4, 128): Tile(16, 16, 4, 1),
        (4, 256): Tile(16, 16, 8, 1),
    },
    # over q8_0 rows, which come through registers and are worth decoding for more query rows at once
    "fwd q8_0": {(2, 256): Tile(64, 32, 4, 1)},
    "decode q8_0": {(2, 64): Tile(16, 64, 4, 1), (2, 128): Tile(16, 64, 4, 1), (2, 256): Tile(16, 32, 4, 1)},
    "dq q8_0": {(2, 128): Tile(64, 64, 4, 1), (2, 256): Tile(64, 32, 4, 1)},
    "fwd q8_0 large": {(2, 128): Tile(128, 128, 8, 2), (2, 256): Tile(128, 64, 8, 1)},
    "dq q8_0 large": {(2, 256): Tile(128, 32, 8, 1)},
    "dkdv": {
        (2, 64): Tile(64, 64, 8, 2), (2, 128): Tile(32, 64, 8, 2), (2, 256): Tile(32, 32, 8, 1),
        (2, 512): Tile(16, 16, 8, 1), (4, 64): Tile(32, 32, 8, 1), (4, 128): Tile(32, 16, 4, 1),
        (4, 256): Tile(16, 16, 8, 1),
    },
}  # fmt: skip


def padded(D: int) -> int:
    """The head dim as kernels hold it: a power of two, whole q8_0 blocks."""
    return max(32, 1 << (D - 1).bit_length())


def tile(kernel: str, dtype: torch.dtype, D: int, quantized: bool = False, shared: int = 0) -> Tile:
    """Without a tile of 16 rows that fits shared memory, one row a program: slow, for any head dim."""
    shape = dtype.itemsize, max(64, padded(D))
    found = None
    if quantized and shared >= ENOUGH:
        found = TILES.get(f"{kernel} q8_0 large", {}).get(shape)
    if quantized and found is None:
        found = TILES.get(f"{kernel} q8_0", {}).get(shape)
    found = found or TILES[kernel].get(shape)
    block = max(1, ROW_PRODUCTS // padded(D))
    return found or (Tile(block, 1, 4, 1) if kernel == "dkdv" else Tile(1, block, 4, 1))


def plan(
    kernel: str, dtype: torch.dtype, D: int, *, rows: int, runs: int, packed: bool, longest: int, K: int, G: int,
    prefix: int, left: int | None, quantized: bool, processors: int,
    shared: int,
) -> Plan:  # fmt: skip
    """How a forward ("fwd") or dQ ("dq") launch is cut.

    Args:
        rows: query rows of all runs. packed: run lengths are on the device; longest: what the host knows of them.
        prefix: the most cached rows that a run can have.
        processors, shared: streaming multiprocessors of the GPU, and bytes of shared memory that a block may have.

    Decoding is cut without regard to the number of runs, so that a row's result does not depend on it.
    """
    decode = kernel == "fwd" and longest <= DECODE_ROWS
    cut = tile("decode" if decode else kernel, dtype, D, quantized, shared)
    if decode and cut.M == 16 and longest * G > 16:
        cut = Tile(min(64, 1 << (longest * G - 1).bit_length()), cut.N, cut.warps, cut.stages)
    n_tiles = -(-rows * G // cut.M) + runs + 1 if packed else runs * -(-(rows // max(runs, 1)) * G // cut.M)
    reach = prefix if left is None else min(prefix, left + cut.M + cut.N)
    pieces = 1
    if decode:
        pieces = min(MOST_PIECES, -(-reach // LEAST_CHUNK))
    elif n_tiles * K < processors:
        pieces = min(-(-2 * processors // max(n_tiles * K, 1)), -(-reach // LEAST_CHUNK))
    if pieces <= 1 and not decode:
        return Plan(cut, n_tiles, 1, 0, n_tiles * K)
    chunk = max(-(-reach // max(pieces, 1) // cut.N) * cut.N, cut.N)
    pieces = max(-(-reach // chunk), 1) + (2 if left is not None else 1)  # a window may start within a chunk
    return Plan(cut, n_tiles, pieces, chunk, n_tiles * K * pieces, decode)


def decode_plan(
    dtype: torch.dtype, D: int, *, runs: int, each: int, K: int, G: int, prefix: int, left: int | None, quantized: bool
) -> Plan | None:
    """How one launch of a decoding step is cut; None where its tile does not fit one.

    `pieces` is what the longest prefix is cut into: a shorter one into fewer, each of half to one and a half chunks, by
    its own length and that of a slot alone.
    """
    rows = each * G
    cut = tile("decode", dtype, D, quantized)
    if cut.M == 1 or each > DECODE_ROWS or rows > DECODE_TILE:
        return None
    M = max(16, 1 << (rows - 1).bit_length())
    reach = prefix if left is None else min(prefix, left + cut.N)  # its first block may begin before the window
    chunk = max(LEAST_CHUNK, -(-reach // (MOST_PIECES * cut.N)) * cut.N)
    pieces = max(1, (reach + chunk // 2) // chunk)
    return Plan(Tile(M, cut.N, cut.warps, cut.stages), runs, pieces, chunk, runs * K * pieces, True)
