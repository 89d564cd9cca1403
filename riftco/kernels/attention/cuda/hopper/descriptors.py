"""TMA descriptors of strided attention tensors, without copies, and the copies that go through them.

Dense tensors [B, T, H, D] are read as [B, H, T, D] in boxes of [1, 1, rows, width]: the hardware gives zeros past T and
past D, and writes nothing there. Packed tensors [total, H, D] get a ragged descriptor: one more view in which any
document ends where the hardware's dimension ends, so that its neighbours are neither read nor written. It has the
dimensions (2^31, 2^31, H, 2^30, D) with strides (2^34 - s, s, .., s, 1), s the row stride: for a document of `length`
rows from `start`, the coordinates (2^30, start + length, head, 2^30 - length + row) add up to
2^30 * 2^34 + (start + row) * s elements, and the first term wraps to 0 in a 64-bit byte address. A row at or past
`length` lies past the fourth dimension.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

HUGE = 0x7FFF0000
END = 1 << 30  # the ragged dimension's size
_END = gl.constexpr(END)
WRAP = 1 << 34
WIDTHS = (64, 128, 256)


def width(D: int) -> int:
    """The head dim that the kernels compute with: what is missing up to it is filled with zeros by the hardware."""
    return next(w for w in WIDTHS if w >= D)


def why_not(t: Tensor) -> str:
    """Why `t` [.., T, H, D] has no descriptor; "" when it has one. Strides of 0 have."""
    D = t.shape[-1]
    if t.dtype not in (torch.float16, torch.bfloat16):
        return f"{t.dtype} is neither float16 nor bfloat16"
    if D % 8 or not 0 < D <= WIDTHS[-1]:
        return f"head dim {D} is no multiple of 8 up to {WIDTHS[-1]}"
    if t.stride(-1) != 1:
        return "the head dim is not contiguous"
    if t.data_ptr() % 16:
        return "the first element is not aligned to 16 bytes"
    for size, stride in zip(t.shape[:-1], t.stride()[:-1]):
        if size > 1 and (stride % 8 or not 0 <= stride < WRAP):
            return f"a stride of {stride} elements is no multiple of 16 bytes"
        if size >= END:
            return f"a dimension of {size} is too long"
    return ""


@functools.cache
def layout(rank: int) -> gl.NVMMASharedLayout:
    """A tile in shared memory as wgmma reads it: 64 columns of 16 bits a row, swizzled by 128 bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def describe(t: Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of dense t [B, T, H, D] or packed t [total, H, D] in boxes of `rows` rows of one head.

    No dimension may be empty. t may have rows or heads of any stride that why_not() lets pass.
    """
    D = t.shape[-1]
    *lead, s, h = (8 if size == 1 else stride for size, stride in zip(t.shape[:-1], t.stride()[:-1]))
    T, H = t.shape[-3:-1]
    if lead:
        shape, strides = [t.shape[0], H, T, D], [lead[0], h, s, 1]
    else:
        shape, strides = [HUGE, HUGE, H, END, D], [WRAP - s, s, h, s, 1]
    box = [1] * (len(shape) - 2) + [rows, width(D)]
    return TensorDescriptor(t, shape, strides, box, layout(len(shape)))


def as_packed(t: Tensor) -> tuple[Tensor, int]:
    """[B, S, K, D] as packed rows, and how many of them one batch index steps over: so a ragged box ends where a
    sequence's own keys do. Sequences at fractions of a row, which no cache and no projection has, are copied."""
    B, S, K, D = t.shape
    row = t.stride(1) if S > 1 else 8  # as describe() takes a single row's
    if B > 1 and (row == 0 or t.stride(0) % row):
        return as_packed(t.contiguous())
    step = t.stride(0) // row if B > 1 else 0
    return t.as_strided(((B - 1) * step + S, K, D), (row, *t.stride()[2:])), step


@gluon.jit
def load(desc, smem, bar, head, at, length, row):
    """Start copying the box of `head` from `row` on into smem; `bar` counts its bytes.

    Dense: `at` is the batch index and `length` is not read. Packed: the document starts at row `at` and has `length`.
    """
    if len(desc.block_type.shape) == 5:
        tma.async_copy_global_to_shared(desc, [_END, at + length, head, _END - length + row, 0], bar, smem)
    else:
        tma.async_copy_global_to_shared(desc, [at, head, row, 0], bar, smem)


@gluon.jit
def load_expected(desc, smem, bar, head, at, length, row):
    """load(), with the barrier told of the bytes first."""
    mbarrier.expect(bar, desc.block_type.nbytes)
    load(desc, smem, bar, head, at, length, row)


@gluon.jit
def store(desc, smem, head, at, length, row):
    """Start copying the box in smem out; rows past the sequence's end stay as they are."""
    if len(desc.block_type.shape) == 5:
        tma.async_copy_shared_to_global(desc, [_END, at + length, head, _END - length + row, 0], smem)
    else:
        tma.async_copy_shared_to_global(desc, [at, head, row, 0], smem)
