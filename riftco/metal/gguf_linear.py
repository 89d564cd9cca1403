"""Launches csrc/metal/gguf_linear.metal; the contract is riftco/kernels/gguf_linear/op.py."""

import torch
from torch import Tensor

from ..kernels.gguf_linear.formats import FORMATS
from . import _quantized

SHADER = "gguf_linear", "gguf"


def forward(x: Tensor, packed: Tensor, bias: Tensor | None, format: str, N: int, K: int) -> Tensor:
    return _quantized.product(*SHADER, x, packed.contiguous(), None, bias, N, K, FORMATS[format].ggml_type)


def backward(d_y: Tensor, packed: Tensor, format: str, N: int, K: int) -> Tensor:
    return _quantized.product_dx(*SHADER, d_y, packed.contiguous(), None, N, K, FORMATS[format].ggml_type)


def dequantize(packed: Tensor, format: str, N: int, K: int, dtype: torch.dtype) -> Tensor:
    return _quantized.values(*SHADER, packed.contiguous(), None, N, K, FORMATS[format].ggml_type, dtype)
