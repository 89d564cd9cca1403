"""W, or a part of it, decoded into memory."""

import triton
import triton.language as tl
from torch import Tensor

from ..._launch import cdiv, on
from . import lookup

BLOCK = 1024  # elements that a program decodes
GROUP = 64  # elements of one absmax, at least, that a program decodes side by side
GROUPS = 32  # of them a program


@triton.jit
def elements(codes_ptr, absmax_ptr, element, mask, BLOCK_SIZE: tl.constexpr):
    """float32 values of the flattened weight's elements (int64); 0 where masked."""
    byte = tl.load(codes_ptr + element // 2, mask=mask, other=0).to(tl.int32)
    code = tl.where(element % 2 == 0, byte >> 4, byte & 15)
    scale = tl.load(absmax_ptr + element // BLOCK_SIZE, mask=mask, other=0.0)
    return tl.where(mask, lookup.value(code) * scale, 0.0)


@triton.jit
def _tile(
    codes_ptr, absmax_ptr, out_ptr, K, row0, col0, cols, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[n, k] = W[row0 + n, col0 + k], k < cols: a program decodes a stretch of one row, whatever its borders."""
    tiles = tl.cdiv(cols, BLOCK)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    k = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = elements(codes_ptr, absmax_ptr, (row0 + n) * K + col0 + k, k < cols, BLOCK_SIZE)
    tl.store(out_ptr + n * cols + k, value.to(out_ptr.dtype.element_ty), mask=k < cols)


@triton.jit
def _groups(
    codes_ptr, absmax_ptr, out_ptr, K, row0, col0, cols, count,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The same where rows, col0 and cols are whole groups: 16-byte stores, one absmax a group."""
    g = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    live = g < count
    each = cols // GROUP
    first = (row0 + g // each) * K + col0 + g % each * GROUP
    byte = tl.arange(0, GROUP // 2)
    codes = tl.load(codes_ptr + (first // 2)[:, None] + byte[None, :], mask=live[:, None], other=0)
    scale = tl.load(absmax_ptr + first // BLOCK_SIZE, mask=live, other=0.0)[:, None]
    high, low = lookup.floats(codes)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    values = tl.interleave((high * scale).to(kind), (low * scale).to(kind))
    tl.store(out_ptr + (g * GROUP)[:, None] + tl.arange(0, GROUP)[None, :], values, mask=live[:, None])


def decode(codes: Tensor, absmax: Tensor, row0: int, col0: int, K: int, block_size: int, out: Tensor) -> Tensor:
    """The part of W that starts at [row0, col0], into `out`, contiguous."""
    rows, cols = out.shape
    if out.numel() == 0:
        return out
    with on(codes):
        if (K | col0 | cols | block_size) % GROUP == 0:  # all of them are whole groups: GROUP is a power of two
            count = rows * cols // GROUP
            _groups[(cdiv(count, GROUPS),)](
                codes, absmax, out, K, row0, col0, cols, count, BLOCK_SIZE=block_size, GROUP=GROUP, GROUPS=GROUPS,
            )  # fmt: skip
        else:
            _tile[(rows * cdiv(cols, BLOCK),)](
                codes, absmax, out, K, row0, col0, cols, BLOCK_SIZE=block_size, BLOCK=BLOCK,
            )  # fmt: skip
    return out
