"""Which keys a query row sees and which rows a key, tile by tile; and which program gets which tile.

Every row knows its own range of keys, so one tile may hold rows of many documents.
"""

import triton
import triton.language as tl

NEVER = tl.constexpr(1 << 30)


@triton.jit
def place(pid, n_tiles, heads, group):
    """(tile, head): heads in groups whose keys stay in the L2 cache together, inside a group tile after tile."""
    first = pid // (n_tiles * group) * group
    at = pid % (n_tiles * group)
    width = tl.minimum(group, heads - first)
    return at // width, first + at % width


@triton.jit
def document(pos, cu_ptr, n_docs, steps):
    """Which document holds row `pos`: the number of starts up to it, less one, by bisection."""
    lo = tl.zeros_like(pos)
    hi = lo + n_docs + 1
    for _ in range(steps):
        mid = (lo + hi) // 2
        open_ = lo < hi
        right = open_ & (tl.load(cu_ptr + mid, mask=open_, other=0) <= pos)
        hi = tl.where(open_ & (right == 0), mid, hi)
        lo = tl.where(right, mid + 1, lo)
    return lo - 1


@triton.jit
def bounds(pos, of_ptr, T, S, cu_q_ptr, cu_k_ptr, k_lens_ptr, n_docs, steps, batch):
    """(document, whether there is one, first and last query row, first and last key) for each row `pos` of the side
    that `of_ptr` divides. Rows of no document get empty ranges."""
    if cu_q_ptr is not None:
        doc = document(pos, of_ptr, n_docs, steps)
        inside = (doc >= 0) & (doc < n_docs)
        # bounds that are not there are moved inside: no foreign memory
        q0 = tl.maximum(tl.load(cu_q_ptr + doc, mask=inside, other=0).to(tl.int32), 0)
        q1 = tl.minimum(tl.load(cu_q_ptr + doc + 1, mask=inside, other=0).to(tl.int32), T)
        k0 = tl.maximum(tl.load(cu_k_ptr + doc, mask=inside, other=0).to(tl.int32), 0)
        k1 = tl.minimum(tl.load(cu_k_ptr + doc + 1, mask=inside, other=0).to(tl.int32), S)
    else:
        q0 = tl.zeros_like(pos)
        k0 = tl.zeros_like(pos)
        q1 = q0 + T
        k1 = k0 + S
        if k_lens_ptr is not None:
            k1 = k0 + tl.minimum(tl.maximum(tl.load(k_lens_ptr + batch), 0), S).to(tl.int32)
        doc = q0 + batch
        inside = pos >= 0
    return doc, inside, q0, q1, k0, k1


@triton.jit
def keys_of(i, T, S, cu_q_ptr, cu_k_ptr, k_lens_ptr, n_docs, steps, batch, left, right):
    """(exists, lo, hi): query row i sees the keys lo <= j < hi, around the place that is as far from the end of its
    keys as it is from the end of its rows."""
    _, inside, _, q1, k0, k1 = bounds(i, cu_q_ptr, T, S, cu_q_ptr, cu_k_ptr, k_lens_ptr, n_docs, steps, batch)
    lo = k0
    hi = k1
    if left is not None:
        lo = tl.maximum(k0, k1 - (q1 - i) - left)
    if right is not None:
        hi = tl.minimum(k1, k1 - (q1 - i) + right + 1)
    exists = inside & (i < q1)
    return exists, lo, tl.where(exists, tl.maximum(hi, lo), lo)


@triton.jit
def rows_of(j, T, S, cu_q_ptr, cu_k_ptr, k_lens_ptr, n_docs, steps, batch, left, right):
    """(document, exists, lo, hi): key j is seen by the query rows lo <= i < hi."""
    doc, inside, q0, q1, _, k1 = bounds(j, cu_k_ptr, T, S, cu_q_ptr, cu_k_ptr, k_lens_ptr, n_docs, steps, batch)
    lo = q0
    hi = q1
    if right is not None:
        lo = tl.maximum(q0, q1 - (k1 - j) - right)
    if left is not None:
        hi = tl.minimum(q1, q1 - (k1 - j) + left + 1)
    exists = inside & (j < k1)
    return doc, exists, lo, tl.where(exists, tl.maximum(hi, lo), lo)


@triton.jit
def span(lo, hi, exists, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Cuts the union [least, last) of a tile's ranges into blocks: (first, blocks, gap_at, gap, least, last).

    They start at `first`, a multiple of ALIGN. The `gap` blocks from number gap_at on are shared whole by every row
    that exists and need no mask. The other `blocks`, before and behind the gap, are masked.
    """
    some = hi > lo
    last = tl.max(tl.where(some, hi, 0), 0)
    least = tl.minimum(tl.min(tl.where(some, lo, NEVER), 0), last)
    first = least // ALIGN * ALIGN
    shared_first = tl.max(tl.where(exists, lo, 0), 0)
    shared_last = tl.minimum(tl.min(tl.where(exists, hi, NEVER), 0), last)
    gap_at = tl.cdiv(tl.maximum(shared_first - first, 0), BLOCK)
    gap = tl.maximum(tl.maximum(shared_last - first, 0) // BLOCK - gap_at, 0)
    return first, tl.cdiv(last - first, BLOCK) - gap, gap_at, gap, least, last
