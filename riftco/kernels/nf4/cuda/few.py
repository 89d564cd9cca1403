"""Up to 64 rows of x in 16 bits, blocks within rows of W: W is decoded inside the product, each byte read once."""

import triton
import triton.language as tl
from torch import Tensor

from ... import _splits
from ..._dot import dot
from ..._launch import as_rows, cdiv, on
from ..route import STEP, Route
from . import lookup

ZEROS = tl.constexpr(0x77)  # two codes of the value 0


@triton.jit
def _widen(pair, like: tl.constexpr):
    """int32 of two neighbours in 16 bits -> float32 of the first and of the second."""
    if like == tl.bfloat16:
        even, odd = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        first, second = _split(pair, like)
        even, odd = first.to(tl.float32), second.to(tl.float32)
    return even, odd


@triton.jit
def _split(pair, like: tl.constexpr):
    even = (pair & 0xFFFF).to(tl.uint16).to(like, bitcast=True)
    odd = ((pair >> 16) & 0xFFFF).to(tl.uint16).to(like, bitcast=True)
    return even, odd


@triton.jit
def _row(  # half: bytes of a row of W, an argument of its own so that its alignment is known; blocks: of a row
    x_ptr, codes_ptr, absmax_ptr, bias_ptr, y_ptr, N, half, blocks,
    BLOCK_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """y[n] = sum over k of x[k] W[n, k]: each lane takes BYTES bytes of a row, within one block, at a time."""
    like: tl.constexpr = x_ptr.dtype.element_ty
    lane = tl.arange(0, 32)[:, None, None]
    byte = tl.arange(0, BYTES)[None, None, :]
    word = tl.arange(0, BYTES // 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[None, :, None]
    acc = tl.zeros([32, ROWS, 1], tl.float32)
    for start in range(0, half, 32 * BYTES):
        at = start + lane * BYTES
        inside = at < half
        live = inside & (row < N)
        codes = tl.load(
            codes_ptr + row * half + at + byte, mask=tl.broadcast_to(live, [32, ROWS, BYTES]), other=ZEROS,
            eviction_policy="evict_first",
        )  # fmt: skip
        # loaded in this shape a lane's pairs stay in that lane
        pair = tl.load(
            x_ptr.to(tl.pointer_type(tl.int32)) + at + word, mask=tl.broadcast_to(inside, [32, BYTES // 4, 4]), other=0
        )
        even, odd = _widen(tl.reshape(pair, [32, 1, BYTES]), like)
        high, low = lookup.floats(codes)
        part = tl.sum(high * even + low * odd, 2, keep_dims=True)
        scale = tl.load(absmax_ptr + row * blocks + 2 * at // BLOCK_SIZE, mask=live, other=0.0)
        acc += part * scale
    y = tl.sum(acc, 0, keep_dims=True)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, y, mask=row < N)


@triton.jit
def _forward(
    x_ptr, codes_ptr, absmax_ptr, bias_ptr, y_ptr, M, N, K, half, blocks, part,
    BLOCK_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[s, M, N] = sum over the s-th part of k of x[m, k] W[n, k], as W x^T: codes become the register operand.

    Even and odd k are two products; each step lies within a block, whose absmax scales the sum.
    """
    like: tl.constexpr = x_ptr.dtype.element_ty
    tiles = tl.cdiv(N, BN)
    n = (tl.program_id(0) % tiles).to(tl.int64) * BN + tl.arange(0, BN)
    s = (tl.program_id(0) // tiles).to(tl.int64)
    m = tl.arange(0, BM)
    byte = tl.arange(0, BK // 2)
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(0, part, BK):
        k = s * part + start
        live = k < K
        at = k // 2 + byte
        codes = tl.load(codes_ptr + n[:, None] * half + at[None, :], mask=(n < N)[:, None] & live, other=ZEROS)
        pair = tl.load(
            x_ptr.to(tl.pointer_type(tl.int32)) + m[None, :] * half + at[:, None],
            mask=(m < M)[None, :] & live, other=0,
        )  # fmt: skip
        even, odd = _split(pair, like)
        high, low = lookup.halves(codes, like)
        scale = tl.load(absmax_ptr + n * blocks + k // BLOCK_SIZE, mask=(n < N) & live, other=0.0)
        acc += (dot(high, even) + dot(low, odd)) * scale[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + (s * M + m)[None, :] * N + n[:, None], acc, mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def _backward(
    d_y_ptr, codes_ptr, absmax_ptr, d_x_ptr, inner, stride_o, stride_i, stride_n, M, N, K, half, blocks, part,
    BLOCK_SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """d_x[s, M, K] = sum over the s-th part of n of d_y[m, n] W[n, k]; a tile of k is in one block of each row."""
    like: tl.constexpr = d_y_ptr.dtype.element_ty
    tiles = K // BK
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    s = (tl.program_id(0) // tiles).to(tl.int64)
    m = tl.arange(0, BM)
    byte = tile * (BK // 2) + tl.arange(0, BK // 2)
    line_ptr = d_y_ptr + (m // inner).to(tl.int64) * stride_o + (m % inner).to(tl.int64) * stride_i
    stop = tl.minimum((s + 1) * part, N)
    even = tl.zeros([BM, BK // 2], tl.float32)
    odd = tl.zeros([BM, BK // 2], tl.float32)
    for start in range(0, part, BN):
        n = s * part + start + tl.arange(0, BN)
        d_y = tl.load(line_ptr[:, None] + n[None, :] * stride_n, mask=(m < M)[:, None] & (n < stop)[None, :], other=0.0)
        codes = tl.load(codes_ptr + n[:, None] * half + byte[None, :], mask=(n < stop)[:, None], other=ZEROS)
        scale = tl.load(absmax_ptr + n * blocks + tile * BK // BLOCK_SIZE, mask=n < stop, other=0.0)
        high, low = lookup.floats(codes)  # exact: of 16-bit values the product would be rounded twice
        even += dot(d_y, (high * scale[:, None]).to(like))
        odd += dot(d_y, (low * scale[:, None]).to(like))
    k = tile * BK + tl.arange(0, BK)
    tl.store(d_x_ptr + (s * M + m)[:, None] * K + k[None, :], tl.interleave(even, odd), mask=(m < M)[:, None])


def row(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, y: Tensor, block_size: int, r: Route) -> None:
    N, K = y.shape[-1], x.shape[-1]
    with on(x):
        _row[(cdiv(N, r.tile.outputs),)](
            _in_pairs(x), codes, absmax, bias, y, N, K // 2, K // block_size,
            BLOCK_SIZE=block_size, HAS_BIAS=bias is not None, ROWS=r.tile.outputs, BYTES=r.tile.rows,
            num_warps=r.tile.warps, num_stages=r.tile.stages,
        )  # fmt: skip


def forward(
    x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, y: Tensor, block_size: int, r: Route
) -> None:
    M, N, K = x.shape[:-1].numel(), y.shape[-1], x.shape[-1]
    parts = _splits.parts_for(y, r.splits)
    with on(x):
        _forward[(cdiv(N, r.tile.outputs) * r.splits,)](
            _in_pairs(x), codes, absmax, bias, parts, M, N, K, K // 2, K // block_size, r.part,
            BLOCK_SIZE=block_size, HAS_BIAS=bias is not None and r.splits == 1, BM=r.tile.rows, BN=r.tile.outputs,
            BK=STEP, num_warps=r.tile.warps, num_stages=r.tile.stages,
        )  # fmt: skip
    if r.splits > 1:
        _splits.join(parts, bias, y)


def backward(d_y: Tensor, codes: Tensor, absmax: Tensor, d_x: Tensor, block_size: int, r: Route) -> None:
    M, N, K = d_y.shape[:-1].numel(), d_y.shape[-1], d_x.shape[-1]
    parts = _splits.parts_for(d_x, r.splits)
    rows, inner, stride_o, stride_i = as_rows(d_y)
    with on(d_y):
        _backward[(K // r.tile.outputs * r.splits,)](
            rows, codes, absmax, parts, inner, stride_o, stride_i, rows.stride(-1), M, N, K, K // 2,
            K // block_size, r.part,
            BLOCK_SIZE=block_size, BM=r.tile.rows, BN=STEP, BK=r.tile.outputs,
            num_warps=r.tile.warps, num_stages=r.tile.stages,
        )  # fmt: skip
    if r.splits > 1:
        _splits.join(parts, None, d_x)


def _in_pairs(x: Tensor) -> Tensor:
    """x as whole 32-bit words of two neighbours: at most 64 rows are copied where they lie otherwise."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 4 else x
