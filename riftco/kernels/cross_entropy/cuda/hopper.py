"""Loss and gradient of rows of 16-bit logits on Hopper: through a ring in shared memory, each logit read once.

Persistent programs of three roles. A producer warp fills the slots of the ring by TMA, row after row. The summing warps
take each slot's statistics and leave a row's maximum and sum in device memory. The writing warps, up to a ring's length
behind them, make its gradient from the same slots and free them. So reading, summing and writing go on at once, and no
reduction makes the memory wait.

A row is divided among PARTS programs (one for a vocabulary that the ring holds): each leaves the numbers of its part,
and all wait for each other's. A cooperative launch keeps them on the device together. A program never waits for a later
row than the one it holds whole, so the ring must hold its part of a row.

PANELS: rows are cut along V, as held.py says. Of panels [N, span] the first `together` lie one behind the other, and
the others behind `elsewhere`; the last may be narrower. Chunks divide span.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..._launch import Again, cdiv, on, ordinary
from ..route import LINE as _LINE
from ..route import Ring
from . import pieces
from .pieces import LARGEST as _LARGEST
from .pieces import LOG2E as _LOG2E

LINE = gl.constexpr(_LINE)
LARGEST, LOG2E = gl.constexpr(_LARGEST.value), gl.constexpr(_LOG2E.value)


@gluon.jit
def _uniform(x):
    """x, equal in all threads, through lane 0 of each warp: branches on it are then no divergence."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _next(slot, phase, S: gl.constexpr):
    """The slot after `slot`, and its barriers' phase."""
    phase = gl.where(slot == S - 1, phase ^ 1, phase)
    return gl.where(slot == S - 1, 0, slot + 1), phase


@gluon.jit
def _label(target_ptr, row_weight_ptr, n, N, V, ignore_index, HAS_ROW_WEIGHT: gl.constexpr):
    """(class or -1 where it is none, row weight, whether the row is computed) of row n; no row past the last is."""
    y = gl.load(target_ptr + n, mask=n < N, other=-1).to(gl.int64)
    w = 1.0
    if HAS_ROW_WEIGHT:
        w = gl.load(row_weight_ptr + n, mask=n < N, other=0.0)
    live = (y != ignore_index) & (y >= 0) & (w != 0.0)
    return gl.where(y < V, y, -1).to(gl.int32), w, _uniform(live.to(gl.int32))


@gluon.jit
def _place(chunks, PARTS: gl.constexpr):
    """(the program's first row, the step to its next, its first chunk, the one behind its last)."""
    part = gl.program_id(0) % PARTS
    each = (chunks + PARTS - 1) // PARTS
    first = gl.minimum(part * each, chunks)
    return gl.program_id(0) // PARTS, gl.num_programs(0) // PARTS, first, gl.minimum(first + each, chunks)


@gluon.jit
def _in_panel(base, elsewhere, n, at, V, N, span, together):
    """Of row n: a pointer that class `at`, and those behind it in its panel, lie so many classes behind."""
    i = at // span
    away = i >= together
    width = gl.minimum(V - i * span, span)
    offset = (i - gl.where(away, together, 0)).to(gl.int64) * N * span + n * width - i * span
    return gl.where(away, elsewhere, base) + gl.multiple_of(offset, 8)


