"""What an NF4 weight and its product mean, in plain torch. M rows; W [N, K] is stored flattened, two codes a byte.

Element e of the flattened weight has its code in byte e // 2, the even element in the high nibble, and its float32
absmax in block e // block_size; blocks run on across rows. W = TABLE[code] * absmax in float32, rounded once to dtype.
"""

import torch
from torch import Tensor

# The quantiles of N(0, 1) of Dettmers et al. 2023, appendix E, scaled to [-1, 1], with an exact zero.
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
TABLE = torch.tensor(CODE, dtype=torch.float32)


def dequantize(codes: Tensor, absmax: Tensor, numel: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """codes uint8 [ceil(numel / 2)], absmax float32 [ceil(numel / block_size)] -> the flattened weight [numel]."""
    packed = codes.reshape(-1)
    code = torch.stack((packed >> 4, packed & 15), -1).reshape(-1)[:numel]
    scale = absmax.unsqueeze(-1).expand(-1, block_size).reshape(-1)[:numel]
    return (TABLE.to(codes.device)[code.int()] * scale).to(dtype)


def forward(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, N: int, K: int, block_size: int) -> Tensor:
    """x [..., K] -> y [..., N] = x W^T + bias, with W dequantised to x's dtype and bias cast to it."""
    w = dequantize(codes, absmax, N * K, block_size, x.dtype).view(N, K)
    return torch.nn.functional.linear(x, w, None if bias is None else bias.to(x.dtype))


def backward(d_y: Tensor, codes: Tensor, absmax: Tensor, N: int, K: int, block_size: int) -> Tensor:
    """d_y [..., N] -> d_x [..., K] = d_y W."""
    return d_y @ dequantize(codes, absmax, N * K, block_size, d_y.dtype).view(N, K)
