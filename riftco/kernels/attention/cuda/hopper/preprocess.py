"""What surrounds the Hopper backward's main kernel: the rows' numbers before it, dQ out of its scratch after it.

**Tiles.** Query rows are cut into tiles of M rows that never span sequences, and everything here is stored by tile.
Dense: (batch, head, tile). Packed: head-major, and the tiles of document n start at number cu[n] // M + n, which leaves
room for the partial tile of every document; so total // M + docs tiles are enough, a number known on the host.

**stats** holds, for each tile, M values of lse in base 2 and M of delta = sum(dO O) - d_lse. A row that sees nothing,
or that does not exist, has lse = +inf: its P is 0. One tile more belongs to no row at all.

**scratch** holds dQ in float32, each tile in the order of the accumulator fragments (backward_walk.fragments).

**float16.** `top` gathers the bits of the largest |dO| of each (sequence, head), by integer maxima.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...._launch import cdiv
from . import descriptors

LOG2E = tl.constexpr(1.4426950408889634)


@dataclass
class Rows:
    """What prepare() leaves for the main kernel and for convert()."""

    stats: Tensor
    scratch: Tensor | None
    top: Tensor
    counter: Tensor  # of the tiles of keys taken: 0
    delta: Tensor
    exponent: Tensor
    M: int
    docs: int
    tiles: int  # of one head of one sequence; packed: of one head
    spare: int  # a tile that no row belongs to

    def descriptor(self) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
        return TensorDescriptor(self.stats, [self.stats.numel()], [1], [self.M], layout)


@triton.jit
def _place(pid, cu_ptr, T, H, tiles, docs, steps, M: tl.constexpr, PACKED: tl.constexpr):
    """Tile number -> (sequence, head, first row in the sequence, packed row where it starts, its rows)."""
    tile = pid % tiles
    h = pid // tiles % H
    seq = pid // tiles // H
    start = tile * 0
    length = start + T
    if PACKED:
        lo = tile * 0
        hi = lo + docs
        for _ in range(steps):  # the last document whose tiles start at or before this one
            mid = (lo + hi) // 2
            begin = tl.minimum(tl.maximum(tl.load(cu_ptr + mid).to(tl.int32), 0), T)
            right = begin // M + mid <= tile
            lo = tl.where(right, mid, lo)
            hi = tl.where(right, hi, mid)
        seq = lo
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + seq).to(tl.int32), 0), T)
        length = tl.maximum(tl.minimum(tl.load(cu_ptr + seq + 1).to(tl.int32), T) - start, 0)
        tile -= start // M + seq
        length = tl.where(tile < 0, 0, length)  # before the first document
        tile = tl.maximum(tile, 0)
    return seq, h, tile * M, start, length


@triton.jit(do_not_specialize=["T", "H", "tiles", "docs", "steps"])
def _prepare(
    d_out_ptr, d_lse_ptr, out_ptr, lse_ptr, cu_ptr, stats_ptr, delta_ptr, top_ptr, counter_ptr, scratch_ptr,
    T, H, tiles, docs, steps, stride_gb, stride_gt, stride_gh, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh,
    stride_lt, D: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, PACKED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    seq, h, row, start, length = _place(pid, cu_ptr, T, H, tiles, docs, steps, M, PACKED)
    if pid == tl.num_programs(0) - 1:
        length = 0  # the spare tile
        seq = 0
        tl.store(counter_ptr, 0)
    h = h.to(tl.int64)
    r = tl.arange(0, M)
    c = tl.arange(0, PAD)
    i = row + r
    ok = i < length
    b = (seq * 0 if PACKED else seq).to(tl.int64)
    i = (start + i).to(tl.int64)
    mask = ok[:, None] if D == PAD else ok[:, None] & (c < D)[None, :]
    g = tl.load(d_out_ptr + b * stride_gb + h * stride_gh + i[:, None] * stride_gt + c[None, :], mask=mask, other=0.0)
    o = tl.load(out_ptr + b * stride_ob + h * stride_oh + i[:, None] * stride_ot + c[None, :], mask=mask, other=0.0)
    g = g.to(tl.float32)
    delta = tl.sum(g * o.to(tl.float32), 1)
    if d_lse_ptr is not None:  # a row that saw nothing has P = 0: 0 times what comes to its lse, even infinity, is 0
        some = ok & (tl.load(lse_ptr + (b * H + h) * T + i, mask=ok, other=0.0) != -float("inf"))
        delta -= tl.load(d_lse_ptr + b * stride_lb + h * stride_lh + i * stride_lt, mask=some, other=0.0)
    at = (b * H + h) * T + i
    lse = tl.load(lse_ptr + at, mask=ok, other=-float("inf"))
    lse = tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
    tl.store(delta_ptr + at, delta, mask=ok)
    if SCALED:
        largest = tl.max(tl.max(tl.abs(g), 1), 0)
        tl.atomic_max(top_ptr + seq * H + h, largest.to(tl.int32, bitcast=True), sem="relaxed")
    stats_ptr += pid.to(tl.int64) * (2 * M)
    tl.store(stats_ptr + r, lse)
    tl.store(stats_ptr + M + r, delta)
    if scratch_ptr is not None:
        scratch_ptr += pid.to(tl.int64) * (M * PAD)
        tl.store(scratch_ptr + r[:, None] * PAD + c[None, :], tl.zeros([M, PAD], tl.float32))


@gluon.jit(do_not_specialize=["T", "H", "tiles", "docs", "steps"])
def _convert(
    scratch_ptr, d_q_ptr, top_ptr, cu_ptr, T, H, tiles, docs, steps, scale,
    D: gl.constexpr, PAD: gl.constexpr, M: gl.constexpr, PACKED: gl.constexpr, SCALED: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """dQ of a tile: both warpgroups' halves from fragment order to rows."""
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, num_warps], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (PAD // 8), PAD // 8], [num_warps, 1], [1, 0])
    N: gl.constexpr = M * PAD
    pid = gl.program_id(0)
    seq, h, row, start, length = _place(pid, cu_ptr, T, H, tiles, docs, steps, M, PACKED)
    off = (
        gl.arange(0, N // 512, gl.SliceLayout(1, flat))[:, None] * 512
        + gl.arange(0, 512, gl.SliceLayout(0, flat))[None, :]
    )
    if row < length:
        if SCALED:
            bits = gl.load(top_ptr + seq * H + h)
            usable = (bits > 0) & (bits < 0x7F800000)
            back = gl.where(usable, (bits >> 23) - 2, 127)  # exponent of the power's inverse
            scale = scale * (back << 23).to(gl.float32, bitcast=True)
        x = gl.load(scratch_ptr + pid.to(gl.int64) * N + off) * scale
        x = x.to(d_q_ptr.dtype.element_ty)
        x = gl.reshape(x, [2, N // 1024, 4, 8, 4, 2, 2])  # half, octet, warp, row, lane, +8, pair
        if PAD == 128:
            x = gl.reshape(gl.permute(x, [1, 4, 6, 0, 2, 5, 3]), [M, PAD])
        else:
            x = gl.reshape(gl.permute(x, [2, 5, 3, 0, 1, 4, 6]), [M, PAD])
        x = gl.convert_layout(x, wide)
        i = row + gl.arange(0, M, gl.SliceLayout(1, wide))
        c = gl.arange(0, PAD, gl.SliceLayout(0, wide))
        at = (start + i).to(gl.int64) * (H * D) + h * D
        if not PACKED:
            at += seq.to(gl.int64) * T * (H * D)
        mask = (i < length)[:, None] & (c < D)[None, :]
        gl.store(d_q_ptr + at[:, None] + c[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["docs", "width"])
def _zero_outside(ptr, cu_ptr, docs, width, BLOCK: tl.constexpr):
    """Zero the rows that belong to no document."""
    i = tl.program_id(0).to(tl.int64)
    if (i < tl.load(cu_ptr)) | (i >= tl.load(cu_ptr + docs)):
        for at in range(0, width, BLOCK):
            c = at + tl.arange(0, BLOCK)
            tl.store(ptr + i * width + c, tl.zeros([BLOCK], ptr.dtype.element_ty), mask=c < width)


def _strides(t: Tensor) -> tuple[int, ...]:
    """Of batch, row and head."""
    return t.stride()[:3] if t.dim() == 4 else (0, *t.stride()[:2])


def prepare(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, cu_q: Tensor | None, M: int, scratch: bool
) -> Rows:
    """lse, delta and float16's powers for tiles of M query rows, and zeroed scratch for dQ."""
    T, H, D = out.shape[-3:]
    packed = cu_q is not None
    B = 1 if packed else out.shape[0]
    docs = B if cu_q is None else cu_q.shape[0] - 1
    tiles = T // M + docs if packed else cdiv(T, M)
    pad, device = descriptors.width(D), out.device
    scaled = out.dtype == torch.float16
    if (B * H * tiles + 1) * 2 * M >= 1 << 31:
        raise ValueError(f"the Hopper backward counts rows of heads in 32 bits: {B * H} heads of {T} rows are too many")
    lse = lse.contiguous()
    delta = torch.zeros_like(lse) if packed else torch.empty_like(lse)
    counter = torch.empty(1, dtype=torch.int32, device=device)
    rows = Rows(
        torch.empty((B * H * tiles + 1) * 2 * M, dtype=torch.float32, device=device),
        torch.empty((B * H * tiles + 1) * M * pad, dtype=torch.float32, device=device) if scratch else None,
        torch.zeros((docs, H), dtype=torch.int32, device=device) if scaled else counter,
        counter,
        delta, torch.empty(0, dtype=torch.int32, device=device), M, docs, tiles, B * H * tiles,
    )  # fmt: skip
    if out.stride(-1) != 1:
        out = out.contiguous()
    lse_strides = (0, 0, 0) if d_lse is None else d_lse.stride() if d_lse.dim() == 3 else (0, *d_lse.stride())
    _prepare[(B * H * tiles + 1,)](
        d_out, d_lse, out, lse, cu_q, rows.stats, delta, rows.top, counter, rows.scratch, T, H, tiles, docs,
        docs.bit_length(), *_strides(d_out), *_strides(out), *lse_strides,
        D=D, PAD=pad, M=M, PACKED=packed, SCALED=scaled, num_warps=8,
    )  # fmt: skip
    if scaled:
        bits = rows.top
        usable = (bits > 0) & (bits < 0x7F800000)
        rows.exponent = torch.where(usable, 129 - (bits >> 23), 0).to(torch.int32)
    return rows


def convert(rows: Rows, d_q: Tensor, cu_q: Tensor | None, scale: float) -> None:
    """dQ, contiguous, from the scratch; rows of no document become 0."""
    T, H, D = d_q.shape[-3:]
    packed = cu_q is not None
    B = 1 if packed else d_q.shape[0]
    _convert[(B * H * rows.tiles,)](
        rows.scratch, d_q, rows.top, cu_q, T, H, rows.tiles, rows.docs, rows.docs.bit_length(), scale,
        D=D, PAD=descriptors.width(D), M=rows.M, PACKED=packed, SCALED=d_q.dtype == torch.float16, num_warps=8,
    )  # fmt: skip
    if packed:
        _zero_outside[(T,)](d_q, cu_q, rows.docs, H * D, BLOCK=1024)
