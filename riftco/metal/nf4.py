"""Launches csrc/metal/nf4.metal; the contract is riftco/kernels/nf4/op.py."""

import torch
from torch import Tensor

from . import _quantized


def forward(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, N: int, K: int, block_size: int) -> Tensor:
    return _quantized.product("nf4", "nf4", x, codes.contiguous(), absmax.contiguous(), bias, N, K, _shift(block_size))


def backward(d_y: Tensor, codes: Tensor, absmax: Tensor, N: int, K: int, block_size: int) -> Tensor:
    return _quantized.product_dx("nf4", "nf4", d_y, codes.contiguous(), absmax.contiguous(), N, K, _shift(block_size))


def dequantize(codes: Tensor, absmax: Tensor, numel: int, block_size: int, dtype: torch.dtype) -> Tensor:
    parts = codes.contiguous(), absmax.contiguous()
    return _quantized.values("nf4", "nf4", *parts, 1, numel, _shift(block_size), dtype)[0]


def _shift(block_size: int) -> int:
    return block_size.bit_length() - 1
