"""GGUF weights in Triton: for few rows decoded in registers inside the product, for many into a small scratch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _frozen, _splits
from .._dot import dot
from .._launch import as_rows, cdiv, next_power_of_2, on
from . import row
from .formats import FORMATS
from .route import SCRATCH_BYTES, Route, route

BLOCK = 1024  # elements of a row that a program decodes
COLUMNS = 64  # stretches of columns are whole cache lines


@triton.jit
def _half(ptr, mask):
    """A float16 field at an even address, in float32."""
    return tl.load(ptr.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _byte(ptr, mask):
    return tl.load(ptr, mask=mask, other=0).to(tl.int32)


@triton.jit
def _nibble(byte, high):
    return tl.where(high, byte >> 4, byte & 15)


@triton.jit
def _k_scales(block_ptr, group, mask):
    """The 6-bit factors (scale, offset) of a group of 32 in a super-block: spread over bytes 4..16."""
    first = _byte(block_ptr + 4 + group % 4, mask)
    second = _byte(block_ptr + 8 + group % 4, mask)
    third = _byte(block_ptr + 12 + group % 4, mask)
    low = group < 4
    scale = tl.where(low, first & 63, (third & 15) | ((first >> 2) & 48))
    least = tl.where(low, second & 63, (third >> 4) | ((second >> 2) & 48))
    return _half(block_ptr, mask) * scale.to(tl.float32), _half(block_ptr + 2, mask) * least.to(tl.float32)


@triton.jit
def _value(row_ptr, k, mask, FORMAT: tl.constexpr, SIZE: tl.constexpr, BYTES: tl.constexpr):
    """float32 element k of the rows that start at row_ptr; 0 where masked. Products are exact, so fused or not."""
    b = row_ptr + (k // SIZE) * BYTES
    e = (k % SIZE).to(tl.int32)
    if FORMAT == "Q4_0":
        q = _nibble(_byte(b + 2 + e % 16, mask), e >= 16) - 8
        value = q.to(tl.float32) * _half(b, mask)
    elif FORMAT == "Q4_1":
        q = _nibble(_byte(b + 4 + e % 16, mask), e >= 16)
        value = q.to(tl.float32) * _half(b, mask) + _half(b + 2, mask)
    elif FORMAT == "Q5_0":
        q = _nibble(_byte(b + 6 + e % 16, mask), e >= 16) | (((_byte(b + 2 + e // 8, mask) >> (e % 8)) & 1) << 4)
        value = (q - 16).to(tl.float32) * _half(b, mask)
    elif FORMAT == "Q5_1":
        q = _nibble(_byte(b + 8 + e % 16, mask), e >= 16) | (((_byte(b + 4 + e // 8, mask) >> (e % 8)) & 1) << 4)
        value = q.to(tl.float32) * _half(b, mask) + _half(b + 2, mask)
    elif FORMAT == "Q8_0":
        value = _byte(b + 2 + e, mask).to(tl.int8).to(tl.float32) * _half(b, mask)
    elif FORMAT == "Q4_K":
        scale, least = _k_scales(b, e // 32, mask)
        q = _nibble(_byte(b + 16 + e // 64 * 32 + e % 32, mask), e % 64 >= 32)
        value = q.to(tl.float32) * scale - least
    elif FORMAT == "Q5_K":
        scale, least = _k_scales(b, e // 32, mask)
        q = _nibble(_byte(b + 48 + e // 64 * 32 + e % 32, mask), e % 64 >= 32)
        q = q | (((_byte(b + 16 + e % 32, mask) >> (e // 32)) & 1) << 4)
        value = q.to(tl.float32) * scale - least
    else:
        tl.static_assert(FORMAT == "Q6_K")
        q = _nibble(_byte(b + e // 128 * 64 + e % 64, mask), e % 128 >= 64)
        q = q | (((_byte(b + 128 + e // 128 * 32 + e % 32, mask) >> (e % 128 // 32 * 2)) & 3) << 4)
        scale = _half(b + 208, mask) * _byte(b + 192 + e // 16, mask).to(tl.int8).to(tl.float32)
        value = (q - 32).to(tl.float32) * scale
    return tl.where(mask, value, 0.0)


@triton.jit
def _few(
    x_ptr, packed_ptr, bias_ptr, y_ptr, inner, stride_o, stride_i, stride_r, row_bytes, M, O, R, part,
    FORMAT: tl.constexpr, SIZE: tl.constexpr, BYTES: tl.constexpr, FORWARD: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BO: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """y[s, M, O] = sum over the s-th part of r of x[m, r] W[o, r] (forward) or W[r, o] (for d_x)."""
    tiles_m = tl.cdiv(M, BM)
    tiles_o = tl.cdiv(O, BO)
    m = (tl.program_id(0) % tiles_m).to(tl.int64) * BM + tl.arange(0, BM)
    o = (tl.program_id(0) // tiles_m % tiles_o).to(tl.int64) * BO + tl.arange(0, BO)
    s = (tl.program_id(0) // tiles_m // tiles_o).to(tl.int64)
    line_ptr = x_ptr + (m // inner) * stride_o + (m % inner) * stride_i
    stop = tl.minimum((s + 1) * part, R)
    acc = tl.zeros([BM, BO], tl.float32)
    for start in range(0, part, BR):
        r = s * part + start + tl.arange(0, BR)
        x = tl.load(line_ptr[:, None] + r[None, :] * stride_r, mask=(m < M)[:, None] & (r < stop)[None, :], other=0.0)
        live = (o < O)[None, :] & (r < stop)[:, None]
        if FORWARD:
            w = _value(packed_ptr + (o * row_bytes)[None, :], r[:, None], live, FORMAT, SIZE, BYTES)
        else:
            w = _value(packed_ptr + (r * row_bytes)[:, None], o[None, :], live, FORMAT, SIZE, BYTES)
        acc += dot(x, w.to(x.dtype))
    if HAS_BIAS:
        acc += tl.load(bias_ptr + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + (s * M + m)[:, None] * O + o[None, :], acc, mask=(m < M)[:, None] & (o < O)[None, :])


@triton.jit
def _tile(
    packed_ptr, out_ptr, row_bytes, row0, col0, cols,
    FORMAT: tl.constexpr, SIZE: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n, k] = W[row0 + n, col0 + k], k < cols: a program decodes a stretch of one row."""
    tiles = tl.cdiv(cols, BLOCK)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    k = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = _value(packed_ptr + (row0 + n) * row_bytes, col0 + k, k < cols, FORMAT, SIZE, BYTES)
    tl.store(out_ptr + n * cols + k, value.to(out_ptr.dtype.element_ty), mask=k < cols)


