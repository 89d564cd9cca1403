"""Tiles of the adapters' kernels: the one place where a measurement changes them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .._launch import cdiv

PROGRAMS = 512  # a reduction is cut into pieces until there are so many: they are short, and wait for memory
GRAD_PROGRAMS = 512
ALONE_PROGRAMS = 1024  # several for each place a large GPU has, so that the last ones are not waited for
GRAD_SPLITS = 16  # most partial sums of a gradient over the rows
SPLIT_COLUMNS = 256  # fewest features, and rows, worth a partial sum
SPLIT_ROWS = 256


@dataclass(frozen=True)
class Tile:
    BM: int
    BC: int = 64
    BR: int = 16
    BR_B: int = 16  # of the gradients of B, whose ranks do not stand side by side
    BN: int = 64
    splits: int = 1
    width: int = 64  # features of a split, whole tiles
    tiles: int = 1  # one after another in a program
    held: bool = False  # all ranks at once, for the length of a program
    programs: int = 0  # without the splits
    warps: int = 4
    stages: int = 1


@functools.lru_cache(1024)  # these are asked for each product of a step
def down(M: int, widths: tuple[int, ...], R: int, wide: bool, together: int = 1) -> Tile:
    """x [M, C] A^T [C, R] of `together` adapters over one x, or of one over each of several that are `widths` wide; few
    rows share the features out among programs. wide: x is float32, whose products are made outside the tensor cores and
    need more registers."""
    most = (32 if wide else 64) // (1 if together == 1 else 2 if together < 4 else 4)
    BM, BR = _rows(M), _ranks(R, max(16, most))
    held = together * BR <= (64 if wide else 96)  # that many ranks are on their way beside x, in 99 KiB
    BC = 64
    C = max(widths)
    programs = cdiv(cdiv(M, BM) * cdiv(R, BR) * sum(widths), max(C, 1))  # as many as are C wide
    wanted = max(1, min(PROGRAMS // max(programs, 1), cdiv(C, SPLIT_COLUMNS)))
    width = max(1, cdiv(cdiv(C, BC), wanted)) * BC
    warps = _warps(BR * together, wide)
    stages = 1 if not held else 2 if wide else 3
    return Tile(BM, BC, BR, splits=max(1, cdiv(C, width)), width=width, warps=warps, stages=stages)


@functools.lru_cache(1024)
def up(M: int, R: int) -> Tile:
    """y [M, N] += x A^T [M, R] B^T [R, N]: bound by y's bytes."""
    return Tile(_rows(M), BR=_ranks(R, 64), tiles=4 if M > 32 and R <= 16 else 1)


@functools.lru_cache(1024)
def alone(M: int, widths: tuple[int, ...], R: int, wide: bool, together: int = 1) -> Tile:
    """y [M, N] = x A^T [M, R] B^T [R, N] of members N wide, or the sum of `together`: bound by y's bytes."""
    ranks = together * _ranks(R, 256)
    most = 32 if wide else 64
    held = most >= R and ranks <= 256  # their columns fit 64 KiB, beside what is on its way out
    BM, BN, BR = 64, 64 if wide or ranks > 128 else 128, _ranks(R, most if held else 32)
    made = cdiv(M, BM) * sum(cdiv(N, BN) for N in widths)
    return Tile(BM, BR=BR, BN=BN, tiles=max(1, min(8, made // ALONE_PROGRAMS)), held=held)


@functools.lru_cache(1024)
def grads(M: int, products: tuple[tuple[int, int], ...], wide: bool, first: bool) -> Tile:
    """(features, rank) of each product [rank, M] [M, features]; the rows are shared out among programs. first: one of
    them is that of all A."""
    most = 32 if wide else 64
    BR_B = _ranks(max((R for _, R in products[first:]), default=1), most)
    BR = _ranks(products[0][1], most) if first else BR_B
    BC = 64 if wide else 128
    programs = sum(cdiv(C, BC) * cdiv(R, BR if i == 0 else BR_B) for i, (C, R) in enumerate(products))
    splits = max(1, min(GRAD_SPLITS, cdiv(M, SPLIT_ROWS), cdiv(GRAD_PROGRAMS, max(programs, 1))))
    warps = _warps(max(BR, BR_B), wide)
    return Tile(32 if wide else 64, BC, BR, BR_B, splits=splits, programs=programs, warps=warps, stages=2)


def _rows(M: int) -> int:
    return 64 if M > 32 else 32 if M > 16 else 16


def _ranks(R: int, most: int) -> int:
    return min(most, max(16, 1 << (R - 1).bit_length()))


def _warps(BR: int, wide: bool) -> int:
    return 8 if (32 if wide else 64) <= BR else 4
