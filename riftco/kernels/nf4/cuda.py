"""NF4 in Triton: for few rows the weight is decoded in registers inside the product, for many into a small scratch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dot import dot
from .._launch import as_rows, on

BLOCK_OUT = 64  # output features (forward) or input features (d_x) of a tile
BLOCK_RED = 64  # of the reduced dimension, decoded at once
BLOCK_ELEMENTS = 1024
FUSED_ROWS = 64  # up to so many rows of x a product decodes W itself
SCRATCH_BYTES = 32 << 20  # of decoded weight, for the length of a call


@triton.jit
def _value(code):
    """Table look-up as a tree of selects on the four bits: no memory, the same on every target."""
    one, two, four = (code & 1) != 0, (code & 2) != 0, (code & 4) != 0
    a = tl.where(one, -0.6961928009986877, -1.0)
    b = tl.where(one, -0.39491748809814453, -0.5250730514526367)
    c = tl.where(one, -0.18477343022823334, -0.28444138169288635)
    d = tl.where(one, 0.0, -0.09105003625154495)
    low = tl.where(four, tl.where(two, d, c), tl.where(two, b, a))
    a = tl.where(one, 0.16093020141124725, 0.07958029955625534)
    b = tl.where(one, 0.33791524171829224, 0.24611230194568634)
    c = tl.where(one, 0.5626170039176941, 0.44070982933044434)
    d = tl.where(one, 1.0, 0.7229568362236023)
    high = tl.where(four, tl.where(two, d, c), tl.where(two, b, a))
    return tl.where((code & 8) != 0, high, low)


@triton.jit
def _decode(codes_ptr, absmax_ptr, element, mask, BLOCK_SIZE: tl.constexpr):
    """float32 values of the flattened weight's elements (int64); 0 where masked."""
    byte = tl.load(codes_ptr + element // 2, mask=mask, other=0).to(tl.int32)
    code = tl.where(element % 2 == 0, byte >> 4, byte & 15)
    scale = tl.load(absmax_ptr + element // BLOCK_SIZE, mask=mask, other=0.0)
    return tl.where(mask, _value(code) * scale, 0.0)


@triton.jit
def _nf4_fwd(
    x_ptr, codes_ptr, absmax_ptr, bias_ptr, y_ptr, inner, stride_o, stride_i, stride_k, M, N, K,
    BLOCK_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BM)
    m = (tl.program_id(0) % tiles_m).to(tl.int64) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) // tiles_m).to(tl.int64) * BN + tl.arange(0, BN)
    row_ptr = x_ptr + (m // inner) * stride_o + (m % inner) * stride_i
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK).to(tl.int64)
        x = tl.load(row_ptr[:, None] + k[None, :] * stride_k, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        w = _decode(codes_ptr, absmax_ptr, n[None, :] * K + k[:, None], (n < N)[None, :] & (k < K)[:, None], BLOCK_SIZE)
        acc += dot(x, w.to(x.dtype))
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _nf4_bwd(
    d_y_ptr, codes_ptr, absmax_ptr, d_x_ptr, inner, stride_o, stride_i, stride_n, M, N, K,
    BLOCK_SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BM)
    m = (tl.program_id(0) % tiles_m).to(tl.int64) * BM + tl.arange(0, BM)
    k = (tl.program_id(0) // tiles_m).to(tl.int64) * BK + tl.arange(0, BK)
    row_ptr = d_y_ptr + (m // inner) * stride_o + (m % inner) * stride_i
    acc = tl.zeros([BM, BK], tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN).to(tl.int64)
        d_y = tl.load(row_ptr[:, None] + n[None, :] * stride_n, mask=(m < M)[:, None] & (n < N)[None, :], other=0.0)
        w = _decode(codes_ptr, absmax_ptr, n[:, None] * K + k[None, :], (n < N)[:, None] & (k < K)[None, :], BLOCK_SIZE)
        acc += dot(d_y, w.to(d_y.dtype))
    tl.store(d_x_ptr + m[:, None] * K + k[None, :], acc, mask=(m < M)[:, None] & (k < K)[None, :])


@triton.jit
def _nf4_tile(
    codes_ptr, absmax_ptr, out_ptr, K, row0, col0, cols, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[n, k] = W[row0 + n, col0 + k], k < cols: a program decodes a stretch of one row."""
    tiles = tl.cdiv(cols, BLOCK)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    k = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = _decode(codes_ptr, absmax_ptr, (row0 + n) * K + col0 + k, k < cols, BLOCK_SIZE)
    tl.store(out_ptr + n * cols + k, value.to(out_ptr.dtype.element_ty), mask=k < cols)


def _block_rows(M: int) -> int:
    return 16 if M <= 16 else 32 if M <= 32 else 64


def forward(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, N: int, K: int, block_size: int) -> Tensor:
    M = x.shape[:-1].numel()
    y = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    if route(M, K) == "scratch":
        lines, out = x.reshape(M, K), y.view(M, N)
        for lo, hi in _stretches(N, K, x.dtype):
            w = decode(codes, absmax, (lo, hi), (0, K), K, block_size, x.dtype).t()
            if bias is None:
                torch.mm(lines, w, out=out[:, lo:hi])
            else:
                torch.addmm(bias[lo:hi], lines, w, out=out[:, lo:hi])
        return y
    rows, inner, stride_o, stride_i = as_rows(x)
    BM = _block_rows(M)
    with on(x):
        _nf4_fwd[(triton.cdiv(M, BM) * triton.cdiv(N, BLOCK_OUT),)](
            rows, codes.contiguous(), absmax.contiguous(), bias, y, inner, stride_o, stride_i, rows.stride(-1), M, N, K,
            BLOCK_SIZE=block_size, HAS_BIAS=bias is not None, BM=BM, BN=BLOCK_OUT, BK=BLOCK_RED, num_stages=2,
        )  # fmt: skip
    return y


def backward(d_y: Tensor, codes: Tensor, absmax: Tensor, N: int, K: int, block_size: int) -> Tensor:
    M = d_y.shape[:-1].numel()
    d_x = torch.empty(*d_y.shape[:-1], K, dtype=d_y.dtype, device=d_y.device)
    if d_x.numel() == 0:
        return d_x
    if route(M, N) == "scratch":  # by columns of W: a sum over its rows in pieces would be rounded more than once
        lines, out = d_y.reshape(M, N), d_x.view(M, K)
        for lo, hi in _stretches(K, N, d_y.dtype):
            torch.mm(lines, decode(codes, absmax, (0, N), (lo, hi), K, block_size, d_y.dtype), out=out[:, lo:hi])
        return d_x
    rows, inner, stride_o, stride_i = as_rows(d_y)
    BM = _block_rows(M)
    with on(d_y):
        _nf4_bwd[(triton.cdiv(M, BM) * triton.cdiv(K, BLOCK_OUT),)](
            rows, codes.contiguous(), absmax.contiguous(), d_x, inner, stride_o, stride_i, rows.stride(-1), M, N, K,
            BLOCK_SIZE=block_size, BM=BM, BN=BLOCK_RED, BK=BLOCK_OUT, num_stages=2,
        )  # fmt: skip
    return d_x


def route(M: int, reduced: int) -> str:
    """ "fused" decodes W inside the product, once for each tile of 64 rows; "scratch" decodes stretches of W of at most
    SCRATCH_BYTES and leaves the product to cuBLAS, which pays as soon as W would be decoded twice. An empty reduction
    stays with the kernel, which writes its zeros."""
    return "scratch" if M > FUSED_ROWS and reduced > 0 else "fused"


def _stretches(lines: int, width: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """`lines` of W in stretches that fit the scratch, `width` values each."""
    step = max(1, SCRATCH_BYTES // (width * dtype.itemsize))
    return [(lo, min(lo + step, lines)) for lo in range(0, lines, step)]


def decode(
    codes: Tensor, absmax: Tensor, rows: tuple[int, int], cols: tuple[int, int], K: int, block_size: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """W[rows, cols] in `dtype`, contiguous."""
    out = torch.empty(rows[1] - rows[0], cols[1] - cols[0], dtype=dtype, device=codes.device)
    if out.numel():
        with on(codes):
            _nf4_tile[(out.shape[0] * triton.cdiv(out.shape[1], BLOCK_ELEMENTS),)](
                codes.contiguous(), absmax.contiguous(), out, K, rows[0], cols[0], out.shape[1],
                BLOCK_SIZE=block_size, BLOCK=BLOCK_ELEMENTS,
            )  # fmt: skip
    return out


def dequantize(codes: Tensor, absmax: Tensor, numel: int, block_size: int, dtype: torch.dtype) -> Tensor:
    return decode(codes, absmax, (0, 1), (0, numel), numel, block_size, dtype)[0]
