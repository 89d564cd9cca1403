"""GGUF's block formats: the one table of sizes and readers that the spec, the CPU path and the launchers go by.

A block of `block` consecutive elements of a row takes `bytes` bytes. Every format is
w = q * scale + offset, with a small integer q for each element and a float32 scale (and offset) for each group of them.
A product of scales and q has at most 23 significant bits, so it is exact in float32 and w is rounded once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Parts = tuple[Tensor, Tensor, Tensor | None]  # q uint8 or int8 [n, block]; scale, offset float32 [n, groups]

BITS = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and(1).to(torch.uint8)
FIFTH = (BITS * 16).view(torch.int64).view(-1)  # a byte of high bits -> eight bytes of 0 or 16


@dataclass(frozen=True)
class Format:
    """`parts` reads blocks uint8 [n, bytes]; `halves` are the offsets of the float16 fields."""

    name: str
    ggml_type: int
    block: int
    bytes: int
    halves: tuple[int, ...]
    parts: Callable[[Tensor], Parts]

    def row_bytes(self, K: int) -> int:
        return K // self.block * self.bytes

    def decode(self, blocks: Tensor, out: Tensor) -> Tensor:
        """blocks uint8 [n, bytes] -> float32 `out` [n, block], contiguous."""
        q, scale, offset = self.parts(blocks)
        out.copy_(q)
        groups = out.view(*scale.shape, self.block // scale.shape[1])
        groups.mul_(scale.unsqueeze(-1))
        if offset is not None:
            groups.add_(offset.unsqueeze(-1))
        return out


def _half(field: Tensor) -> Tensor:
    """Two bytes of each block -> float32 [n, 1]."""
    return field.contiguous().view(torch.float16).float()


def _nibbles(field: Tensor, run: int = 16) -> Tensor:
    """uint8 [n, b] -> [n, 2 b]: of each run of bytes first all low halves, then all high ones."""
    runs = field.reshape(field.shape[0], -1, run)
    return torch.stack((runs & 15, runs >> 4), 2).view(field.shape[0], -1)


def _fifth_bits(field: Tensor) -> Tensor:
    """Four bytes of each block -> 0 or 16 for each of its 32 elements."""
    at = field.reshape(-1).int()
    return FIFTH.to(at.device).index_select(0, at).view(torch.uint8).view(-1, 32)


def _signed(q: Tensor, zero: int) -> Tensor:
    return q.sub_(zero).view(torch.int8)  # bytes below 0 wrap around to int8's


def _q4_0(b: Tensor) -> Parts:
    return _signed(_nibbles(b[:, 2:]), 8), _half(b[:, :2]), None


def _q4_1(b: Tensor) -> Parts:
    return _nibbles(b[:, 4:]), _half(b[:, :2]), _half(b[:, 2:4])


def _q5_0(b: Tensor) -> Parts:
    return _signed(_nibbles(b[:, 6:]).bitwise_or_(_fifth_bits(b[:, 2:6])), 16), _half(b[:, :2]), None


def _q5_1(b: Tensor) -> Parts:
    return _nibbles(b[:, 8:]).bitwise_or_(_fifth_bits(b[:, 4:8])), _half(b[:, :2]), _half(b[:, 2:4])


def _q8_0(b: Tensor) -> Parts:
    return b[:, 2:].view(torch.int8), _half(b[:, :2]), None


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight offsets of a super-block: 6-bit factors of its two float16 fields, in bytes 4..16."""
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), 1)
    least = torch.cat((mid & 63, (high >> 4) | ((mid >> 2) & 48)), 1)
    return _half(b[:, :2]) * scale, _half(b[:, 2:4]) * least


def _q4_k(b: Tensor) -> Parts:
    scale, least = _k_scales(b)
    return _nibbles(b[:, 16:], 32), scale, -least


def _q5_k(b: Tensor) -> Parts:
    scale, least = _k_scales(b)
    shifts = torch.arange(8, dtype=torch.uint8, device=b.device).unsqueeze(1)
    high = (b[:, None, 16:48] >> shifts).bitwise_and_(1).mul_(16)  # [n, 8, 32]
    return _nibbles(b[:, 48:], 32).bitwise_or_(high.view(-1, 256)), scale, -least


def _q6_k(b: Tensor) -> Parts:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device).unsqueeze(1)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts).bitwise_and_(3).mul_(16)  # [n, 2, 4, 32]
    q = _nibbles(b[:, :128], 64).bitwise_or_(high.view(-1, 256))
    return _signed(q, 32), _half(b[:, 208:]) * b[:, 192:208].view(torch.int8), None


FORMATS = {
    f.name: f
    for f in (
        Format("Q4_0", 2, 32, 18, (0,), _q4_0),
        Format("Q4_1", 3, 32, 20, (0, 2), _q4_1),
        Format("Q5_0", 6, 32, 22, (0,), _q5_0),
        Format("Q5_1", 7, 32, 24, (0, 2), _q5_1),
        Format("Q8_0", 8, 32, 34, (0,), _q8_0),
        Format("Q4_K", 12, 256, 144, (0, 2), _q4_k),
        Format("Q5_K", 13, 256, 176, (0, 2), _q5_k),
        Format("Q6_K", 14, 256, 210, (208,), _q6_k),
    )
}
# Layouts that interleave rows for one CPU's matmul: what came in cannot be read back, and no gradient taken through it.
REPACKED = ("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8")


def format_of(name: str) -> Format:
    """The format of that name; a layout that is not in the table is refused with the remedy."""
    if name in FORMATS:
        return FORMATS[name]
    if name in REPACKED:
        raise ValueError(
            f"GGUFWeight: {name} is a repacked layout, which cannot be read back for a gradient; "
            f"load the weight as it is in the file, without repacking; accepted: {', '.join(FORMATS)}"
        )
    raise ValueError(
        f"GGUFWeight: {name} cannot be read back for a gradient; "
        f"dequantise it, or quantise it again to one of {', '.join(FORMATS)}"
    )
