"""The Adam step in Triton: one launch covers many tensors, which it finds through a table of addresses.

A program of the update takes one chunk of one tensor: CHUNK elements, or a page. The table (each chunk's tensor, first
element and moments, each tensor's size and addresses) is made on the host, copied from pinned memory, so that nothing
waits for the device, and kept for the next step, which mostly has the same addresses.
"""

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import cdiv, on
from . import quantized, spec
from .layout import dense_in_memory, in_one_order

BLOCK = 1024  # elements that a program of the update takes at once
CHUNK = 16 * BLOCK  # elements that it walks
TILE = 8192  # elements whose norm a program takes, in registers
PARTS = 4096  # partial norms that are summed at once
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _load(at, live, other: tl.constexpr, WHOLE: tl.constexpr):
    """Without a mask where the tile is whole: a mask of unknown length forbids 16-byte loads."""
    if WHOLE:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=live, other=other)
    return x.to(tl.float32)


@triton.jit
def _store(at, x, live, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(at, x)
    else:
        tl.store(at, x, mask=live)


@triton.jit
def _norm(largest_ptr, squares_ptr, table_ptr, chunks, n, G: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Of one tile: the largest magnitude, and the sum of squares of everything divided by it."""
    i = tl.load(table_ptr + tl.program_id(0))
    first = tl.load(table_ptr + chunks + tl.program_id(0))
    size = tl.load(table_ptr + 2 * chunks + i) - first
    g_ptr = tl.load(table_ptr + 2 * chunks + n + i).to(tl.pointer_type(G)) + first
    if ALIGNED:
        g_ptr = tl.multiple_of(g_ptr, 16)
    e = tl.arange(0, TILE)
    if size >= TILE:
        g = _load(g_ptr + e, e < size, 0.0, True)
    else:
        g = _load(g_ptr + e, e < size, 0.0, False)
    broken = tl.max((g != g).to(tl.int32), 0)  # a maximum may drop NaN
    largest = tl.max(tl.abs(g), 0)
    unit = tl.where((largest > 0) & (largest < float("inf")), largest, 1.0)
    g = g / unit
    tl.store(largest_ptr + tl.program_id(0), tl.where(broken > 0, float("nan"), largest))
    tl.store(squares_ptr + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit
def _finish(
    norm_ptr, scale_ptr, committed_ptr, largest_ptr, squares_ptr, parts, clip, CLIPS: tl.constexpr, PARTS: tl.constexpr
):
    """spec.finish after the tiles' sums are brought to one unit."""
    most = tl.zeros([PARTS], tl.float32)
    broken = tl.zeros([PARTS], tl.int32)
    for start in range(0, parts, PARTS):
        e = start + tl.arange(0, PARTS)
        here = tl.load(largest_ptr + e, mask=e < parts, other=0.0)
        most = tl.maximum(most, here)
        broken |= (here != here).to(tl.int32)
    largest = tl.where(tl.max(broken, 0) > 0, float("nan"), tl.max(most, 0))
    finite = largest < float("inf")
    unit = tl.where(finite & (largest > 0), largest, 1.0)
    total = tl.zeros([PARTS], tl.float32)
    for start in range(0, parts, PARTS):
        e = start + tl.arange(0, PARTS)
        ratio = tl.load(largest_ptr + e, mask=e < parts, other=0.0) / unit
        total += tl.load(squares_ptr + e, mask=e < parts, other=0.0) * ratio * ratio
    root = tl.maximum(tl.sqrt_rn(tl.sum(total, 0)), 1.0)  # the largest itself gives 1, unless all is 0
    beyond = unit > 3.4028235e38 / root
    norm = tl.where(finite & (largest > 0), unit * tl.where(beyond, 1.0, root), largest)
    norm = tl.where(finite & beyond, float("inf"), norm)
    scale = unit / unit
    if CLIPS:
        scale = tl.where(largest > 0, tl.minimum(clip / unit / root, 1.0), 1.0)  # no overflow in between
    committed = finite & (unit * scale < 18446744073709551616.0)  # 2^64, whose square float32 does not hold
    tl.store(norm_ptr, norm)
    tl.store(scale_ptr, tl.where(committed, scale, 0.0))
    tl.store(committed_ptr, committed)


@triton.jit
def _advance(table_ptr, n, committed_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(table_ptr + i, mask=i < n, other=0).to(tl.pointer_type(tl.float32))
    count = tl.load(at, mask=i < n, other=0.0)
    tl.store(at, count + tl.load(committed_ptr).to(tl.float32), mask=i < n)


@triton.jit
def _correction(step, log_beta):
    """1 - beta^t, in float64: 1 - 0.999 in float32 keeps only five digits."""
    return (1.0 - tl.exp(step.to(tl.float64) * log_beta)).to(tl.float32)


@triton.jit
def _equations(
    p, g, m, v, lr, rate, root2, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, DECOUPLED: tl.constexpr
):
    if not DECOUPLED:
        g += weight_decay * p
    m += one_minus_beta1 * (g - m)
    v = beta2 * v + one_minus_beta2 * g * g
    if DECOUPLED:
        p *= 1.0 - lr * weight_decay
    p -= tl.div_rn(rate * m, tl.sqrt_rn(v) / root2 + eps)
    return p, m, v


@triton.jit
def _tile(
    p_ptr, g_ptr, m_ptr, v_ptr, start, size, scale, lr, rate, root2,
    one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay,
    DECOUPLED: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    e = start + tl.arange(0, BLOCK)
    live = e < size
    p = _load(p_ptr + e, live, 0.0, WHOLE)
    g = _load(g_ptr + e, live, 0.0, WHOLE) * scale
    m = _load(m_ptr + e, live, 0.0, WHOLE)
    v = _load(v_ptr + e, live, 1.0, WHOLE)
    p, m, v = _equations(
        p, g, m, v, lr, rate, root2, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, DECOUPLED
    )
    _store(m_ptr + e, m, live, WHOLE)
    _store(v_ptr + e, v, live, WHOLE)
    _store(p_ptr + e, p, live, WHOLE)


@triton.jit
def _update(
    table_ptr, chunks, n, chunk, committed_ptr, scale_ptr, lr_ptr, log_beta1, log_beta2,
    one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay,
    P: tl.constexpr, G: tl.constexpr, DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(committed_ptr).to(tl.int1):
        i = tl.load(table_ptr + tl.program_id(0))
        first = tl.load(table_ptr + chunks + tl.program_id(0))
        m_ptr = tl.load(table_ptr + 2 * chunks + tl.program_id(0)).to(tl.pointer_type(tl.float32))
        v_ptr = tl.load(table_ptr + 3 * chunks + tl.program_id(0)).to(tl.pointer_type(tl.float32))
        size = tl.minimum(tl.load(table_ptr + 4 * chunks + i) - first, chunk)
        p_ptr = tl.load(table_ptr + 4 * chunks + n + i).to(tl.pointer_type(P)) + first
        g_ptr = tl.load(table_ptr + 4 * chunks + 2 * n + i).to(tl.pointer_type(G)) + first
        step = tl.load(tl.load(table_ptr + 4 * chunks + 3 * n + i).to(tl.pointer_type(tl.float32)))
        if ALIGNED:
            m_ptr, v_ptr = tl.multiple_of(m_ptr, 16), tl.multiple_of(v_ptr, 16)
            p_ptr, g_ptr = tl.multiple_of(p_ptr, 16), tl.multiple_of(g_ptr, 16)
        scale = tl.load(scale_ptr)
        lr = tl.load(lr_ptr)
        rate = lr / _correction(step, log_beta1)
        root2 = tl.sqrt_rn(_correction(step, log_beta2))
        whole = size // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            _tile(
                p_ptr, g_ptr, m_ptr, v_ptr, start, size, scale, lr, rate, root2,
                one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, DECOUPLED, BLOCK, True,
            )  # fmt: skip
        if whole < size:
            _tile(
                p_ptr, g_ptr, m_ptr, v_ptr, whole, size, scale, lr, rate, root2,
                one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, DECOUPLED, BLOCK, False,
            )  # fmt: skip


@triton.jit
def _guess(ratio, SIGNED: tl.constexpr):
    """The code of a ratio in [-1, 1] by the map's formula, off by at most one: its decade, its place in the decade."""
    size = tl.abs(ratio)
    decade = tl.ceil(tl.log2(tl.maximum(size, 1e-30)) * 0.30103) + 6.0
    decade = tl.minimum(tl.maximum(decade, 0.0), 6.0)
    values = 1 << decade.to(tl.int32)
    if not SIGNED:
        values *= 2
    place = ((size * tl.exp2((6.0 - decade) * 3.3219281) - 0.1) * (values.to(tl.float32) / 0.9)).to(tl.int32)
    place = values + tl.minimum(tl.maximum(place, 0), values - 1)
    if SIGNED:
        code = tl.where(ratio < 0, 127 - place, 127 + place)
    else:
        code = place - 1
    return tl.minimum(tl.maximum(code, 1), 254)


@triton.jit
def _encode(codes_ptr, scales_ptr, bounds_ptr, x, e, blocks, some, live, SIGNED: tl.constexpr, WHOLE: tl.constexpr):
    """Store the codes of the nearest values of x / its row's largest magnitude, and that."""
    largest = tl.max(tl.abs(x), 1)
    ratio = x / tl.where(largest > 0, largest, 1.0)[:, None]
    guess = _guess(ratio, SIGNED)
    # exact: as many as of the 255 points halfway between the values lie below
    above = (tl.load(bounds_ptr + guess) < ratio).to(tl.int32)
    code = guess + above - (tl.load(bounds_ptr + guess - 1) >= ratio).to(tl.int32)
    _store(codes_ptr + e, code.to(tl.uint8), live, WHOLE)
    tl.store(scales_ptr + blocks, largest, mask=some)


@triton.jit
def _code(at, live, WHOLE: tl.constexpr):
    if WHOLE:
        code = tl.load(at)
    else:
        code = tl.load(at, mask=live, other=0)
    return code


@triton.jit
def _coded_tile(
    p_ptr, g_ptr, m_ptr, v_ptr, m_scales, v_scales, start, size, scale, lr, rate, root2,
    one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay,
    signed_ptr, unsigned_ptr, signed_bounds, unsigned_bounds,
    DECOUPLED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    blocks = start // WIDTH + tl.arange(0, ROWS)
    e = start + tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    live = e < size
    some = blocks * WIDTH < size
    p = _load(p_ptr + e, live, 0.0, WHOLE)
    g = _load(g_ptr + e, live, 0.0, WHOLE) * scale
    m = tl.load(signed_ptr + _code(m_ptr + e, live, WHOLE))
    m *= tl.load(m_scales + blocks, mask=some, other=0.0)[:, None]
    v = tl.load(unsigned_ptr + _code(v_ptr + e, live, WHOLE))
    v *= tl.load(v_scales + blocks, mask=some, other=0.0)[:, None]
    p, m, v = _equations(
        p, g, m, v, lr, rate, root2, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, DECOUPLED
    )
    _store(p_ptr + e, p, live, WHOLE)
    _encode(m_ptr, m_scales, signed_bounds, tl.where(live, m, 0.0), e, blocks, some, live, True, WHOLE)
    _encode(v_ptr, v_scales, unsigned_bounds, tl.where(live, v, 0.0), e, blocks, some, live, False, WHOLE)


@triton.jit
def _update_quantized(
    table_ptr, chunks, n, page, committed_ptr, scale_ptr, lr_ptr, log_beta1, log_beta2,
    one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay,
    signed_ptr, unsigned_ptr, signed_bounds, unsigned_bounds,
    P: tl.constexpr, G: tl.constexpr, DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """A program takes a page, ROWS blocks of WIDTH elements at a time; see quantized.parts."""
    if tl.load(committed_ptr).to(tl.int1):
        i = tl.load(table_ptr + tl.program_id(0))
        first = tl.load(table_ptr + chunks + tl.program_id(0))
        m_ptr = tl.load(table_ptr + 2 * chunks + tl.program_id(0)).to(tl.pointer_type(tl.uint8))
        size = tl.minimum(tl.load(table_ptr + 4 * chunks + i) - first, page)
        p_ptr = tl.load(table_ptr + 4 * chunks + n + i).to(tl.pointer_type(P)) + first
        g_ptr = tl.load(table_ptr + 4 * chunks + 2 * n + i).to(tl.pointer_type(G)) + first
        step = tl.load(tl.load(table_ptr + 4 * chunks + 3 * n + i).to(tl.pointer_type(tl.float32)))
        v_ptr = m_ptr + page
        m_scales = (m_ptr + 2 * page).to(tl.pointer_type(tl.float32))
        v_scales = m_scales + page // WIDTH
        if ALIGNED:
            m_ptr, v_ptr = tl.multiple_of(m_ptr, 8), tl.multiple_of(v_ptr, 8)
            p_ptr, g_ptr = tl.multiple_of(p_ptr, 16), tl.multiple_of(g_ptr, 16)
        scale = tl.load(scale_ptr)
        lr = tl.load(lr_ptr)
        rate = lr / _correction(step, log_beta1)
        root2 = tl.sqrt_rn(_correction(step, log_beta2))
        whole = size // (ROWS * WIDTH) * (ROWS * WIDTH)
        for start in range(0, whole, ROWS * WIDTH):
            _coded_tile(
                p_ptr, g_ptr, m_ptr, v_ptr, m_scales, v_scales, start, size, scale, lr, rate, root2,
                one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, signed_ptr, unsigned_ptr, signed_bounds,
                unsigned_bounds, DECOUPLED, ROWS, WIDTH, True,
            )  # fmt: skip
        if whole < size:
            _coded_tile(
                p_ptr, g_ptr, m_ptr, v_ptr, m_scales, v_scales, whole, size, scale, lr, rate, root2,
                one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, signed_ptr, unsigned_ptr, signed_bounds,
                unsigned_bounds, DECOUPLED, ROWS, WIDTH, False,
            )  # fmt: skip


def norm(grads: list[Tensor], clip: float | None) -> tuple[Tensor, Tensor, Tensor]:
    device = grads[0].device
    groups, parts = [], 0
    for indices in _by_dtype(grads):
        # any order of the elements will do, so a dense tensor is read as it lies
        dense = [grads[i] if dense_in_memory(grads[i]) else grads[i].contiguous() for i in indices]
        sizes, at = tuple(g.numel() for g in dense), _addresses(dense)
        groups.append((dense, *_table(*_place(device), TILE, sizes, (at,), None), parts))
        parts += groups[-1][2]
    total, scale = (torch.empty((), dtype=torch.float32, device=device) for _ in range(2))
    committed = torch.empty((), dtype=torch.bool, device=device)
    largest, squares = torch.empty(2, parts, dtype=torch.float32, device=device)
    with on(grads[0]):
        for dense, table, chunks, aligned, start in groups:
            G, n = TYPES[dense[0].dtype], len(dense)
            _norm[(chunks,)](
                largest[start:], squares[start:], table, chunks, n, G=G, ALIGNED=aligned, TILE=TILE, num_warps=8
            )
        _finish[(1,)](
            total, scale, committed, largest, squares, parts, clip or 0.0, CLIPS=clip is not None, PARTS=PARTS
        )
    return total, scale, committed


def advance(steps: list[Tensor], committed: Tensor) -> None:
    if steps:
        table = _copied(*_place(steps[0].device), _addresses(steps))
        with on(steps[0]):
            _advance[(cdiv(len(steps), BLOCK),)](table, len(steps), committed, BLOCK=BLOCK)


def step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    committed: Tensor,
    *options,
) -> None:
    advance(steps, committed)
    for indices in _by_dtype(params, grads):
        rows = [in_one_order(params[i], grads[i], exp_avgs[i], exp_avg_sqs[i]) for i in indices]
        p, g, m, v = zip(*rows)
        sizes, columns = tuple(t.numel() for t in p), (_addresses(p), _addresses(g), _addresses(steps, indices))
        made = _table(*_place(p[0].device), CHUNK, sizes, columns, (_addresses(m), _addresses(v)))
        _launch(_update, made, CHUNK, p, g, committed, *options, BLOCK=BLOCK)
        for i, row in zip(indices, rows):
            for stored, worked in zip((params[i], exp_avgs[i], exp_avg_sqs[i]), (row[0], row[2], row[3])):
                if worked is not stored:
                    stored.copy_(worked)


def paged_step(
    params: list[Tensor],
    grads: list[Tensor],
    slabs: list[Tensor],
    starts: list[int],
    firsts: list[int],
    page_size: int,
    steps: list[Tensor],
    committed: Tensor,
    *options,
) -> None:
    coded = slabs[0].dtype == torch.uint8
    where = (coded, _addresses(slabs), tuple(starts), tuple(spec.pages_in(s) for s in slabs))
    for indices in _by_dtype(params, grads):
        p, g = ([tensors[i].contiguous() for i in indices] for tensors in (params, grads))
        sizes, columns = tuple(t.numel() for t in p), (_addresses(p), _addresses(g), _addresses(steps, indices))
        made = _table(
            *_place(p[0].device), page_size, sizes, columns, (*where, tuple(firsts[i] for i in indices))
        )  # fmt: skip
        if coded:
            (signed, bounds), (unsigned, unsigned_bounds) = (quantized.tables(s, p[0].device) for s in (True, False))
            maps = signed, unsigned, bounds, unsigned_bounds
            _launch(
                _update_quantized, made, page_size, p, g, committed, *options, *maps,
                ROWS=BLOCK // quantized.BLOCK, WIDTH=quantized.BLOCK,
            )  # fmt: skip
        else:
            _launch(_update, made, page_size, p, g, committed, *options, BLOCK=BLOCK)
        for i, worked in zip(indices, p):
            if worked is not params[i]:
                params[i].copy_(worked)


def _launch(
    kernel, made, chunk, p, g, committed, scale, lr, beta1, beta2, eps, weight_decay, decoupled, *maps, **sizes
) -> None:
    table, chunks, aligned = made
    if chunks:
        logs = (math.log(b) if b else -math.inf for b in (beta1, beta2))
        with on(p[0]):
            kernel[(chunks,)](
                table, chunks, len(p), chunk, committed, scale, lr, *logs, 1 - beta1, beta2, 1 - beta2, eps,
                weight_decay, *maps, P=TYPES[p[0].dtype], G=TYPES[g[0].dtype], DECOUPLED=decoupled, ALIGNED=aligned,
                **sizes,
            )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _table(device, stream, chunk, sizes, columns, moments) -> tuple[Tensor, int, bool]:
    """([chunk -> tensor | first element | m | v], [tensor -> size | columns], chunks, whether all is 16-byte aligned).

    moments: None leaves m and v out; else two lists of addresses, or where pages lie (see _pages).
    """
    size = torch.tensor(sizes, dtype=torch.int64)
    count = (size + chunk - 1) // chunk
    owner = torch.repeat_interleave(torch.arange(len(sizes)), count)
    number = torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]
    of_chunk = [owner, number * chunk]
    if moments is not None and len(moments) == 2:
        of_chunk += [torch.tensor(base, dtype=torch.int64)[owner] + 4 * chunk * number for base in moments]
    elif moments is not None:
        m, v, here = _pages(chunk, owner, number, *moments)
        of_chunk = [column[here] for column in (*of_chunk, m, v)]
    of_tensor = [size, *(torch.tensor(c, dtype=torch.int64) for c in columns)]
    # of codes, 8 bytes are enough: a page of them is 8 x 65 x k bytes
    unit = 8 if moments is not None and moments[0] is True else 16
    aligned = all(not (c % unit).any() for c in of_chunk[2:]) and all(not (c % 16).any() for c in of_tensor[1:3])
    flat = torch.cat((*of_chunk, *of_tensor))
    return _sent(flat, device), len(of_chunk[0]), aligned


def _pages(page_size, owner, number, coded, bases, starts, pages, firsts) -> tuple[Tensor, Tensor, Tensor]:
    """(address of m, address of v, whether the page lies in one of these slabs) of page `number` of each owner."""
    base, start, rows, first = (torch.tensor(x, dtype=torch.int64) for x in (bases, starts, pages, firsts))
    number = number + first[owner]
    slab = torch.searchsorted(start, number, right=True) - 1
    row = number - start[slab]  # slab -1 is the last one, which such a page does not reach
    here = (slab >= 0) & (row < rows[slab])
    m = base[slab] + row * (quantized.page_bytes(page_size) if coded else 4 * page_size)
    return m, m + 4 * page_size * (0 if coded else rows[slab]), here


@functools.lru_cache(maxsize=64)
def _copied(device, stream, numbers: tuple[int, ...]) -> Tensor:
    return _sent(torch.tensor(numbers, dtype=torch.int64), device)


def _sent(flat: Tensor, device: torch.device) -> Tensor:
    return flat.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else flat


def _place(device: torch.device) -> tuple[torch.device, int]:
    """A table belongs to the stream that filled it."""
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _addresses(tensors: Sequence[Tensor], indices: Sequence[int] | None = None) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in (tensors if indices is None else [tensors[i] for i in indices]))


def _by_dtype(*columns: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the non-empty tensors, grouped by the dtypes of their row."""
    groups: dict[tuple, list[int]] = {}
    for i, row in enumerate(zip(*columns)):
        if row[0].numel():
            groups.setdefault(tuple(t.dtype for t in row), []).append(i)
    return list(groups.values())
