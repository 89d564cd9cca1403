"""Which keys a tile sees, and the producer warp that takes tiles and loads for them.

Tiles come from a counter in device memory: programs are as many as multiprocessors, and take the next tile when they
are done. The producer reads a tile's coordinates and leaves them in a small ring in shared memory for the consumers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import schedule
from .descriptors import load_expected
from .variant import ROWS as _ROWS

ROWS = gl.constexpr(_ROWS)
RING = gl.constexpr(2)  # tiles in the ring
FIELDS = gl.constexpr(8)  # int32 of a tile: see produce()


@gluon.jit
def uniform(x):
    """x, equal in all threads, through lane 0 of each warp: the compiler may then keep it in uniform registers."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def take(counter_ptr):
    """counter++ by one lane of the calling warp; all get the old value."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first atom.global.add.u32 $0, [$1], 1;
        shfl.sync.idx.b32 $0, $0, 0, 0x1f, 0xffffffff;
        }""",
        "=r,l", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def put(ring, slot, field: gl.constexpr, value):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ring.index(slot * FIELDS + field).store(gl.full([1], value, gl.int32, L))


@gluon.jit
def get(ring, slot, field: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return uniform(gl.max(ring.index(slot * FIELDS + field).load(L), axis=0))


@gluon.jit
def blocks(m0, len_q, len_k, left, right, V: gl.constexpr):
    """(lo, a, b, hi): the rows m0.. of a tile see keys in the blocks lo..hi-1, and all of them in a..b-1.

    At least one block: a tile without keys gets the one past the end, which is loaded as zeros and masked.
    """
    BM: gl.constexpr = V.value.tiles.BM
    BN: gl.constexpr = V.value.tiles.BN
    shift = len_k - len_q
    last = gl.minimum(m0 + BM, len_q) - 1
    start, own = 0, 0  # where the first row's keys begin, and the last row's
    end, full = len_k, len_k  # where the last row's keys end, and the first row's
    if V.value.RIGHT:
        end = gl.minimum(len_k, last + shift + right + 1)
        full = gl.minimum(len_k, m0 + shift + right + 1)
    if V.value.LEFT:
        start = gl.maximum(0, m0 + shift - left)
        own = gl.maximum(0, last + shift - left)
    if end > start:
        lo = start // BN
        hi = (end + BN - 1) // BN
    else:
        lo = (len_k + BN - 1) // BN
        hi = lo + 1
    b = gl.maximum(gl.minimum(gl.maximum(full, 0) // BN, hi), lo)
    a = gl.maximum(gl.minimum((own + BN - 1) // BN, b), lo)
    return lo, a, b, hi


@gluon.jit
def produce(q_desc, k_desc, v_desc, shared, pointers, sizes, V: gl.constexpr):
    """Takes tiles until none is left, tells the consumers, and loads Q and the blocks of K and V, last block first.

    Fields of a tile: 0 no more tiles, 1 rows of no document, 2 other rows; first row; head; the sequence's batch index
    or first row; its length; its keys.
    """
    BN: gl.constexpr = V.value.tiles.BN
    STAGES: gl.constexpr = V.value.tiles.STAGES
    WG: gl.constexpr = V.value.tiles.WG
    q_smem, k_smem, v_smem, _o_smem, ring, ring_bars, q_bars, k_bars, v_bars, _turn = shared
    table_ptr, k_lens_ptr, counter_ptr = pointers
    slots, heads, group, H, G, T, S, docs, k_step, v_step, left, right = sizes
    number = gl.program_id(0)
    tiles = 0
    c = 0
    while number < slots * heads:
        following = gl.num_programs(0) + take(counter_ptr)
        slot, head = schedule.place(number, slots, heads, group)
        kind = 2
        if V.value.PACKED:
            doc, tile, at_q, len_q, at_k, len_k = schedule.entry(table_ptr, slot)
            at_v = at_k
            if doc >= docs:
                kind, len_k = 1, 0
        else:
            doc = head // H  # the batch index
            head = head % H
            tile = slots - 1 - slot if V.value.RIGHT else slot
            at_q, len_q, at_k, at_v, len_k = doc, T, doc, doc, S
            if V.value.K_LENS:
                at_k = doc * k_step
                at_v = doc * v_step
                len_k = gl.minimum(gl.maximum(gl.load(k_lens_ptr + doc).to(gl.int32), 0), S)
        if doc >= 0:
            m0 = tile * V.value.tiles.BM
            s = tiles % RING
            mbarrier.wait(ring_bars.index(RING + s), ((tiles // RING) & 1) ^ 1)
            put(ring, s, 0, kind)
            put(ring, s, 1, m0)
            put(ring, s, 2, head)
            put(ring, s, 3, at_q)
            put(ring, s, 4, len_q)
            put(ring, s, 5, len_k)
            mbarrier.arrive(ring_bars.index(s), count=1)
            lo, _a, _b, hi = blocks(m0, len_q, len_k, left, right, V)
            kv = head // G
            for j in range(hi - 1, lo - 1, -1):
                st = c % STAGES
                ph = ((c // STAGES) & 1) ^ 1
                mbarrier.wait(k_bars.index(STAGES + st), ph)
                load_expected(k_desc, k_smem.index(st), k_bars.index(st), kv, at_k, len_k, j * BN)
                if j == hi - 1:
                    for w in gl.static_range(WG):
                        mbarrier.wait(q_bars.index(WG + w), (tiles & 1) ^ 1)
                        load_expected(q_desc, q_smem.index(w), q_bars.index(w), head, at_q, len_q, m0 + w * ROWS)
                mbarrier.wait(v_bars.index(STAGES + st), ph)
                load_expected(v_desc, v_smem.index(st), v_bars.index(st), kv, at_v, len_k, j * BN)
                c += 1
            tiles += 1
        number = following
    s = tiles % RING
    mbarrier.wait(ring_bars.index(RING + s), ((tiles // RING) & 1) ^ 1)
    put(ring, s, 0, 0)
    mbarrier.arrive(ring_bars.index(s), count=1)