@gluon.jit
def _produce(
    desc, away_desc, last_desc, ring, full, empty, target_ptr, row_weight_ptr, inner, N, lines, chunks, ignore_index,
    span, together, PANELS: gl.constexpr, HAS_ROW_WEIGHT: gl.constexpr, PARTS: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = desc.block_type.shape[2]
    V = lines * LINE
    start, step, first, last = _place(chunks, PARTS)
    slot = 0
    phase = 1
    _y, _w, live = _label(target_ptr, row_weight_ptr, start, N, V, ignore_index, HAS_ROW_WEIGHT)
    for n in range(start, N, step):
        _y, _w, following = _label(target_ptr, row_weight_ptr, n + step, N, V, ignore_index, HAS_ROW_WEIGHT)
        if live != 0:
            outer = n // inner
            row = n % inner
            for j in range(first, last):
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(full.index(slot), desc.block_type.nbytes)
                if PANELS:
                    i = j * ROWS * LINE // span
                    at = j * ROWS - i * (span // LINE)
                    if (i + 1) * span >= V:
                        tma.async_copy_global_to_shared(last_desc, [0, n, at, 0], full.index(slot), ring.index(slot))
                    elif i >= together:
                        tma.async_copy_global_to_shared(
                            away_desc, [i - together, n, at, 0], full.index(slot), ring.index(slot)
                        )
                    else:
                        tma.async_copy_global_to_shared(desc, [i, n, at, 0], full.index(slot), ring.index(slot))
                else:
                    tma.async_copy_global_to_shared(desc, [outer, row, j * ROWS, 0], full.index(slot), ring.index(slot))
                slot, phase = _next(slot, phase, S)
        live = following


@gluon.jit
def _float32(x):
    """A 16-bit chunk in float32; the upper bfloat16 of a word in one instruction, where a conversion takes two."""
    if x.dtype == gl.bfloat16:
        u = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        u = x.to(gl.float32)
    return u


@gluon.jit
def _threads(x, W: gl.constexpr):
    """A chunk [ROWS, LINE] as [repeats, 4 W, 8, 8]: the first and the last dimension are one thread's."""
    R: gl.constexpr = x.shape[0] // (4 * W)
    layout: gl.constexpr = gl.BlockedLayout([R, 1, 1, 8], [1, 4, 8, 1], [1, W, 1, 1], [3, 2, 1, 0])
    return gl.convert_layout(gl.reshape(x, [R, 4 * W, 8, 8]), layout, assert_trivial=True)


@gluon.jit
def _classes(ROWS: gl.constexpr, W: gl.constexpr):
    """Places [ROWS, LINE] of a chunk's logits, 16 bytes a thread, 8 threads a line."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    return row[:, None] * LINE + gl.arange(0, LINE, gl.SliceLayout(0, L))[None, :]


@gluon.jit
def _statistics(x, start, v, V, m, s, y, c, LAST: gl.constexpr, W: gl.constexpr):
    """A chunk into the threads' maxima and sums [4 W, 8]; the label y's term stays out."""
    v = _threads(start + v, W)
    u = _threads(_float32(x), W)
    if LAST:
        u = gl.where(v < V, u, -float("inf"))
    new = gl.minimum(gl.maximum(m, gl.max(gl.max(u, 3), 0)), LARGEST)
    e = gl.exp2((u - new[None, :, :, None]) * c)
    if (y >= start) & (y < start + x.shape[0] * x.shape[1]):
        e = gl.where(v == y, 0.0, e)
    decay = gl.exp2(gl.maximum(m - new, -1e30) * c)  # 0 at the start, without an overflow
    return new, s * decay + gl.sum(gl.sum(e, 3), 0)


@gluon.jit
def _note(top, x_y, others):
    """A part's maximum, a 16-bit logit or beyond all of them, the label's logit and the sum in 64 bits, never 0."""
    high = (~others.to(gl.int32, bitcast=True)).to(gl.int64)
    low = (top.to(x_y.dtype).to(gl.int16, bitcast=True).to(gl.int32) << 16) | (
        x_y.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    )
    return (high << 32) | (low.to(gl.int64) & 0xFFFFFFFF)


@gluon.jit
def _noted(note, dt: gl.constexpr):
    """_note's three, in float32."""
    others = (~((note >> 32).to(gl.int32))).to(gl.float32, bitcast=True)
    low = note.to(gl.int32)
    top = (low >> 16).to(gl.int16).to(dt, bitcast=True).to(gl.float32)
    x_y = low.to(gl.int16).to(dt, bitcast=True).to(gl.float32)
    return gl.minimum(gl.maximum(top, -LARGEST), LARGEST), x_y, others


@gluon.jit
def _sum_up(
    ring, full, x_ptr, elsewhere_ptr, target_ptr, row_weight_ptr, notes_ptr, inner, x_outer, x_inner, N, lines, chunks,
    ignore_index, span, together, s, PANELS: gl.constexpr, HAS_ROW_WEIGHT: gl.constexpr, PARTS: gl.constexpr,
    S: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The summing warps: a note of each row's part."""
    ROWS: gl.constexpr = ring.shape[3]
    C: gl.constexpr = ROWS * LINE
    v = _classes(ROWS, W)
    L: gl.constexpr = v.type.layout
    zero = gl.sum(gl.sum(_threads(gl.zeros([ROWS, LINE], gl.float32, L), W), 3), 0)  # [4 W, 8], a thread each
    V = lines * LINE
    c = s * LOG2E
    start, step, first, last = _place(chunks, PARTS)
    slot = 0
    phase = 0
    y, _w, live = _label(target_ptr, row_weight_ptr, start, N, V, ignore_index, HAS_ROW_WEIGHT)
    n = start.to(gl.int64)
    while n < N:
        next_y, _w, following = _label(target_ptr, row_weight_ptr, n + step, N, V, ignore_index, HAS_ROW_WEIGHT)
        if live != 0:
            # before the note, which lets the row's other parts be written over
            if PANELS:
                x_row = _in_panel(x_ptr, elsewhere_ptr, n, gl.maximum(y, 0), V, N, span, together)
            else:
                x_row = x_ptr + (n // inner) * x_outer + (n % inner) * x_inner
            x_y = gl.load(x_row + y, mask=y >= 0, other=0.0)
            m = zero - LARGEST
            total = zero
            for j in range(first, gl.minimum(last, chunks - 1)):
                mbarrier.wait(full.index(slot), phase)
                x = ring.index(slot).reshape((ROWS, LINE)).load(L)
                m, total = _statistics(x, j * C, v, V, m, total, y, c, False, W)
                slot, phase = _next(slot, phase, S)
            if (last == chunks) & (first < last):
                mbarrier.wait(full.index(slot), phase)
                x = ring.index(slot).reshape((ROWS, LINE)).load(L)
                m, total = _statistics(x, (chunks - 1) * C, v, V, m, total, y, c, True, W)
                slot, phase = _next(slot, phase, S)
            top = gl.max(gl.max(m, 1), 0)
            others = gl.sum(gl.sum(total * gl.exp2(gl.maximum(m - top, -1e30) * c), 1), 0)
            at = notes_ptr + n * PARTS + gl.program_id(0) % PARTS
            gl.atomic_xchg(at, _note(top, x_y, others), sem="relaxed", scope="gpu")
        y, live = next_y, following
        n += step


@gluon.jit
def _gradient(x, start, v, V, g_row, top, c, k, y, hot, LAST: gl.constexpr):
    d = gl.exp2((_float32(x) - top) * c) * k
    if (y >= start) & (y < start + x.shape[0] * x.shape[1]):
        d = gl.where(start + v == y, hot, d)
    d = d.to(g_row.dtype.element_ty)
    if LAST:
        gl.store(g_row + start + v, d, mask=start + v < V, cache_modifier=".cs")
    else:
        gl.store(g_row + start + v, d, cache_modifier=".cs")


@gluon.jit
def _row(notes_ptr, n, c, dt: gl.constexpr, PARTS: gl.constexpr):
    """(top, the label's logit, sum without the label) of row n, once all its parts are noted."""
    at = notes_ptr + n * PARTS
    top = -LARGEST
    x_y = 0.0
    others = 0.0
    for i in gl.static_range(PARTS):
        note = gl.load(at + i, volatile=True)
        while note == 0:
            note = gl.load(at + i, volatile=True)
        part_top, part_y, part_others = _noted(note, dt)
        new = gl.maximum(top, part_top)
        others = others * gl.exp2(gl.maximum(top - new, -1e30) * c) + part_others * gl.exp2(
            gl.maximum(part_top - new, -1e30) * c
        )
        top = new
        x_y = part_y
    return top, x_y, others


@gluon.jit
def _write(
    ring, full, empty, g_ptr, elsewhere_ptr, target_ptr, row_weight_ptr, up_ptr, notes_ptr, loss_ptr, top_ptr,
    log_total_ptr, inner, g_outer, g_inner, stride_up, N, lines, chunks, ignore_index, span, together, z_loss, s, scale,
    PANELS: gl.constexpr, HAS_UP: gl.constexpr, HAS_ROW_WEIGHT: gl.constexpr, PARTS: gl.constexpr, S: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """The writing warps: loss and gradient."""
    ROWS: gl.constexpr = ring.shape[3]
    C: gl.constexpr = ROWS * LINE
    dt: gl.constexpr = g_ptr.dtype.element_ty
    v = _classes(ROWS, W)
    L: gl.constexpr = v.type.layout
    V = lines * LINE
    c = s * LOG2E
    start, step, first, last = _place(chunks, PARTS)
    slot = 0
    phase = 0
    y, weight, live = _label(target_ptr, row_weight_ptr, start, N, V, ignore_index, HAS_ROW_WEIGHT)
    n = start.to(gl.int64)
    while n < N:
        g_row = g_ptr + gl.multiple_of((n // inner) * g_outer + (n % inner) * g_inner, 8)
        next_y, next_weight, following = _label(
            target_ptr, row_weight_ptr, n + step, N, V, ignore_index, HAS_ROW_WEIGHT
        )
        loss = 0.0
        top = 0.0
        log_total = 0.0
        if live != 0:
            up = scale * weight
            if HAS_UP:
                up = gl.load(up_ptr + n * stride_up).to(gl.float32) * weight * scale
            top, x_y, others = _row(notes_ptr, n, c, dt, PARTS)
            d_y = gl.where(y >= 0, x_y - top, -float("inf"))
            sum_all = others + gl.exp2(d_y * c)
            log_total = gl.where(d_y == 0, pieces.log1p(others), gl.log(sum_all))
            log_p = gl.where(y >= 0, s * d_y, float("nan")) - log_total
            lse = s * top + log_total
            loss = (pieces.times(z_loss, lse * lse) - log_p) * weight
            up = gl.where(y >= 0, up, float("nan"))
            rest = pieces.times(2 * z_loss, lse) * up
            k = (up + rest) / sum_all
            hot = up * pieces.expm1(log_p) + rest * gl.exp(log_p)
            for j in range(first, gl.minimum(last, chunks - 1)):
                mbarrier.wait(full.index(slot), phase)
                x = ring.index(slot).reshape((ROWS, LINE)).load(L)
                if PANELS:
                    g_row = _in_panel(g_ptr, elsewhere_ptr, n, j * C, V, N, span, together)
                _gradient(x, j * C, v, V, g_row, top, c, k, y, hot, False)
                mbarrier.arrive(empty.index(slot), count=1)  # behind the stores: what they hold has left the slot
                slot, phase = _next(slot, phase, S)
            if (last == chunks) & (first < last):
                mbarrier.wait(full.index(slot), phase)
                x = ring.index(slot).reshape((ROWS, LINE)).load(L)
                if PANELS:
                    g_row = _in_panel(g_ptr, elsewhere_ptr, n, (chunks - 1) * C, V, N, span, together)
                _gradient(x, (chunks - 1) * C, v, V, g_row, top, c, k, y, hot, True)
                mbarrier.arrive(empty.index(slot), count=1)
                slot, phase = _next(slot, phase, S)
        else:
            for j in range(first, last):
                at = j * C + v
                if PANELS:
                    g_row = _in_panel(g_ptr, elsewhere_ptr, n, j * C, V, N, span, together)
                gl.store(g_row + at, gl.zeros([ROWS, LINE], dt, L), mask=at < V, cache_modifier=".cs")
        if gl.program_id(0) % PARTS == 0:
            gl.store(loss_ptr + n, loss)
            gl.store(top_ptr + n, top)
            gl.store(log_total_ptr + n, log_total)
        y, weight, live = next_y, next_weight, following
        n += step


NUMBERS = (
    "inner", "x_outer", "x_inner", "g_outer", "g_inner", "stride_up", "N", "lines", "chunks", "ignore_index", "span",
    "together",
)  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)  # one kernel for all sizes
def ring_rows(
    desc, away_desc, last_desc, x_ptr, g_ptr, elsewhere_ptr, target_ptr, row_weight_ptr, up_ptr, notes_ptr, loss_ptr,
    top_ptr, log_total_ptr, inner, x_outer, x_inner, g_outer, g_inner, stride_up, N, lines, chunks, ignore_index, span,
    together, z_loss, s, scale, PANELS: gl.constexpr, HAS_UP: gl.constexpr, HAS_ROW_WEIGHT: gl.constexpr,
    PARTS: gl.constexpr, S: gl.constexpr, SUMMING: gl.constexpr, WRITING: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    ring = gl.allocate_shared_memory(desc.dtype, [S] + desc.block_type.shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_write, (
                ring, full, empty, g_ptr, elsewhere_ptr, target_ptr, row_weight_ptr, up_ptr, notes_ptr, loss_ptr,
                top_ptr, log_total_ptr, inner, g_outer, g_inner, stride_up, N, lines, chunks, ignore_index, span,
                together, z_loss, s, scale, PANELS, HAS_UP, HAS_ROW_WEIGHT, PARTS, S, WRITING,
            )),
            (_sum_up, (
                ring, full, x_ptr, elsewhere_ptr, target_ptr, row_weight_ptr, notes_ptr, inner, x_outer, x_inner, N,
                lines, chunks, ignore_index, span, together, s, PANELS, HAS_ROW_WEIGHT, PARTS, S, SUMMING,
            )),
            (_produce, (
                desc, away_desc, last_desc, ring, full, empty, target_ptr, row_weight_ptr, inner, N, lines, chunks,
                ignore_index, span, together, PANELS, HAS_ROW_WEIGHT, PARTS, S,
            )),
        ],
        [SUMMING, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shared_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def _launch(ring: Ring, panels: bool, up: bool, weighted: bool, *_: object) -> Again:
    warps = ring.summing + ring.writing + 4
    return Again(
        ring_rows, PANELS=panels, HAS_UP=up, HAS_ROW_WEIGHT=weighted, PARTS=ring.parts, S=ring.slots,
        SUMMING=ring.summing, WRITING=ring.writing, REGISTERS=ring.registers, num_warps=ring.writing,
        maxnreg=None if ring.programs == 1 else 65536 // (32 * warps * ring.programs) // 8 * 8,
        launch_cooperative_grid=ring.parts > 1,
    )  # fmt: skip


# of calls that look alike to Triton: equal arguments here, and addresses that are multiples of 16 bytes
_kept = functools.lru_cache(64)(_launch)


def _described(x: Tensor, shape: list[int], strides: list[int], ring: Ring) -> TensorDescriptor:
    return TensorDescriptor(
        x, [*shape, LINE.value], [*strides, LINE.value, 1], [1, 1, ring.lines, LINE.value], _shared_layout()
    )


class Rows(NamedTuple):
    """What the labelled rows of a call have in common with its logits' place.

    first: which row of target, row_weight, up and out is the logits' first. options: ignore_index, z_loss, logit_scale.
    """

    target: Tensor
    row_weight: Tensor | None
    up: Tensor | None
    stride_up: int
    out: list[Tensor]
    options: tuple[int, float, float]
    first: int = 0


def forward_backward(
    x: Tensor, strides: tuple[int, int, int], g: Tensor, g_strides: tuple[int, int], rows: Rows, ring: Ring
) -> None:  # fmt: skip
    """Loss, top and log_total into rows.out and the gradient into g, for calls that route.py gave a Ring.

    strides: inner, outer stride, inner stride of the rows of x (`as_rows`); g_strides: the last two, of g.
    """
    V = x.shape[-1]
    N = x.numel() // V
    inner, outer, step = strides
    apart = [outer if inner < N else V, step if inner > 1 else V]
    desc = _described(x, [N // inner, inner, V // LINE.value], apart, ring)
    _run((desc, None, None, x, g, None), N, V, (*strides, *g_strides), (0, 0), rows, ring)


def in_panels(panels: list[Tensor], together: int, rows: Rows, ring: Ring) -> None:
    """The same of rows cut along V, in place; panels [N, span], the last perhaps narrower, of which the first
    `together` lie one behind the other, and the others, too. A chunk of the ring divides span."""
    (N, span), last = panels[0].shape, len(panels) - 1
    V = last * span + panels[last].shape[1]

    def of(first: int, count: int) -> TensorDescriptor:
        width = panels[first].shape[1]
        return _described(panels[first], [count, N, width // LINE.value], [N * width, width], ring)

    away = min(together, last)  # the first that lies elsewhere; where none does, its place is never asked for
    descs = (of(0, away), of(away, last - away) if away < last else of(0, away), of(last, 1))
    _run((*descs, panels[0], panels[0], panels[away]), N, V, (N, 0, 0, 0, 0), (span, together), rows, ring)


def _run(places: tuple, N: int, V: int, strides: tuple[int, ...], lay: tuple[int, int], rows: Rows, ring: Ring) -> None:
    *_, x, g, there = places
    lines = V // LINE.value
    programs = min(N, _multiprocessors(x.device) * ring.programs // ring.parts) * ring.parts
    notes = torch.zeros(N * ring.parts, dtype=torch.int64, device=x.device)
    ignore_index, z_loss, scale = rows.options
    numbers = (*strides, rows.stride_up, N, lines, cdiv(lines, ring.lines), ignore_index, *lay)
    per_row = [rows.target, rows.row_weight, *rows.out]
    usual = rows.first % 4 == 0 and ordinary([g, there, rows.up, *per_row], numbers)
    launch = (_kept if usual else _launch)(
        ring, there is not None, rows.up is not None, rows.row_weight is not None, x.device,
        *(None if t is None else t.dtype for t in (x, rows.up, *per_row)),
    )  # fmt: skip
    (up,) = launch.places([rows.up], rows.first * rows.stride_up)
    target, row_weight, *out = launch.places(per_row, rows.first)
    with on(x):
        launch(programs, *places, target, row_weight, up, notes, *out, *numbers, z_loss, scale, scale)
