"""The Adam step in Triton: one launch covers many tensors, which it finds through a table of addresses.

A program takes one chunk of one tensor. The table (which tensor a chunk belongs to, where each tensor's chunks start,
its size, and the addresses) is made on the host and copied from pinned memory, so that nothing waits for the device.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import on
from . import spec

BLOCK = 1024
CHUNK = 16 * BLOCK  # elements a program walks
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _chunk(table_ptr, chunks, n):
    """(tensor of this program's chunk, its first element, its size); the table's columns follow each other."""
    i = tl.load(table_ptr + tl.program_id(0))
    first = tl.load(table_ptr + chunks + i)
    return i, (tl.program_id(0) - first), tl.load(table_ptr + chunks + n + i)


@triton.jit
def _largest(out_ptr, table_ptr, chunks, n, G: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    i, c, size = _chunk(table_ptr, chunks, n)
    g_ptr = tl.load(table_ptr + chunks + 2 * n + i).to(tl.pointer_type(G))
    largest = tl.zeros([BLOCK], tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tl.minimum(CHUNK, size - c * CHUNK), BLOCK):
        e = c * CHUNK + start + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + e, mask=e < size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(g))
        broken += (g != g).to(tl.int32)  # a maximum may drop NaN
    tl.store(out_ptr + tl.program_id(0), tl.where(tl.sum(broken, 0) > 0, float("nan"), tl.max(largest, 0)))


@triton.jit
def _squares(out_ptr, unit_ptr, table_ptr, chunks, n, G: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    i, c, size = _chunk(table_ptr, chunks, n)
    g_ptr = tl.load(table_ptr + chunks + 2 * n + i).to(tl.pointer_type(G))
    unit = tl.load(unit_ptr)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tl.minimum(CHUNK, size - c * CHUNK), BLOCK):
        e = c * CHUNK + start + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + e, mask=e < size, other=0.0).to(tl.float32) / unit
        total += g * g
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _update(
    table_ptr, chunks, n, committed_ptr, scale_ptr, lr_ptr, correction1_ptr, correction2_ptr,
    one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay,
    P: tl.constexpr, G: tl.constexpr, DECOUPLED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(committed_ptr).to(tl.int1):
        i, c, size = _chunk(table_ptr, chunks, n)
        g_ptr = tl.load(table_ptr + chunks + 2 * n + i).to(tl.pointer_type(G))
        p_ptr = tl.load(table_ptr + chunks + 3 * n + i).to(tl.pointer_type(P))
        m_ptr = tl.load(table_ptr + chunks + 4 * n + i).to(tl.pointer_type(tl.float32))
        v_ptr = tl.load(table_ptr + chunks + 5 * n + i).to(tl.pointer_type(tl.float32))
        scale = tl.load(scale_ptr)
        lr = tl.load(lr_ptr)
        rate = lr / tl.load(correction1_ptr + i)
        root2 = tl.sqrt(tl.load(correction2_ptr + i))
        for start in range(0, tl.minimum(CHUNK, size - c * CHUNK), BLOCK):
            e = c * CHUNK + start + tl.arange(0, BLOCK)
            live = e < size
            p = tl.load(p_ptr + e, mask=live, other=0.0).to(tl.float32)
            g = tl.load(g_ptr + e, mask=live, other=0.0).to(tl.float32) * scale
            m = tl.load(m_ptr + e, mask=live, other=0.0)
            v = tl.load(v_ptr + e, mask=live, other=1.0)
            if not DECOUPLED:
                g += weight_decay * p
            m += one_minus_beta1 * (g - m)
            v = beta2 * v + one_minus_beta2 * g * g
            if DECOUPLED:
                p *= 1.0 - lr * weight_decay
            p -= rate * m / (tl.sqrt(v) / root2 + eps)
            tl.store(m_ptr + e, m, mask=live)
            tl.store(v_ptr + e, v, mask=live)
            tl.store(p_ptr + e, p, mask=live)


def _table(sizes: Sequence[int], *columns: Sequence[Tensor]) -> tuple[Tensor, int]:
    """([chunk -> tensor | first chunk | size | addresses, one column after the other], number of chunks)."""
    size = torch.tensor(sizes, dtype=torch.int64)
    count = (size + CHUNK - 1) // CHUNK
    owner = torch.repeat_interleave(torch.arange(len(sizes)), count)
    addresses = [torch.tensor([t.data_ptr() for t in column], dtype=torch.int64) for column in columns]
    table = torch.cat([owner, count.cumsum(0) - count, size, *addresses])
    device = columns[0][0].device
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return table, len(owner)


def _by_dtype(*columns: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the non-empty tensors, grouped by the dtypes of their row."""
    groups: dict[tuple, list[int]] = {}
    for i, row in enumerate(zip(*columns)):
        if row[0].numel():
            groups.setdefault(tuple(t.dtype for t in row), []).append(i)
    return list(groups.values())


def norm(grads: list[Tensor], clip: float | None) -> tuple[Tensor, Tensor, Tensor]:
    device = grads[0].device
    groups = []
    for indices in _by_dtype(grads):
        # any order of the elements will do, so a dense tensor is read as it lies
        dense = [grads[i] if _dense(grads[i]) else grads[i].contiguous() for i in indices]
        groups.append((dense, *_table([t.numel() for t in dense], dense)))
    if not groups:
        zero = torch.zeros((), dtype=torch.float32, device=device)
        return spec.finish(zero, zero.clone(), clip)
    partial = [torch.empty(chunks, dtype=torch.float32, device=device) for _, _, chunks in groups]
    with on(grads[0]):
        for out, (dense, table, chunks) in zip(partial, groups):
            G = TYPES[dense[0].dtype]
            _largest[(chunks,)](out, table, chunks, len(dense), G=G, CHUNK=CHUNK, BLOCK=BLOCK)
        largest = torch.cat(partial).amax()
        unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        for out, (dense, table, chunks) in zip(partial, groups):
            G = TYPES[dense[0].dtype]
            _squares[(chunks,)](out, unit, table, chunks, len(dense), G=G, CHUNK=CHUNK, BLOCK=BLOCK)
    return spec.finish(largest, torch.cat(partial).sum(), clip)


def step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    committed: Tensor,
    clip_scale: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    if not params:
        return
    correction1, correction2 = spec.advance(steps, committed, beta1, beta2)
    for indices in _by_dtype(params, grads):
        rows = [_aligned(params[i], grads[i], exp_avgs[i], exp_avg_sqs[i]) for i in indices]
        p, g, m, v = zip(*rows)
        table, chunks = _table([t.numel() for t in p], g, p, m, v)
        pick = slice(None) if len(indices) == len(params) else torch.tensor(indices)
        if isinstance(pick, Tensor) and p[0].is_cuda:
            pick = pick.pin_memory().to(p[0].device, non_blocking=True)
        with on(p[0]):
            _update[(chunks,)](
                table, chunks, len(indices), committed, clip_scale, lr, correction1[pick], correction2[pick],
                1 - beta1, beta2, 1 - beta2, eps, weight_decay,
                P=TYPES[p[0].dtype], G=TYPES[g[0].dtype], DECOUPLED=decoupled, CHUNK=CHUNK, BLOCK=BLOCK,
            )  # fmt: skip
        for i, row in zip(indices, rows):
            for stored, worked in zip((params[i], exp_avgs[i], exp_avg_sqs[i]), (row[0], row[2], row[3])):
                if worked is not stored:
                    stored.copy_(worked)


def _aligned(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four tensors with their elements in one order in memory; those that lie otherwise are copied."""
    if not (_dense(p) and m.stride() == v.stride() == p.stride()):
        return p.contiguous(), g.contiguous(), m.contiguous(), v.contiguous()
    return p, g if g.stride() == p.stride() else torch.empty_like(p, dtype=g.dtype).copy_(g), m, v


def _dense(t: Tensor) -> bool:
    """Every element once and no gaps, in any order of the dimensions."""
    expected = 1
    for size, stride in sorted(zip(t.shape, t.stride()), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
