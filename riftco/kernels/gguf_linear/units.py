"""What a lane of the row kernel takes of a GGUF block at once, its unit: which bytes it reads, and what they mean.

A unit has two groups of elements. Codes lie one a byte, from bit 0 or, where a unit keeps its nibbles packed, from bit
4 of each byte for the second group. `read_*` loads and `decode_*` computes, so that a kernel can read ahead.
"""

import triton
import triton.language as tl


@triton.jit
def eight(ptr, live=None):
    """Eight bytes as two int32, 0 where not live. A stride in bytes keeps loads apart: a lane that took neighbours, as
    Triton lets it where it knows of them, would hold other elements than those it multiplies with."""
    if live is None:
        words = tl.load(ptr.to(tl.pointer_type(tl.int64)))
    else:
        words = tl.load(ptr.to(tl.pointer_type(tl.int64)), mask=live, other=0)
    return words.to(tl.int32), (words >> 32).to(tl.int32)


@triton.jit
def word(ptr, WHOLE: tl.constexpr):
    """Four bytes as int32: in one, or as two halves where blocks end at odd halves."""
    if WHOLE:
        value = tl.load(ptr.to(tl.pointer_type(tl.int32)))
    else:
        value = half(ptr) | (half(ptr + 2) << 16)
    return value


@triton.jit
def half(ptr):
    """Two bytes as int32."""
    return tl.load(ptr.to(tl.pointer_type(tl.uint16))).to(tl.int32)


@triton.jit
def widen(pair, like: tl.constexpr):
    """int32 of two neighbours in 16 bits -> float32 of both."""
    if like == tl.bfloat16:
        first, second = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        first = (pair & 0xFFFF).to(tl.uint16).to(like, bitcast=True).to(tl.float32)
        second = ((pair >> 16) & 0xFFFF).to(tl.uint16).to(like, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def _nibbles(codes):
    """The low halves of four bytes, and the high ones."""
    return codes & 0x0F0F0F0F, (codes >> 4) & 0x0F0F0F0F


@triton.jit
def _spread(bits):
    """Bits 0..3 -> bit 4 of each of four bytes."""
    return ((bits & 15) * 0x02040810) & 0x10101010


@triton.jit
def read_32(ptr, i, FORMAT: tl.constexpr):
    """Of a block of 32: word i of its codes, their fifth bits, its scale (and offset)."""
    OFFSET: tl.constexpr = FORMAT == "Q4_1" or FORMAT == "Q5_1"
    FIVE: tl.constexpr = FORMAT == "Q5_0" or FORMAT == "Q5_1"
    FIELDS: tl.constexpr = 4 if OFFSET else 2
    codes = word(ptr + (FIELDS + 4 if FIVE else FIELDS) + i * 4, OFFSET)
    if FIVE:
        top = word(ptr + FIELDS, OFFSET)
    else:
        top = codes
    if OFFSET:
        fields = word(ptr, True)
    else:
        fields = half(ptr)
    return codes, top, fields


@triton.jit
def decode_32(read, i, FORMAT: tl.constexpr):
    """Codes of elements 4 i.. of the block and of elements 16 + 4 i..; scale, offset. Nibbles stay packed; int8 becomes
    128 more, and has the first group alone."""
    codes, top, fields = read
    low, high = codes, codes
    if FORMAT == "Q5_0" or FORMAT == "Q5_1":
        low, high = _nibbles(codes)
        top >>= i * 4
        low, high = low | _spread(top), high | _spread(top >> 16)
    elif FORMAT == "Q8_0":
        low ^= -2139062144
    if FORMAT == "Q4_1" or FORMAT == "Q5_1":
        scale, offset = widen(fields, tl.float16)
    else:
        scale, offset = fields.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32), 0.0
    return low, high, scale, offset


@triton.jit
def read_k45(ptr, i, FORMAT: tl.constexpr):
    """Of a Q4_K or Q5_K super-block: its fields, eight bytes of codes and those that hold their fifth bits."""
    fields, one = eight(ptr)
    two, three = eight(ptr + 8)
    a, b = eight(ptr + (48 if FORMAT == "Q5_K" else 16) + i * 8)
    if FORMAT == "Q5_K":
        a_top, b_top = eight(ptr + 16 + i % 4 * 8)
    else:
        a_top, b_top = a, b
    return fields, one, two, three, a, b, a_top, b_top


@triton.jit
def decode_k45(read, i, FORMAT: tl.constexpr):
    """Codes of eight elements of a group of 32 and of the eight 32 behind, in two words each; either group's scale and
    offset. Nibbles stay packed. What depends on i alone is the same in every step."""
    fields, one, two, three, a, b, a_top, b_top = read
    pair = i // 4
    # 6 bits each of groups 0..3 lie together; of 4..7 the upper two lie above those, the lower four in `three`
    late, shift = pair // 2, pair % 2 * 16
    upper, lower_mask = shift + late * 2, late * 0x0F0F
    upper_mask = tl.where(late == 0, 0x3F3F, 0x3030)
    scale = ((one >> upper) & upper_mask) | ((three >> shift) & lower_mask)
    least = ((two >> upper) & upper_mask) | ((three >> (shift + 4)) & lower_mask)
    d, d_least = widen(fields, tl.float16)
    d_least = -d_least
    low_scale, low_offset = d * (scale & 255).to(tl.float32), d_least * (least & 255).to(tl.float32)
    high_scale, high_offset = d * (scale >> 8).to(tl.float32), d_least * (least >> 8).to(tl.float32)
    a_high, b_high = a, b
    if FORMAT == "Q5_K":
        a, a_high = _nibbles(a)
        b, b_high = _nibbles(b)
        a_top, b_top = a_top >> (pair * 2), b_top >> (pair * 2)
        a, a_high = a | ((a_top << 4) & 0x10101010), a_high | ((a_top << 3) & 0x10101010)
        b, b_high = b | ((b_top << 4) & 0x10101010), b_high | ((b_top << 3) & 0x10101010)
    return a, b, a_high, b_high, low_scale, low_offset, high_scale, high_offset


@triton.jit
def read_k6(ptr, i):
    """Of a Q6_K super-block: word i of the lower bits, its word of upper ones, two scales, their factor."""
    part, t = i // 16, i % 16
    scale_ptr = ptr.to(tl.pointer_type(tl.int8)) + 192 + part * 8 + t // 4
    low_scale, high_scale = tl.load(scale_ptr).to(tl.int32), tl.load(scale_ptr + 4).to(tl.int32)
    top = word(ptr + 128 + part * 32 + t % 8 * 4, False)
    return word(ptr + i * 4, False), top, low_scale, high_scale, half(ptr + 208)


@triton.jit
def decode_k6(read, i):
    """Codes of four elements of a group of 16 and of the four 64 behind; the groups' scales."""
    codes, top, low_scale, high_scale, fields = read
    low, high = _nibbles(codes)
    top >>= i % 16 // 8 * 2
    d = fields.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    low, high = low | ((top << 4) & 0x30303030), high | (top & 0x30303030)
    return low, high, d * low_scale.to(tl.float32), d * high_scale.to(tl.float32)
