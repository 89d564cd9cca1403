"""What a weight in a GGUF block format and its product mean, in plain torch.

M rows, W [N, K] held as uint8 [N, bytes of a row]; K is a multiple of the format's block, so blocks end with their row.
W is the format's float32 value (gguf.dequantize's, bit for bit), rounded once to dtype.
"""

import torch
from torch import Tensor

from .formats import FORMATS


def dequantize(packed: Tensor, format: str, N: int, K: int, dtype: torch.dtype) -> Tensor:
    """uint8 [N, bytes] -> [N, K]."""
    f = FORMATS[format]
    out = torch.empty(N * K // f.block, f.block, dtype=torch.float32, device=packed.device)
    return f.decode(packed.reshape(-1, f.bytes), out).view(N, K).to(dtype)


def forward(x: Tensor, packed: Tensor, bias: Tensor | None, format: str, N: int, K: int) -> Tensor:
    """x [..., K] -> y [..., N] = x W^T + bias, with W dequantised to x's dtype and bias cast to it."""
    w = dequantize(packed, format, N, K, x.dtype)
    return torch.nn.functional.linear(x, w, None if bias is None else bias.to(x.dtype))


def backward(d_y: Tensor, packed: Tensor, format: str, N: int, K: int) -> Tensor:
    """d_y [..., N] -> d_x [..., K] = d_y W."""
    return d_y @ dequantize(packed, format, N, K, d_y.dtype)
