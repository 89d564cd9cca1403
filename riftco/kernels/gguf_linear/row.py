"""One to four rows of x times a GGUF weight: each lane takes a unit of packed bytes and multiplies as many elements.

A code u of b bits becomes the float f = 2^b + u by a shift, a mask and the exponent's bits, without a conversion. With
w = (u - zero) scale + offset, a group's sum of w x is scale (sum of f x) + (offset - (2^b + zero) scale) (sum of x).

In 16 bits the products run on the matrix unit. It multiplies 16 rows with 8 columns, and four neighbouring lanes hold
a row of the first and a column of the second: where both are the lanes' own elements, the diagonal holds the sums of
eight groups of four lanes, which share a scale in every format. Two rows of W go at once.

For float32 x lanes multiply and add themselves, and 2^b + zero is taken off each f, exactly: else the two terms would
cancel digits that count there. Triton's interpreter goes that way in 16 bits, too.
"""

import triton
import triton.language as tl
from torch import Tensor

from .._dot import INTERPRETED
from .._launch import cdiv, on
from . import units
from .formats import FORMATS
from .route import UNITS, Route

ALIGNED = 8  # bytes at whose multiples packed bytes and rows of x start


def _pick(bits: int, size: int, exponent: int, copies: int) -> str:
    """`moved & mask | exponent`: of that the assembler makes two instructions. Codes end below bit `size`."""
    every = sum(1 << 16 * i for i in range(copies))
    mask, constant = every * ((1 << bits) - 1 << size - bits), every * (exponent + bits << size)
    return f"lop3.b32 $0, $1, {mask}, {constant}, 0xea;"


# by the bits of a code
PICK_FLOAT = tl.constexpr([_pick(b, 23, 127, 1) for b in range(9)])
PICK_BFLOAT16 = tl.constexpr([_pick(b, 7, 127, 2) for b in range(8)])
PICK_FLOAT16 = tl.constexpr([_pick(b, 10, 15, 2) for b in range(9)])
OPERANDS = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
MULTIPLY_BFLOAT16 = tl.constexpr("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 " + OPERANDS)
MULTIPLY_FLOAT16 = tl.constexpr("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 " + OPERANDS)
REGISTERS = tl.constexpr("=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")


