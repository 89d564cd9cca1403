"""From 4-bit codes to the table's values in registers: exact in float32, or rounded to 16 bits.

On a GPU the float32 table lives in the lanes of a warp and a value is one shuffle; 16-bit values are put together from
bytes by PRMT, 2.6 instructions each. A tree of selects, about 15, serves where a kernel's threads may diverge or where
Triton's interpreter runs. tests/kernels/test_nf4_kernels.py runs the instructions on all codes.
"""

import struct

import torch
import triton
import triton.language as tl

from ..._dot import INTERPRETED
from ..spec import CODE


@triton.jit
def value(code):
    """float32, by selects on the four bits: no memory, the same on every target."""
    one, two, four = (code & 1) != 0, (code & 2) != 0, (code & 4) != 0
    a = tl.where(one, -0.6961928009986877, -1.0)
    b = tl.where(one, -0.39491748809814453, -0.5250730514526367)
    c = tl.where(one, -0.18477343022823334, -0.28444138169288635)
    d = tl.where(one, 0.0, -0.09105003625154495)
    low = tl.where(four, tl.where(two, d, c), tl.where(two, b, a))
    a = tl.where(one, 0.16093020141124725, 0.07958029955625534)
    b = tl.where(one, 0.33791524171829224, 0.24611230194568634)
    c = tl.where(one, 0.5626170039176941, 0.44070982933044434)
    d = tl.where(one, 1.0, 0.7229568362236023)
    high = tl.where(four, tl.where(two, d, c), tl.where(two, b, a))
    return tl.where((code & 8) != 0, high, low)


def shuffles() -> str:
    """Four bytes ($8) -> float32 of their high halves ($0..$3) and of their low halves ($4..$7).

    Lane l of each half-warp holds table[l]: made of the lane's number by selects, which the assembler moves out of
    loops. The table is at hand whatever elements a lane has.
    """
    bits = [struct.unpack("<I", struct.pack("<f", v))[0] for v in CODE]
    lines = [".reg .b32 lane, code, word;", ".reg .pred is;", "mov.u32 lane, %laneid;", "and.b32 lane, lane, 15;"]
    lines.append(f"mov.b32 word, 0x{bits[0]:08x};")
    for at in range(1, 16):
        lines += [f"setp.eq.u32 is, lane, {at};", f"selp.b32 word, 0x{bits[at]:08x}, word, is;"]
    for out in range(8):
        shift = 8 * (out % 4) + (4 if out < 4 else 0)
        lines += [f"shr.u32 code, $8, {shift};", f"shfl.sync.idx.b32 ${out}, word, code, 0x101f, 0xffffffff;"]
    return "{\n" + "\n".join(lines) + "\n}"


def permutes(dtype: torch.dtype) -> str:
    """Four bytes ($4) -> 16-bit values, two a register, of their high halves ($0, $1) and of their low halves ($2, $3).

    The 16 values are two tables of bytes of 16 each, four registers a table. A PRMT takes four selectors of three bits
    from half a register of codes; a code's fourth bit, spread over a byte by PRMT's sign mode, picks between the
    tables' halves.
    """
    words = [int(w) & 0xFFFF for w in torch.tensor(CODE).to(dtype).view(torch.int16)]
    low, high = (
        [f"0x{sum((words[4 * r + j] >> shift & 255) << 8 * j for j in range(4)):08x}" for r in range(4)]
        for shift in (0, 8)
    )
    lines = [
        ".reg .b32 pick, left, top, small, large, low, high;",
        "shl.b32 left, $4, 4;",
        "and.b32 pick, $4, 0x77777777;",
    ]
    for half, signs in ((0, "0x9d8c"), (1, "0xbfae")):
        if half:
            lines.append("shr.u32 pick, pick, 16;")
        lines.append(f"prmt.b32 top, $4, left, {signs};")
        for table, name in ((low, "low"), (high, "high")):
            lines += [
                f"prmt.b32 small, {table[0]}, {table[1]}, pick;",
                f"prmt.b32 large, {table[2]}, {table[3]}, pick;",
                f"lop3.b32 {name}, small, large, top, 0xd8;",
            ]
        lines += [f"prmt.b32 ${half}, low, high, 0x7351;", f"prmt.b32 ${2 + half}, low, high, 0x6240;"]
    return "{\n" + "\n".join(lines) + "\n}"


SHUFFLES = tl.constexpr(shuffles())
SHUFFLE_REGISTERS = tl.constexpr(",".join(["=r"] * 8 + ["r"]))
BFLOAT16, FLOAT16 = tl.constexpr(permutes(torch.bfloat16)), tl.constexpr(permutes(torch.float16))
PERMUTE_REGISTERS = tl.constexpr("=r,=r,=r,=r,r")


@triton.jit
def floats(codes):
    """uint8 -> exact float32 values of the high halves (even elements) and of the low ones. All lanes take part."""
    if INTERPRETED:
        c = codes.to(tl.int32)
        high, low = value(c >> 4), value(c & 15)
    else:
        high, low = tl.inline_asm_elementwise(
            SHUFFLES, SHUFFLE_REGISTERS, [codes], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
        )
    return high, low


@triton.jit
def halves(codes, like: tl.constexpr):
    """uint8 -> values rounded to `like`, bfloat16 or float16, of the high halves (even elements) and the low ones."""
    if INTERPRETED:
        c = codes.to(tl.int32)
        high, low = value(c >> 4).to(like), value(c & 15).to(like)
    elif like == tl.bfloat16:
        high, low = tl.inline_asm_elementwise(
            BFLOAT16, PERMUTE_REGISTERS, [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        high, low = tl.inline_asm_elementwise(
            FLOAT16, PERMUTE_REGISTERS, [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return high, low
