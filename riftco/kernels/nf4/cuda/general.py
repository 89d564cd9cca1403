"""Up to 64 rows of any dtype on a weight of any layout: W is decoded element by element inside the product."""

import triton
import triton.language as tl
from torch import Tensor

from ..._dot import dot
from ..._launch import as_rows, cdiv, on
from ..route import Route
from . import scratch

STEP_BYTES = 128  # of a row of x, multiplied at once: float32 products are made of registers alone


@triton.jit
def _forward(
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
        live = (n < N)[None, :] & (k < K)[:, None]
        w = scratch.elements(codes_ptr, absmax_ptr, n[None, :] * K + k[:, None], live, BLOCK_SIZE)
        acc += dot(x, w.to(x.dtype))
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _backward(
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
        live = (n < N)[:, None] & (k < K)[None, :]
        w = scratch.elements(codes_ptr, absmax_ptr, n[:, None] * K + k[None, :], live, BLOCK_SIZE)
        acc += dot(d_y, w.to(d_y.dtype))
    tl.store(d_x_ptr + m[:, None] * K + k[None, :], acc, mask=(m < M)[:, None] & (k < K)[None, :])


def forward(
    x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, y: Tensor, block_size: int, r: Route
) -> None:
    M, N, K, t = x.shape[:-1].numel(), y.shape[-1], x.shape[-1], r.tile
    rows, inner, stride_o, stride_i = as_rows(x)
    with on(x):
        _forward[(cdiv(M, t.rows) * cdiv(N, t.outputs),)](
            rows, codes, absmax, bias, y, inner, stride_o, stride_i, rows.stride(-1), M, N, K,
            BLOCK_SIZE=block_size, HAS_BIAS=bias is not None, BM=t.rows, BN=t.outputs,
            BK=STEP_BYTES // x.element_size(), num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip


def backward(d_y: Tensor, codes: Tensor, absmax: Tensor, d_x: Tensor, block_size: int, r: Route) -> None:
    M, N, K, t = d_y.shape[:-1].numel(), d_y.shape[-1], d_x.shape[-1], r.tile
    rows, inner, stride_o, stride_i = as_rows(d_y)
    with on(d_y):
        _backward[(cdiv(M, t.rows) * cdiv(K, t.outputs),)](
            rows, codes, absmax, d_x, inner, stride_o, stride_i, rows.stride(-1), M, N, K,
            BLOCK_SIZE=block_size, BM=t.rows, BN=STEP_BYTES // d_y.element_size(), BK=t.outputs,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
