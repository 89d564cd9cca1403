"""Rows in Triton. Every row that is written is written once, by one program; sums run in the order of the ids."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import cdiv, next_power_of_2, on

BLOCK = 1024  # values of a row that a program takes
AHEAD = 8  # rows that it loads before it adds the first


@triton.jit
def _gather(out_ptr, x_ptr, ids_ptr, rows, C, stride_x, stride_c, BLOCK: tl.constexpr):
    """out[i] = x[ids[i]], NaN where there is no such row."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + i).to(tl.int64)
    there = (row >= 0) & (row < rows)
    x = tl.load(x_ptr + row * stride_x + c * stride_c, mask=(c < C) & there, other=float("nan"))
    tl.store(out_ptr + i * C + c, x, mask=c < C)


@triton.jit
def _segment_sums(
    out_ptr, d_ptr, order_ptr, bounds_ptr, padding, C, stride_d, stride_c,
    BY_FREQUENCY: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[r] = sum of d[order[j]] for j from bounds[r] to bounds[r + 1], one after the other."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(bounds_ptr + r)
    last = tl.load(bounds_ptr + r + 1)
    end = tl.where(r == padding, first, last)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(first, end, AHEAD):
        for k in tl.static_range(AHEAD):
            live = start + k < end
            i = tl.load(order_ptr + start + k, mask=live, other=0)
            total += tl.load(d_ptr + i * stride_d + c * stride_c, mask=(c < C) & live, other=0.0).to(tl.float32)
    if BY_FREQUENCY:
        total /= tl.maximum(last - first, 1).to(tl.float32)
    tl.store(out_ptr + r * C + c, total, mask=c < C)


@triton.jit
def _scatter(out_ptr, x_ptr, rows_ptr, owner_ptr, C, sx, sxc, sr, src, BLOCK: tl.constexpr):
    """out[r] = rows[owner[r]], or x[r] where no one owns it."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    owner = tl.load(owner_ptr + r)
    if owner >= 0:
        value = tl.load(rows_ptr + owner * sr + c * src, mask=c < C)
    else:
        value = tl.load(x_ptr + r * sx + c * sxc, mask=c < C)
    tl.store(out_ptr + r * C + c, value, mask=c < C)


@triton.jit
def _unscatter(out_ptr, d_ptr, ids_ptr, owner_ptr, rows, C, sd, sdc, TAKE: tl.constexpr, BLOCK: tl.constexpr):
    """TAKE: out[i] = d[ids[i]] if i owns that row, else 0. Otherwise out[r] = d[r] unless someone owns it."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if TAKE:
        row = tl.load(ids_ptr + i).to(tl.int64)
        there = (row >= 0) & (row < rows)
        keep = there & (tl.load(owner_ptr + row, mask=there, other=-1) == i)
    else:
        row = i
        keep = tl.load(owner_ptr + i) < 0
    value = tl.load(d_ptr + row * sd + c * sdc, mask=(c < C) & keep, other=0.0)
    tl.store(out_ptr + i * C + c, value, mask=c < C)


def _grid(rows: int, C: int) -> tuple[tuple[int, int], int]:
    block = min(BLOCK, max(next_power_of_2(C), 16))
    return (rows, cdiv(C, block)), block


def forward(weight: Tensor, ids: Tensor) -> Tensor:
    C = weight.shape[1]
    out = weight.new_empty(*ids.shape, C)
    if out.numel():
        flat = ids.reshape(-1).contiguous()  # a view of one stride would be flat, too
        grid, block = _grid(len(flat), C)
        with on(weight):
            _gather[grid](out, weight, flat, weight.shape[0], C, *weight.stride(), BLOCK=block)
    return out


def backward(d_out: Tensor, ids: Tensor, rows: int, padding_idx: int | None, by_frequency: bool) -> Tensor:
    C = d_out.shape[1]
    out = d_out.new_empty(rows, C)
    if not out.numel():
        return out
    # a stable sort keeps the order of equal ids; ids outside fall before or behind all rows
    ordered, order = torch.sort(ids.contiguous(), stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(rows + 1, device=ids.device, dtype=ids.dtype))
    grid, block = _grid(rows, C)
    padding = -1 if padding_idx is None else padding_idx
    with on(d_out):
        _segment_sums[grid](
            out, d_out, order, bounds, padding, C, *d_out.stride(),
            BY_FREQUENCY=by_frequency, AHEAD=AHEAD, BLOCK=block,
        )  # fmt: skip
    return out


def _owners(ids: Tensor, rows: int) -> Tensor:
    """spec.owners; ids outside own nothing. A maximum of integers does not depend on its order."""
    place = torch.where((ids >= 0) & (ids < rows), ids.long(), rows)
    none = torch.full((rows + 1,), -1, dtype=torch.int64, device=ids.device)
    return none.scatter_reduce_(0, place, torch.arange(len(ids), device=ids.device), "amax")[:rows]


def scatter(x: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    owner = _owners(ids, len(x))
    out = x.new_empty(x.shape)
    if out.numel():
        grid, block = _grid(*x.shape)
        with on(x):
            _scatter[grid](out, x, rows, owner, x.shape[1], *x.stride(), *rows.stride(), BLOCK=block)
    return out, owner


def scatter_backward(d_out: Tensor, ids: Tensor, owner: Tensor, need_x: bool, need_rows: bool) -> tuple[Tensor, Tensor]:
    N, C = d_out.shape
    ids = ids.contiguous()
    d_x = d_out.new_empty(N, C) if need_x else d_out.new_empty(0)
    d_rows = d_out.new_empty(len(ids), C) if need_rows else d_out.new_empty(0)
    with on(d_out):
        for out, take in ((d_x, False), (d_rows, True)):
            if out.numel():
                grid, block = _grid(*out.shape)
                _unscatter[grid](out, d_out, ids, owner, N, C, *d_out.stride(), TAKE=take, BLOCK=block)
    return d_x, d_rows
