"""Tiles of the adapters' kernels: the one place where a measurement changes them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .._launch import cdiv

STAGES = 2
PROGRAMS = 512  # a reduction is cut into pieces until there are so many: they are short, and wait for memory
GRAD_PROGRAMS = 1024  # these are short and many: the partial sums they write are small beside what they read
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
    tiles: int = 1  # of BN columns, one after another in a program
    programs: int = 0  # without the splits
    warps: int = 4


@functools.lru_cache(1024)  # these are asked for each product of a step
def down(M: int, C: int, R: int, wide: bool, members: int = 1) -> Tile:
    """x [M, C] A^T [C, R]; few rows share the features out among programs. wide: x is float32, whose products are made
    outside the tensor cores and need more registers."""
    BM, BR = _rows(M), _ranks(R, 32 if wide else 64)
    BC = 128 if BR > 32 else 64
    programs = cdiv(M, BM) * cdiv(R, BR) * members
    wanted = max(1, min(PROGRAMS // max(programs, 1), cdiv(C, SPLIT_COLUMNS)))
    width = max(1, cdiv(cdiv(C, BC), wanted)) * BC
    return Tile(BM, BC, BR, splits=max(1, cdiv(C, width)), width=width, warps=_warps(BR, wide))


@functools.lru_cache(1024)
def up(M: int, R: int) -> Tile:
    """y [M, N] += x A^T [M, R] B^T [R, N]: bound by y's bytes."""
    return Tile(_rows(M), BR=_ranks(R, 64), tiles=4 if M > 32 and R <= 16 else 1)


@functools.lru_cache(1024)
def grads(M: int, products: tuple[tuple[int, int], ...], wide: bool, first: bool) -> Tile:
    """(features, rank) of each product [rank, M] [M, features]; the rows are shared out among programs. first: one of
    them is that of all A."""
    most = 32 if wide else 64
    BR_B = _ranks(max((R for _, R in products[first:]), default=1), most)
    BR = _ranks(products[0][1], most) if first else BR_B
    BC = 64 if wide else 128 if max(BR, BR_B) > 16 else 256  # the partner is taken apart once for so many features
    programs = sum(cdiv(C, BC) * cdiv(R, BR if i == 0 else BR_B) for i, (C, R) in enumerate(products))
    splits = max(1, min(GRAD_SPLITS, cdiv(M, SPLIT_ROWS), cdiv(GRAD_PROGRAMS, max(programs, 1))))
    warps = _warps(max(BR, BR_B), wide)
    return Tile(32 if wide else 64, BC, BR, BR_B, splits=splits, programs=programs, warps=warps)


def _rows(M: int) -> int:
    return 64 if M > 32 else 32 if M > 16 else 16


def _ranks(R: int, most: int) -> int:
    return min(most, max(16, 1 << (R - 1).bit_length()))


def _warps(BR: int, wide: bool) -> int:
    return 8 if (32 if wide else 64) <= BR else 4
