"""Which tile a program works on.

Dense: tile number -> (tile of rows, batch, head), heads in groups whose keys and values stay in L2 together, the
longest tiles of a group first.

Packed: a table made on the device by one small kernel, ENTRY int32 a slot: (document, tile, start, length,
other_start, other_length), where start and length are of the side that is cut into tiles and other_ of the side that is
walked. Documents come in order of falling length of the walked side, so that the longest work starts first; inside a
document the tiles ascend, or descend where `descending` (a causal mask makes the last rows the longest). The rows of no
document, before cu[0] and from cu[-1] on, are two more "documents" that walk nothing: number `docs` and `docs + 1`.
The number of slots is an upper bound known on the host; a slot without a tile holds document -1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...._launch import cdiv, on

ENTRY = 8
DOCS = 16  # documents that a program of the table kernel places
CHUNK = 256  # documents that it compares them with at a time
TILES = 32  # entries that it writes of each document at a time


def slots(total: int, docs: int, tile: int) -> int:
    """Upper bound of the tiles of `docs` documents in `total` rows, those of the rows of no document included."""
    return cdiv(total, tile) + docs + 2


def table(cu: Tensor, cu_other: Tensor, total: int, total_other: int, tile: int, descending: bool) -> Tensor:
    """[slots, ENTRY] int32 for tiles of `tile` rows of the side that `cu` divides."""
    docs = cu.shape[0] - 1
    out = torch.empty(slots(total, docs, tile), ENTRY, dtype=torch.int32, device=cu.device)
    programs = cdiv(docs + 2, DOCS)
    with on(cu):
        _table[(programs,)](
            out, cu, cu_other, docs, total, total_other, out.shape[0], tile,
            DESCENDING=descending, DOCS=DOCS, CHUNK=CHUNK, TILES=TILES,
        )  # fmt: skip
    return out


@triton.jit
def _bounds(cu_ptr, doc, docs, total):
    """(start, length) of each document, of the rows before the first and of those after the last; 0 rows above that.

    Bounds that are not there are moved inside: no foreign memory.
    """
    last = tl.load(cu_ptr + docs).to(tl.int32)
    start = tl.load(cu_ptr + doc, mask=doc < docs, other=0).to(tl.int32)
    end = tl.load(cu_ptr + doc + 1, mask=doc < docs, other=0).to(tl.int32)
    start = tl.where(doc == docs + 1, last, start)
    end = tl.where(doc == docs, tl.load(cu_ptr).to(tl.int32), tl.where(doc == docs + 1, total, end))
    start = tl.minimum(tl.maximum(start, 0), total)
    return start, tl.maximum(tl.minimum(end, total) - start, 0)


@triton.jit
def _table(
    out_ptr, cu_ptr, cu_other_ptr, docs, total, total_other, slots, tile,
    DESCENDING: tl.constexpr, DOCS: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    doc = tl.program_id(0) * DOCS + tl.arange(0, DOCS)
    start, length = _bounds(cu_ptr, doc, docs, total)
    start_o, length_o = _bounds(cu_other_ptr, doc, docs, total_other)
    length_o = tl.where(doc < docs, length_o, 0)
    before = tl.zeros([DOCS], tl.int32)  # tiles of all documents that come earlier
    count = 0
    for c in range(0, docs + 2, CHUNK):
        e = c + tl.arange(0, CHUNK)
        _, n = _bounds(cu_ptr, e, docs, total)
        _, o = _bounds(cu_other_ptr, e, docs, total_other)
        o = tl.where(e < docs, o, 0)
        n = tl.where(e < docs + 2, (n + tile - 1) // tile, 0)
        first = (o[None, :] > length_o[:, None]) | ((o[None, :] == length_o[:, None]) & (e[None, :] < doc[:, None]))
        before += tl.sum(tl.where(first, n[None, :], 0), 1)
        count += tl.sum(n, 0)
    tiles = tl.where(doc < docs + 2, (length + tile - 1) // tile, 0)
    for t0 in range(0, tl.max(tiles, 0), TILES):
        t = t0 + tl.arange(0, TILES)
        slot = before[:, None] + (tiles[:, None] - 1 - t[None, :] if DESCENDING else t[None, :])
        ok = (t[None, :] < tiles[:, None]) & (slot < slots)
        at = out_ptr + slot.to(tl.int64) * 8
        none = tl.zeros([DOCS, TILES], tl.int32)
        tl.store(at, none + doc[:, None], mask=ok)
        tl.store(at + 1, none + t[None, :], mask=ok)
        tl.store(at + 2, none + start[:, None], mask=ok)
        tl.store(at + 3, none + length[:, None], mask=ok)
        tl.store(at + 4, none + start_o[:, None], mask=ok)
        tl.store(at + 5, none + length_o[:, None], mask=ok)
    for s0 in range(count + tl.program_id(0) * TILES, slots, tl.num_programs(0) * TILES):
        s = s0 + tl.arange(0, TILES)
        tl.store(out_ptr + s.to(tl.int64) * 8, tl.full([TILES], -1, tl.int32), mask=s < slots)


@gluon.jit
def entry(table_ptr, slot):
    """(document, tile, start, length, other_start, other_length) of a slot; only the document is set where it is -1."""
    at = table_ptr + slot * 8
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5)


@gluon.jit
def place(number, tiles, heads, group):
    """Number -> (place among the tiles, head); `heads` come in groups of `group`, all tiles of one before the next.

    Neighbours share a tile and differ in the head.
    """
    per_group = tiles * group
    first = number // per_group * group
    size = gl.minimum(group, heads - first)
    rest = number % per_group
    return rest // size, first + rest % size