@triton.jit
def _quad(line_ptr, at, live, MMA: tl.constexpr):
    """Elements at..at + 4 of rows of x, `at` a multiple of 4, and their sum: in float32, or as pairs of 16 bits."""
    like: tl.constexpr = line_ptr.dtype.element_ty
    ptr = line_ptr.to(tl.pointer_type(tl.uint8)) + at * (like.primitive_bitwidth // 8)
    one, two = units.eight(ptr, live)
    if like == tl.float32:
        three, four = units.eight(ptr + 8, live)
        a, b = one.to(tl.float32, bitcast=True), two.to(tl.float32, bitcast=True)
        c, d = three.to(tl.float32, bitcast=True), four.to(tl.float32, bitcast=True)
    else:
        a, b = units.widen(one, like)
        c, d = units.widen(two, like)
    # pairs as codes come: elements 0 and 2, 1 and 3
    x = ((one & 0xFFFF) | (two << 16), ((one >> 16) & 0xFFFF) | (two & -65536)) if MMA else (a, b, c, d)
    return x, (a + b) + (c + d)


@triton.jit
def _moved(word, SHIFT: tl.constexpr):
    return word << SHIFT if SHIFT >= 0 else word >> -SHIFT


@triton.jit
def _code(word, FROM: tl.constexpr, BITS: tl.constexpr):
    """f of the BITS bits of `word` from bit FROM on."""
    moved = _moved(word, 23 - BITS - FROM)
    if INTERPRETED:
        f = ((moved & ((1 << BITS) - 1 << 23 - BITS)) | (127 + BITS << 23)).to(tl.float32, bitcast=True)
    else:
        f = tl.inline_asm_elementwise(PICK_FLOAT[BITS], "=r,r", [moved], dtype=tl.float32, is_pure=True, pack=1)
    return f


@triton.jit
def _pair(word, FROM: tl.constexpr, BITS: tl.constexpr, like: tl.constexpr):
    """f in 16 bits of the BITS bits from FROM and from FROM + 16 on, in one int32."""
    if like == tl.bfloat16:
        moved = _moved(word, 7 - BITS - FROM)
        f = tl.inline_asm_elementwise(PICK_BFLOAT16[BITS], "=r,r", [moved], dtype=tl.int32, is_pure=True, pack=1)
    else:
        moved = _moved(word, 10 - BITS - FROM)
        f = tl.inline_asm_elementwise(PICK_FLOAT16[BITS], "=r,r", [moved], dtype=tl.int32, is_pure=True, pack=1)
    return f


@triton.jit
def _four(c, word0, word1, x, FROM: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, like: tl.constexpr):
    """c + the sums of f x over four bytes of two rows of W, whose codes start at bit FROM of each byte.

    c[0] and c[1] are of the first row, c[2] and c[3] of the second. On the matrix unit they belong to two groups of
    lanes, of which `_whole` keeps the lane's own; else c[0] and c[2] are the lane's sums, and the others stay 0.
    """
    c0, c1, c2, c3 = c
    if INTERPRETED or like == tl.float32:
        OFF: tl.constexpr = (1 << BITS) + ZERO if like == tl.float32 else 0
        for j in tl.static_range(4):
            c0 += (_code(word0, FROM + 8 * j, BITS) - OFF) * x[j]
            c2 += (_code(word1, FROM + 8 * j, BITS) - OFF) * x[j]
    else:
        even0, even1 = _pair(word0, FROM, BITS, like), _pair(word1, FROM, BITS, like)
        odd0, odd1 = _pair(word0, FROM + 8, BITS, like), _pair(word1, FROM + 8, BITS, like)
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            MULTIPLY_BFLOAT16 if like == tl.bfloat16 else MULTIPLY_FLOAT16, REGISTERS,
            [even0, even1, odd0, odd1, x[0], x[1], c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return c0, c1, c2, c3


@triton.jit
def _weighed(
    acc, c, sums, scale0, offset0, scale1, offset1, LIFT: tl.constexpr, OFFSET: tl.constexpr, like: tl.constexpr
):  # fmt: skip
    """acc + the sums of w x of two rows, from those of f x and that of x.

    LIFT: what f is more than u - zero, but in float32. acc[4] and acc[5]: what the lanes' sums of x bring.
    """
    rest0, rest1 = acc[4], acc[5]
    if like != tl.float32:
        rest0 += sums * (offset0 - scale0 * LIFT)
        rest1 += sums * (offset1 - scale1 * LIFT)
    elif OFFSET:
        rest0 += sums * offset0
        rest1 += sums * offset1
    return (
        acc[0] + c[0] * scale0, acc[1] + c[1] * scale0, acc[2] + c[2] * scale1, acc[3] + c[3] * scale1, rest0, rest1
    )  # fmt: skip


@triton.jit
def _blocks_32(acc, nothing, line_ptr, b, i, live, read0, read1, FORMAT: tl.constexpr, like: tl.constexpr):
    """The sums of w x over a unit of a block of 32 of two rows of W, both groups of one scale."""
    MMA: tl.constexpr = not (like == tl.float32 or INTERPRETED)
    OFFSET: tl.constexpr = FORMAT == "Q4_1" or FORMAT == "Q5_1"
    BITS: tl.constexpr = 8 if FORMAT == "Q8_0" else 5 if FORMAT == "Q5_0" or FORMAT == "Q5_1" else 4
    ZERO: tl.constexpr = 0 if OFFSET else 1 << BITS - 1
    HALVES: tl.constexpr = MMA and BITS == 8 and like == tl.bfloat16  # which has no room for 2^8 + u
    LIFT: tl.constexpr = (16 + 16 * 16 if HALVES else 1 << BITS) + ZERO
    low0, high0, scale0, offset0 = units.decode_32(read0, i, FORMAT)
    low1, high1, scale1, offset1 = units.decode_32(read1, i, FORMAT)
    x, sums = _quad(line_ptr, b * 32 + i * 4, live, MMA)
    if HALVES:
        c = _four(nothing, low0, low1, x, 0, 4, 0, like)
        top = _four(nothing, low0, low1, x, 4, 4, 0, like)
        c = (c[0] + 16 * top[0], c[1] + 16 * top[1], c[2] + 16 * top[2], c[3] + 16 * top[3])
    else:
        c = _four(nothing, low0, low1, x, 0, BITS, ZERO, like)
        if BITS < 8:
            x, more = _quad(line_ptr, b * 32 + i * 4 + 16, live, MMA)
            c = _four(c, high0, high1, x, 4 if BITS == 4 else 0, BITS, ZERO, like)
            sums += more
    return _weighed(acc, c, sums, scale0, offset0, scale1, offset1, LIFT, OFFSET, like)


@triton.jit
def _blocks_k45(acc, nothing, line_ptr, b, i, live, read0, read1, FORMAT: tl.constexpr, like: tl.constexpr):
    """The same over a unit of a Q4_K or Q5_K super-block, whose groups have a scale and an offset each."""
    MMA: tl.constexpr = not (like == tl.float32 or INTERPRETED)
    BITS: tl.constexpr = 5 if FORMAT == "Q5_K" else 4
    HIGH: tl.constexpr = 4 if BITS == 4 else 0
    at = b * 256 + i // 4 * 64 + i % 4 * 8
    a0, b0, a_high0, b_high0, scale0, offset0, high_scale0, high_offset0 = units.decode_k45(read0, i, FORMAT)
    a1, b1, a_high1, b_high1, scale1, offset1, high_scale1, high_offset1 = units.decode_k45(read1, i, FORMAT)
    x, sums = _quad(line_ptr, at, live, MMA)
    c = _four(nothing, a0, a1, x, 0, BITS, 0, like)
    x, more = _quad(line_ptr, at + 4, live, MMA)
    c = _four(c, b0, b1, x, 0, BITS, 0, like)
    acc = _weighed(acc, c, sums + more, scale0, offset0, scale1, offset1, 1 << BITS, True, like)
    x, sums = _quad(line_ptr, at + 32, live, MMA)
    c = _four(nothing, a_high0, a_high1, x, HIGH, BITS, 0, like)
    x, more = _quad(line_ptr, at + 36, live, MMA)
    c = _four(c, b_high0, b_high1, x, HIGH, BITS, 0, like)
    return _weighed(
        acc, c, sums + more, high_scale0, high_offset0, high_scale1, high_offset1, 1 << BITS, True, like
    )  # fmt: skip


@triton.jit
def _blocks_k6(acc, nothing, line_ptr, b, i, live, read0, read1, like: tl.constexpr):
    """The same over a unit of a Q6_K super-block, whose groups have a scale each."""
    MMA: tl.constexpr = not (like == tl.float32 or INTERPRETED)
    at = b * 256 + i // 16 * 128 + i % 16 * 4
    low0, high0, scale0, high_scale0 = units.decode_k6(read0, i)
    low1, high1, scale1, high_scale1 = units.decode_k6(read1, i)
    x, sums = _quad(line_ptr, at, live, MMA)
    c = _four(nothing, low0, low1, x, 0, 6, 32, like)
    acc = _weighed(acc, c, sums, scale0, 0.0, scale1, 0.0, 64 + 32, False, like)
    x, sums = _quad(line_ptr, at + 64, live, MMA)
    c = _four(nothing, high0, high1, x, 0, 6, 32, like)
    return _weighed(acc, c, sums, high_scale0, 0.0, high_scale1, 0.0, 64 + 32, False, like)


@triton.jit
def _read(ptr, i, FORMAT: tl.constexpr):
    if FORMAT == "Q6_K":
        read = units.read_k6(ptr, i)
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        read = units.read_k45(ptr, i, FORMAT)
    else:
        read = units.read_32(ptr, i, FORMAT)
    return read


@triton.jit
def _whole(even, odd, rest, lane, MMA: tl.constexpr):
    """A row's sum over all lanes. Of a group's two columns one is its own, in one of its lanes."""
    if MMA:
        group = lane % 32 // 4
        even = tl.where(lane % 4 == group // 2, tl.where(group % 2 == 0, even, odd), 0.0)
    return tl.sum(even + rest, 0, keep_dims=True)


@triton.jit
def _row(
    x_ptr, packed_ptr, bias_ptr, y_ptr, M, N, K, row_bytes, blocks,
    FORMAT: tl.constexpr, BYTES: tl.constexpr, UNITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, PAIRS: tl.constexpr, BC: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """y[m, n] = sum over k of x[m, k] W[n, k]; BC lanes take a unit each at a time, UNITS of them a block."""
    like: tl.constexpr = x_ptr.dtype.element_ty
    MMA: tl.constexpr = not (like == tl.float32 or INTERPRETED)
    lane = tl.arange(0, BC)[:, None, None]
    m = tl.arange(0, BM)[None, None, :]
    n0 = tl.program_id(0).to(tl.int64) * (2 * PAIRS) + tl.arange(0, PAIRS)[None, :, None]
    n1 = n0 + PAIRS
    line_ptr = x_ptr + tl.minimum(m, M - 1).to(tl.int64) * K
    row0_ptr, row1_ptr = packed_ptr + tl.minimum(n0, N - 1) * row_bytes, packed_ptr + tl.minimum(n1, N - 1) * row_bytes
    zero = tl.zeros([BC, PAIRS, BM], tl.float32)
    nothing = (zero, zero, zero, zero)
    acc = (zero, zero, zero, zero, zero, zero)
    i, first = lane % UNITS, lane // UNITS
    if AHEAD:
        at = tl.minimum(first, blocks - 1) * BYTES
        next0, next1 = _read(row0_ptr + at, i, FORMAT), _read(row1_ptr + at, i, FORMAT)
    for start in range(0, blocks, BC // UNITS):
        live = start + first < blocks
        b = tl.minimum(start + first, blocks - 1)  # what lies past the row's end is multiplied with zeros
        if AHEAD:
            read0, read1 = next0, next1
            at = tl.minimum(start + BC // UNITS + first, blocks - 1) * BYTES
            next0, next1 = _read(row0_ptr + at, i, FORMAT), _read(row1_ptr + at, i, FORMAT)
        else:
            read0, read1 = _read(row0_ptr + b * BYTES, i, FORMAT), _read(row1_ptr + b * BYTES, i, FORMAT)
        if FORMAT == "Q6_K":
            acc = _blocks_k6(acc, nothing, line_ptr, b, i, live, read0, read1, like)
        elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
            acc = _blocks_k45(acc, nothing, line_ptr, b, i, live, read0, read1, FORMAT, like)
        else:
            acc = _blocks_32(acc, nothing, line_ptr, b, i, live, read0, read1, FORMAT, like)
    y0, y1 = _whole(acc[0], acc[1], acc[4], lane, MMA), _whole(acc[2], acc[3], acc[5], lane, MMA)
    if HAS_BIAS:
        y0 += tl.load(bias_ptr + n0, mask=n0 < N, other=0.0).to(tl.float32)
        y1 += tl.load(bias_ptr + n1, mask=n1 < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + m.to(tl.int64) * N + n0, y0, mask=(m < M) & (n0 < N))
    tl.store(y_ptr + m.to(tl.int64) * N + n1, y1, mask=(m < M) & (n1 < N))


def forward(x: Tensor, packed: Tensor, bias: Tensor | None, format: str, y: Tensor, r: Route) -> None:
    """y [..., N], contiguous, from `packed`, contiguous and aligned."""
    f, N, K = FORMATS[format], y.shape[-1], x.shape[-1]
    with on(x):
        _row[(cdiv(N, r.outputs),)](
            _aligned(x), packed, bias, y, x.shape[:-1].numel(), N, K, packed.shape[1], K // f.block,
            FORMAT=format, BYTES=f.bytes, UNITS=UNITS[format], HAS_BIAS=bias is not None,
            BM=r.rows, PAIRS=r.outputs // 2, BC=r.step, AHEAD=r.ahead, num_warps=r.warps,
        )  # fmt: skip


def _aligned(x: Tensor) -> Tensor:
    """At most four rows are copied where they lie otherwise."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNED else x
