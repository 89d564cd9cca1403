"""What the portable kernels share: tiles in and out of memory, base-2 scores, the dropout mask.

Strides of rows, heads and batches arrive divided by UNIT, which tells the compiler that they are its multiples.
"""

import triton
import triton.language as tl

from .. import spec

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HIDDEN = tl.constexpr(spec.HIDDEN)


@triton.jit
def offsets(ROWS: tl.constexpr, stride_row, stride_col, PAD: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """Of the elements of a tile from its first; WIDE: 32 bits do not hold them."""
    row = tl.arange(0, ROWS)
    col = tl.arange(0, PAD)
    if WIDE:
        row = row.to(tl.int64)
        col = col.to(tl.int64)
    return row[:, None] * (stride_row * UNIT) + col[None, :] * stride_col


@triton.jit
def load(ptr, start, at, stride_row, ok, D: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr, MASK: tl.constexpr):
    """The tile at row `start`; 0 in the padding and, with MASK, in rows that are not ok."""
    ptr += tl.cast(start, tl.int64) * stride_row * UNIT
    inside = (tl.arange(0, PAD) < D)[None, :]
    if MASK and D != PAD:
        tile = tl.load(ptr + at, mask=ok[:, None] & inside, other=0.0)
    elif MASK:
        tile = tl.load(ptr + at, mask=ok[:, None], other=0.0)
    elif D != PAD:
        tile = tl.load(ptr + at, mask=inside, other=0.0)
    else:
        tile = tl.load(ptr + at)
    return tile


@triton.jit
def store(ptr, row, stride_row, ok, value, D: tl.constexpr, PAD: tl.constexpr):
    col = tl.arange(0, PAD)
    at = ptr + row.to(tl.int64)[:, None] * stride_row + col[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=ok[:, None] & (col < D)[None, :])


@triton.jit
def tanh(x2):
    """tanh(x) of x2 = 2 log2(e) x. Near 0, where 1 - 2 / (exp(2 x) + 1) loses all digits, by its series."""
    x = x2 * (0.5 * LN2)
    y = x * x
    series = x * (1.0 - y * (1.0 / 3.0 - y * (2.0 / 15.0 - y * (17.0 / 315.0))))
    return tl.where(y < 0.03, series, 1.0 - 2.0 / (tl.exp2(x2) + 1.0))


@triton.jit
def add_bias(s, bias_ptr, stride_bt, stride_bs, i, j, T, S):
    """s + bias in base 2, where i and j broadcast to s; bool biases (bytes) hide what they do not show."""
    at = bias_ptr + i.to(tl.int64) * stride_bt + j.to(tl.int64) * stride_bs
    bias = tl.load(at, mask=(i < T) & (j < S), other=0)
    if bias_ptr.dtype.element_ty == tl.uint8:
        s = tl.where(bias != 0, s, -float("inf"))
    else:
        bias = bias.to(tl.float32)
        hidden = bias <= HIDDEN  # false for a NaN, which must reach its row
        s = tl.where(hidden, -float("inf"), s + tl.where(hidden, 0.0, bias) * LOG2E)
    return s


@triton.jit
def kept(seed_ptr, threshold, head, i, key, N: tl.constexpr):
    """Dropout's mask [rows i, N keys from `key`], as philox.py has it; `key` is a multiple of 4 where N is."""
    seed = tl.load(seed_ptr)
    i = i[:, None]
    if N % 4 == 0:
        quad = (key // 4 + tl.arange(0, N // 4))[None, :] + i * 0
        a, b, c, d = tl.philox(seed, quad, i + quad * 0, head.to(tl.int32) + quad * 0, quad * 0)
        word = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [quad.shape[0], N])
    else:
        j = (key + tl.arange(0, N))[None, :] + i * 0
        a, b, c, d = tl.philox(seed, j // 4, i + j * 0, head.to(tl.int32) + j * 0, j * 0)
        word = tl.where(j % 4 < 2, tl.where(j % 4 == 0, a, b), tl.where(j % 4 == 2, c, d))
    return word >= tl.cast(threshold, tl.uint32)


@triton.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_lse(lse_ptr, i, ok):
    """In base 2; rows that saw nothing get +inf, so that their weights become 0."""
    lse = tl.load(lse_ptr + i, mask=ok, other=0.0)
    return tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