def forward(
    x: Tensor, packed: Tensor, bias: Tensor | None, format: str, N: int, K: int, onto: Tensor | None = None
) -> Tensor:
    r = route(x.shape[:-1].numel(), N, K, x.dtype, format)
    if r.name != "scratch":
        bias = None if bias is None else bias.contiguous()
        if r.name == "row":
            y = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
            if y.numel():
                row.forward(x, _readable(packed, row.ALIGNED), bias, format, y, r)
        else:
            y = _product(x, packed, bias, format, N, r, forward=True)
        return y if onto is None else onto.add_(y)
    packed = _readable(packed)

    def rows(lo: int, hi: int, scratch: Tensor) -> Tensor:
        return _decode(packed, format, lo, 0, scratch[: (hi - lo) * K].view(hi - lo, K))

    return _frozen.forward(x, bias, N, K, SCRATCH_BYTES, rows, onto=onto)


def backward(d_y: Tensor, packed: Tensor, format: str, N: int, K: int, onto: Tensor | None = None) -> Tensor:
    r = route(d_y.shape[:-1].numel(), K, N, d_y.dtype, format, backward=True)
    if r.name == "few":
        d_x = _product(d_y, packed, None, format, K, r, forward=False)
        return d_x if onto is None else onto.add_(d_x)
    packed = _readable(packed)

    def columns(lo: int, hi: int, scratch: Tensor) -> Tensor:
        return _decode(packed, format, 0, lo, scratch[: N * (hi - lo)].view(N, hi - lo))

    return _frozen.backward(d_y, N, K, SCRATCH_BYTES, columns, COLUMNS, onto)


def dequantize(packed: Tensor, format: str, N: int, K: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(N, K, dtype=dtype, device=packed.device)
    return _decode(_readable(packed), format, 0, 0, out)


def _product(
    x: Tensor, packed: Tensor, bias: Tensor | None, format: str, outputs: int, r: Route, *, forward: bool
) -> Tensor:
    y = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    M, f = x.shape[:-1].numel(), FORMATS[format]
    rows, inner, stride_o, stride_i = as_rows(x)
    parts = _splits.parts_for(y, r.splits)
    with on(x):
        _few[(cdiv(M, r.rows) * cdiv(outputs, r.outputs) * r.splits,)](
            rows, _readable(packed), bias, parts, inner, stride_o, stride_i, rows.stride(-1), packed.shape[1],
            M, outputs, x.shape[-1], r.part, FORMAT=format, SIZE=f.block, BYTES=f.bytes, FORWARD=forward,
            HAS_BIAS=bias is not None and r.splits == 1, BM=r.rows, BO=r.outputs, BR=r.step,
            num_warps=r.warps, num_stages=r.stages,
        )  # fmt: skip
    if r.splits > 1:
        _splits.join(parts, bias, y)
    return y


def _readable(packed: Tensor, align: int = 2) -> Tensor:
    """Contiguous, and at an address of which `align` is a divisor: float16 fields, or words, are loaded whole."""
    packed = packed.contiguous()
    return packed.clone() if packed.data_ptr() % align else packed


def _decode(packed: Tensor, format: str, row0: int, col0: int, out: Tensor) -> Tensor:
    """The part of W that starts at [row0, col0], into `out`, contiguous; `packed` as `_readable` gives it."""
    f = FORMATS[format]
    if out.numel():
        block = min(BLOCK, next_power_of_2(out.shape[1]))
        with on(packed):
            _tile[(out.shape[0] * cdiv(out.shape[1], block),)](
                packed, out, packed.shape[1], row0, col0, out.shape[1],
                FORMAT=format, SIZE=f.block, BYTES=f.bytes, BLOCK=block,
            )  # fmt: skip
    return out
