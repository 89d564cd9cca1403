"""Tiles of the adapters' kernels: the one place where a measurement changes them."""

from __future__ import annotations

from dataclasses import dataclass

STAGES = 2
PROGRAMS = 1024  # a reduction is cut into pieces until there are so many: they are short, and wait for memory
GRAD_PROGRAMS = 1024  # these are short and many: the partial sums they write are small beside what they read
GRAD_SPLITS = 32  # most partial sums of a gradient over the rows
SPLIT_COLUMNS = 256  # fewest features, and rows, worth a partial sum
SPLIT_ROWS = 256


@dataclass(frozen=True)
class Tile:
    BM: int
    BC: int = 64
    BR: int = 16
    BN: int = 64
    splits: int = 1
    width: int = 64  # features of a split, whole tiles
    tiles: int = 1  # of BN columns, one after another in a program
    programs: int = 0  # without the splits
    warps: int = 4


def down(M: int, C: int, R: int, wide: bool, members: int = 1) -> Tile:
    """x [M, C] A^T [C, R]; few rows share the features out among programs. wide: x is float32, whose products are made
    outside the tensor cores and need more registers."""
    BM, BC, BR = _rows(M), 64, _ranks(R, 32 if wide else 64)
    programs = _cdiv(M, BM) * _cdiv(R, BR) * members
    wanted = max(1, min(PROGRAMS // max(programs, 1), _cdiv(C, SPLIT_COLUMNS)))
    width = max(1, _cdiv(_cdiv(C, BC), wanted)) * BC
    return Tile(BM, BC, BR, splits=max(1, _cdiv(C, width)), width=width, warps=_warps(BR, wide))


def up(M: int, R: int) -> Tile:
    """y [M, N] += x A^T [M, R] B^T [R, N]: bound by y's bytes."""
    return Tile(_rows(M), BR=_ranks(R, 64), BN=64, tiles=4 if M > 32 else 1, warps=8 if R > 16 else 4)


def grads(M: int, products: list[tuple[int, int]], wide: bool) -> Tile:
    """(features, rank) of each product [rank, M] [M, features]; the rows are shared out among programs."""
    BR = _ranks(max(R for _, R in products), 32 if wide else 64)
    BC = 64 if wide else 128 if BR > 16 else 256  # the partner is taken apart once for so many features
    programs = sum(_cdiv(C, BC) * _cdiv(R, BR) for C, R in products)
    splits = max(1, min(GRAD_SPLITS, _cdiv(M, SPLIT_ROWS), _cdiv(GRAD_PROGRAMS, max(programs, 1))))
    return Tile(32, BC, BR, splits=splits, programs=programs, warps=_warps(BR, wide))


def _rows(M: int) -> int:
    return 64 if M > 32 else 32 if M > 16 else 16


def _ranks(R: int, most: int) -> int:
    return min(most, max(16, 1 << (R - 1).bit_length()))


def _warps(BR: int, wide: bool) -> int:
    return 8 if (32 if wide else 64) <= BR else 4


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
