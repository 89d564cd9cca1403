"""Launches csrc/metal/quantized.h's kernels for the formats whose shaders include it."""

import torch
from torch import Tensor

from ..kernels._launch import as_rows
from . import launch
from ._matmul import TILE_THREADS, tiles

GEMV_ROWS = 8  # quantized.h


def product(
    shader: str, name: str, x: Tensor, data: Tensor, scales: Tensor | None, bias: Tensor | None, N: int, K: int,
    block: int,
) -> Tensor:  # fmt: skip
    """x [..., K] -> x W^T + bias [..., N] in x's dtype. Few rows take the kernel that reads W's elements once."""
    M = x.shape[:-1].numel()
    y = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    if K == 0:
        return y.zero_() if bias is None else y.copy_(bias)
    rows, *strides = as_rows(x)
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    few = M <= GEMV_ROWS
    launch(
        shader, f"{name}_{'gemv' if few else 'gemm'}", [x.dtype], [y], [rows, data, scales, bias],
        [*strides, rows.stride(-1), M, N, K, block, bias is not None],
        groups=-(-N // 4) if few else tiles(M, N), threads=TILE_THREADS, exact=True,
    )  # fmt: skip
    return y


def product_dx(
    shader: str, name: str, d_y: Tensor, data: Tensor, scales: Tensor | None, N: int, K: int, block: int
) -> Tensor:
    """d_y [..., N] -> d_y W [..., K] in d_y's dtype."""
    M = d_y.shape[:-1].numel()
    d_x = torch.empty(*d_y.shape[:-1], K, dtype=d_y.dtype, device=d_y.device)
    if d_x.numel() == 0:
        return d_x
    if N == 0:
        return d_x.zero_()
    rows, *strides = as_rows(d_y)
    launch(
        shader, f"{name}_gemm_dx", [d_y.dtype], [d_x], [rows, data, scales],
        [*strides, rows.stride(-1), M, N, K, block, 0], groups=tiles(M, K), threads=TILE_THREADS, exact=True,
    )  # fmt: skip
    return d_x


def values(
    shader: str, name: str, data: Tensor, scales: Tensor | None, N: int, K: int, block: int, dtype: torch.dtype
) -> Tensor:
    """W [N, K] in `dtype`."""
    out = torch.empty(N, K, dtype=dtype, device=data.device)
    if out.numel():
        launch(
            shader, f"{name}_dequantize", [dtype], [out], [data, scales], [N, K, block],
            groups=-(-out.numel() // 1024), threads=out.numel(),
        )  # fmt: skip
    return out
