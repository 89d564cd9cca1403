"""What the backward needs of every query row before any product: delta, and float16's powers of two."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._launch import cdiv
from ..route import ROW_PRODUCTS
from . import masks, scores
from .portable_launch import SIZES, Call


@triton.jit(do_not_specialize=SIZES)
def attention_delta(
    g_ptr, out_ptr, lse_ptr, d_lse_ptr, delta_ptr, largest_ptr, B, T, H, n_tiles, stride_gb, stride_gt, stride_gh,
    stride_gd, stride_ob, stride_ot, stride_oh, stride_od, DV: tl.constexpr, PAD_V: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """delta = sum(dO O) - d_lse, 0 for rows that see nothing whatever they hold; and max |dO| of each row."""
    tile, head = masks.place(tl.program_id(0), n_tiles, B * H, B * H)
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    i = tile * M + tl.arange(0, M)
    at = head.to(tl.int64) * T + i
    live = tl.load(lse_ptr + at, mask=i < T, other=-float("inf")) != -float("inf")
    col = tl.arange(0, PAD_V)[None, :]
    ok = (i < T)[:, None] & (col < DV)
    row = i.to(tl.int64)[:, None]
    g = tl.load(g_ptr + b * stride_gb + h * stride_gh + row * stride_gt + col * stride_gd, mask=ok, other=0.0)
    o = tl.load(out_ptr + b * stride_ob + h * stride_oh + row * stride_ot + col * stride_od, mask=ok, other=0.0)
    g = g.to(tl.float32)
    delta = tl.sum(g * o.to(tl.float32), 1)
    if d_lse_ptr is not None:
        delta -= tl.load(d_lse_ptr + at, mask=i < T, other=0.0)
    tl.store(delta_ptr + at, tl.where(live, delta, 0.0), mask=i < T)
    if largest_ptr is not None:
        size = tl.abs(g)
        tl.store(largest_ptr + at, tl.max(tl.where(size < float("inf"), size, 0.0), 1), mask=i < T)


@triton.jit(do_not_specialize=("T", "H"))
def attention_exponent(largest_ptr, row_scale_ptr, exponent_ptr, cu_q_ptr, T, H, BLOCK: tl.constexpr):
    """The power of two that brings max |dO| of a document and head into [4, 8), for the document and for its rows."""
    pid = tl.program_id(0)
    h = (pid % H).to(tl.int64)
    doc = (pid // H).to(tl.int64)
    start = doc * 0
    stop = start + T
    base = h * T
    if cu_q_ptr is not None:
        start = tl.maximum(tl.load(cu_q_ptr + doc).to(tl.int64), 0)
        stop = tl.minimum(tl.load(cu_q_ptr + doc + 1).to(tl.int64), T)
    else:
        base += doc * H * T
    top = tl.zeros([BLOCK], tl.float32)
    for at in range(start, stop, BLOCK):
        i = at + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(largest_ptr + base + i, mask=i < stop, other=0.0))
    largest = tl.max(top, 0)
    exponent = 129 - (largest.to(tl.int32, bitcast=True) >> 23)  # 2 - floor(log2(largest))
    exponent = tl.where(largest > 0.0, exponent, 0)
    tl.store(exponent_ptr + doc * H + h, exponent)
    scale = scores.power_of_two(exponent)
    for at in range(start, stop, BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(row_scale_ptr + base + i, tl.zeros([BLOCK], tl.float32) + scale, mask=i < stop)


def prepare(
    call: Call, d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, cu_q: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(delta, power of two of each row, exponent [documents, H]); the last two for float16 only."""
    delta = torch.empty_like(lse)
    scaled = d_out.dtype == torch.float16
    largest = torch.empty_like(lse) if scaled else None
    M = max(1, min(64, ROW_PRODUCTS // call.way.Dv))
    tiles = cdiv(call.T, M)
    d_out, out = (t if t.dim() == 4 else t.unsqueeze(0) for t in (d_out, out))
    attention_delta[(tiles * call.B * call.H,)](
        d_out, out, lse, None if d_lse is None else d_lse.contiguous(), delta, largest, call.B, call.T, call.H, tiles,
        *d_out.stride(), *out.stride(), DV=call.DV, PAD_V=call.way.Dv, M=M,
    )  # fmt: skip
    if not scaled:
        return delta, None, None
    row_scale, exponent = torch.empty_like(lse), lse.new_empty((call.docs, call.H), dtype=torch.int32)
    cu_q = None if cu_q is None else cu_q.contiguous()
    attention_exponent[(call.docs * call.H,)](largest, row_scale, exponent, cu_q, call.T, call.H, BLOCK=1024)
    return delta, row_scale, exponent
