"""GGUF weights on the CPU: a stretch of blocks at a time is decoded into a small scratch and multiplied there."""

import torch
from torch import Tensor

from .. import _frozen
from .formats import FORMATS, Format

STEP = 1 << 17  # elements decoded at once, so that they stay in the cache; a multiple of every block


def forward(x: Tensor, packed: Tensor, bias: Tensor | None, format: str, N: int, K: int) -> Tensor:
    f = FORMATS[format]

    def rows(lo: int, hi: int, scratch: Tensor) -> Tensor:
        return _decode(packed[lo:hi], f, scratch[: (hi - lo) * K]).view(hi - lo, K)

    return _frozen.forward(x, bias, N, K, _frozen.cpu_scratch(x), rows)


def backward(d_y: Tensor, packed: Tensor, format: str, N: int, K: int) -> Tensor:
    f = FORMATS[format]
    blocks = packed.reshape(N, K // f.block, f.bytes)

    def columns(lo: int, hi: int, scratch: Tensor) -> Tensor:
        part = blocks[:, lo // f.block : hi // f.block]
        return _decode(part, f, scratch[: N * (hi - lo)]).view(N, hi - lo)

    return _frozen.backward(d_y, N, K, _frozen.cpu_scratch(d_y), columns, f.block)


def dequantize(packed: Tensor, format: str, N: int, K: int, dtype: torch.dtype) -> Tensor:
    return _decode(packed, FORMATS[format], torch.empty(N * K, dtype=dtype)).view(N, K)


def _decode(packed: Tensor, f: Format, out: Tensor) -> Tensor:
    """Packed blocks -> their values, in `out`."""
    blocks, lines = packed.reshape(-1, f.bytes), out.view(-1, f.block)
    step = STEP // f.block
    exact = None if out.dtype == torch.float32 else torch.empty(min(step, blocks.shape[0]), f.block)
    for lo in range(0, blocks.shape[0], step):
        part, source = lines[lo : lo + step], blocks[lo : lo + step]
        if exact is None:
            f.decode(source, part)
        else:
            part.copy_(f.decode(source, exact[: part.shape[0]]))
    return out
