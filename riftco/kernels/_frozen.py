"""Products with a frozen weight that is decoded a stretch at a time: W [N, K] is never whole in 16 or 32 bit.

Forward a stretch is some rows of W, for d_x some columns: nothing is summed over stretches, so each number is made by
one matrix product and rounded once. All stretches of a call share one scratch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ._matmul import matmul

FEW_ROWS = 16  # up to so many rows of x what a CPU has decoded should not leave the cache
FEW_BYTES, SCRATCH_BYTES = 1 << 20, 16 << 20  # of decoded weight that a CPU holds at once, for few rows and for many

# (lo, hi, scratch [elements]) -> rows or columns lo..hi of W in the product's dtype, a view of the scratch
Decode = Callable[[int, int, Tensor], Tensor]


def forward(
    x: Tensor, bias: Tensor | None, N: int, K: int, scratch_bytes: int, decode: Decode, spare: int = 0,
    onto: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y [..., N] = x W^T + bias; decode gives W[lo:hi]. The scratch has `spare` elements more than they take.

    `onto` [..., N], contiguous, takes the bias's place: the product is added into it, and it is what is returned.
    """
    rows = x.reshape(x.shape[:-1].numel(), K)
    bias = None if bias is None else bias.to(x.dtype)
    pieces = stretches(N, K * x.element_size(), scratch_bytes)
    if onto is not None:
        _add(onto.view(rows.shape[0], N), rows, pieces, K, spare, lambda *piece: decode(*piece).t())
        return onto
    if len(pieces) == 1:
        return matmul(rows, decode(0, N, x.new_empty(N * K + spare)), bias).view(*x.shape[:-1], N)
    y = torch.empty(rows.shape[0], N, dtype=x.dtype, device=x.device)
    scratch = x.new_empty(max((hi - lo for lo, hi in pieces), default=0) * K + spare)
    for lo, hi in pieces:
        matmul(rows, decode(lo, hi, scratch), None if bias is None else bias[lo:hi], y[:, lo:hi])
    return y.view(*x.shape[:-1], N)


def backward(
    d_y: Tensor, N: int, K: int, scratch_bytes: int, decode: Decode, step: int = 1, onto: Tensor | None = None
) -> Tensor:
    """d_x [..., K] = d_y W; decode gives W[:, lo:hi], lo a multiple of `step`. `onto` as in `forward`."""
    rows = d_y.reshape(d_y.shape[:-1].numel(), N)
    pieces = stretches(K, N * d_y.element_size(), scratch_bytes, step)
    if onto is not None:
        _add(onto.view(rows.shape[0], K), rows, pieces, N, 0, decode)
        return onto
    if len(pieces) == 1:
        return matmul(rows, decode(0, K, d_y.new_empty(N * K)).t()).view(*d_y.shape[:-1], K)
    d_x = torch.empty(rows.shape[0], K, dtype=d_y.dtype, device=d_y.device)
    scratch = d_y.new_empty(max((hi - lo for lo, hi in pieces), default=0) * N)
    for lo, hi in pieces:
        matmul(rows, decode(lo, hi, scratch).t(), out=d_x[:, lo:hi])
    return d_x.view(*d_y.shape[:-1], K)


def _add(
    out: Tensor, rows: Tensor, pieces: tuple[tuple[int, int], ...], reduced: int, spare: int, decode: Decode
) -> None:
    """out[:, lo:hi] += rows decode(lo, hi): the matrix product adds what lies there before it rounds."""
    scratch = rows.new_empty(max((hi - lo for lo, hi in pieces), default=0) * reduced + spare)
    for lo, hi in pieces:
        out[:, lo:hi].addmm_(rows, decode(lo, hi, scratch))


def cpu_scratch(x: Tensor) -> int:
    """Bytes of decoded weight that a CPU holds at once in a product with x [.., K]."""
    return FEW_BYTES if x.shape[:-1].numel() <= FEW_ROWS else SCRATCH_BYTES


@functools.lru_cache(1024)
def stretches(lines: int, line_bytes: int, scratch_bytes: int, step: int = 1) -> tuple[tuple[int, int], ...]:
    """0..lines in even stretches whose lines fit the scratch together, each but the last a multiple of `step`."""
    most = max(1, scratch_bytes // max(line_bytes, 1) // step)
    units = -(-lines // step)
    each = step * -(-units // max(1, -(-units // most)))
    return tuple((lo, min(lo + each, lines)) for lo in range(0, lines, max(each, 1)))
