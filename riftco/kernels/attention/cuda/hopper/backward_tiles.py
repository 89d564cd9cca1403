"""Tiles of keys of the Hopper backward: how they are described, taken, handed round and fed (see backward_walk.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from . import descriptors, schedule
from .tiles import uniform

KEYS = gl.constexpr(128)  # of a tile
RING = gl.constexpr(2)
FIELDS = gl.constexpr(12)  # int32 of a tile in the ring


@aggregate
class Shared:
    """Buffers of a program and the barriers that count their fills and uses."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    ring: gl.shared_memory_descriptor
    ring_full: gl.shared_memory_descriptor
    ring_empty: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    ds_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, do, stats, ds, ring, ring_full, ring_empty, kv_full, kv_empty, q_full, do_full, empty,
        ds_full, ds_empty,
    ):  # fmt: skip
        self.k, self.v, self.q, self.do, self.stats, self.ds = k, v, q, do, stats, ds
        self.ring, self.ring_full, self.ring_empty, self.kv_empty = ring, ring_full, ring_empty, kv_empty
        self.kv_full, self.q_full, self.do_full, self.empty = kv_full, q_full, do_full, empty
        self.ds_full, self.ds_empty = ds_full, ds_empty


@aggregate
class Tile:
    """A tile of keys as the consumers see it; rows are the sequence's own."""

    key: gl.tensor  # first key of the tile
    key_stop: gl.tensor  # keys from here on do not exist
    shift: gl.tensor  # key position of query row 0: length of k - length of q
    first: gl.tensor  # query tiles first..last-1 see keys of this tile; plain_from..plain_to-1 see all of them
    plain_from: gl.tensor
    plain_to: gl.tensor
    last: gl.tensor
    heads: gl.tensor  # query heads to walk
    scratch: gl.tensor  # number of query tile 0 of the first head in stats and scratch

    @gluon.constexpr_function
    def __init__(self, key, key_stop, shift, first, plain_from, plain_to, last, heads, scratch):
        self.key, self.key_stop, self.shift, self.heads, self.scratch = key, key_stop, shift, heads, scratch
        self.first, self.plain_from, self.plain_to, self.last = first, plain_from, plain_to, last


@aggregate
class Form:
    """What is fixed at compile time."""

    M: gl.constexpr  # query rows of a step
    D: gl.constexpr  # head dim, 64 or 128
    STAGES: gl.constexpr  # of Q and dO
    DS: gl.constexpr  # buffers of dS
    RIGHT: gl.constexpr  # keys right of a row's position are bounded
    LEFT: gl.constexpr
    SOFTCAP: gl.constexpr
    SCALED: gl.constexpr  # float16: dS carries the power of two of its (sequence, head)
    NEED_Q: gl.constexpr
    NEED_K: gl.constexpr
    NEED_V: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, M, D, STAGES, DS, RIGHT, LEFT, SOFTCAP, SCALED, NEED_Q, NEED_K, NEED_V):
        self.M, self.D, self.STAGES, self.DS = gl.constexpr(M), gl.constexpr(D), gl.constexpr(STAGES), gl.constexpr(DS)
        self.RIGHT, self.LEFT = gl.constexpr(RIGHT), gl.constexpr(LEFT)
        self.SOFTCAP, self.SCALED = gl.constexpr(SOFTCAP), gl.constexpr(SCALED)
        self.NEED_Q, self.NEED_K, self.NEED_V = gl.constexpr(NEED_Q), gl.constexpr(NEED_K), gl.constexpr(NEED_V)


@gluon.jit
def _put(sh, n, field: gl.constexpr, value):
    x = gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    sh.ring.index((n % RING) * FIELDS + field).store(x)


@gluon.jit
def get(sh, n, field: gl.constexpr):
    x = sh.ring.index((n % RING) * FIELDS + field).load(gl.BlockedLayout([1], [32], [4], [0]))
    return uniform(gl.max(x, axis=0))


@gluon.jit
def _range(key, key_stop, q_length, shift, scratch, heads, spare, right, left, F):
    """Which query tiles see keys of the tile, and which see all of them.

    A tile that no row sees takes one step with rows past the sequence's end and the spare numbers, which add nothing.
    """
    M: gl.constexpr = F.M
    BITS: gl.constexpr = 6 if M == 64 else 7
    tiles = gl.cdiv(q_length, M)
    first = gl.minimum(key >> 30, tiles)  # 0, but opaque: a literal would put the step counter in vector registers
    last = tiles
    if F.RIGHT:
        first = gl.minimum(gl.maximum(key - shift - right, 0) >> BITS, tiles)
    end = gl.minimum(key + KEYS, key_stop)
    if F.LEFT:
        last = gl.maximum(gl.minimum(last, ((end - 1 - shift + left) >> BITS) + 1), first)
    plain_from = first
    if F.RIGHT:
        plain_from = gl.minimum(gl.maximum((key + KEYS - 1 - shift - right + M - 1) >> BITS, first), last)
    if key + KEYS > key_stop:
        plain_from = last
    if (key >= key_stop) | (last <= first):
        first = tiles
        last = tiles + 1
        plain_from = last
        heads = 1
        scratch = spare - tiles
    plain_to = last
    if F.LEFT:
        plain_to = gl.minimum(gl.maximum(((key - shift + left - M + 1) >> BITS) + 1, plain_from), last)
    return Tile(key, key_stop, shift, first, plain_from, plain_to, last, heads, scratch)


@gluon.jit
def next_tile(sh, n, G, spare, right, left, F):
    """(whether there is another tile, the tile), from the ring."""
    mbarrier.wait(sh.ring_full.index(n % RING), (n // RING) & 1)
    more = get(sh, n, 0)
    q_length = get(sh, n, 1)
    shift = get(sh, n, 2)
    key = get(sh, n, 3)
    key_stop = get(sh, n, 4)
    scratch = get(sh, n, 5)
    return more, _range(key, key_stop, q_length, shift, scratch, G, spare, right, left, F)


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, do_desc, stats_desc, sh, table_ptr, cu_k_ptr, k_lens_ptr, counter_ptr, T, S, key_start,
    B, H, K, docs, n_tiles, head_tiles, k_step, v_step, spare, group, right, left, F,
):  # fmt: skip
    """Take tiles of keys; bring K and V of each, and Q, dO and the rows' numbers of every step."""
    M: gl.constexpr = F.M
    G = H // K
    n = 0
    t = 0
    number = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    while number < n_tiles * B * K:
        place, kv = schedule.place(number, n_tiles, B * K, group)
        seq = kv // K
        kv_head = kv % K
        if table_ptr is None:
            q_at = seq
            q_length = T
            k_at = seq * k_step
            v_at = seq * v_step
            k_length = S
            if k_lens_ptr is not None:
                k_length = gl.minimum(gl.maximum(gl.load(k_lens_ptr + seq).to(gl.int32), 0), S)
            out_at = seq
            out_length = S - key_start
            out_key = place * KEYS
            key = key_start + out_key
            stop = k_length
            scratch = (seq * H + kv_head * G) * head_tiles
            real = 1
        else:
            seq, tile, out_at, out_length, q_at, q_length = schedule.entry(table_ptr, place)
            real = (seq >= 0).to(gl.int32)
            k_at = out_at + key_start
            k_length = out_length
            if (seq >= 0) & (seq < docs):
                k_at = gl.minimum(gl.maximum(gl.load(cu_k_ptr + seq).to(gl.int32), 0), S)
                k_length = gl.maximum(gl.minimum(gl.load(cu_k_ptr + seq + 1).to(gl.int32), S) - k_at, 0)
            if seq >= docs:
                q_length = 0
                k_length = 0  # rows of no document are not read
            v_at = k_at
            out_key = tile * KEYS
            key = out_at + key_start - k_at + out_key
            stop = out_at + key_start - k_at + out_length
            scratch = kv_head * G * head_tiles + q_at // M + seq
        if real > 0:
            mbarrier.wait(sh.ring_empty.index(n % RING), ((n // RING) & 1) ^ 1)
            _put(sh, n, 0, 1)
            _put(sh, n, 1, q_length)
            _put(sh, n, 2, k_length - q_length)
            _put(sh, n, 3, key)
            _put(sh, n, 4, stop)
            _put(sh, n, 5, scratch)
            _put(sh, n, 6, kv_head)
            _put(sh, n, 7, out_at)
            _put(sh, n, 8, out_length)
            _put(sh, n, 9, out_key)
            _put(sh, n, 10, gl.minimum(seq, docs - 1) * H + kv_head * G)
            mbarrier.arrive(sh.ring_full.index(n % RING), count=1)
            w = _range(key, stop, q_length, k_length - q_length, scratch, G, spare, right, left, F)
            b = n % 2
            mbarrier.wait(sh.kv_empty.index(b), ((n // 2) & 1) ^ 1)
            mbarrier.expect(sh.kv_full.index(b), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            descriptors.load(k_desc, sh.k.index(b), sh.kv_full.index(b), kv_head, k_at, k_length, key)
            descriptors.load(v_desc, sh.v.index(b), sh.kv_full.index(b), kv_head, v_at, k_length, key)
            for g in range(w.heads):
                head = kv_head * G + g
                at = w.scratch + g * head_tiles
                for m in range(w.first, w.last):
                    s = t % F.STAGES
                    mbarrier.wait(sh.empty.index(s), ((t // F.STAGES) & 1) ^ 1)
                    mbarrier.expect(sh.q_full.index(s), q_desc.block_type.nbytes + M * 4)
                    descriptors.load(q_desc, sh.q.index(s), sh.q_full.index(s), head, q_at, q_length, m * M)
                    row = (at + m) * (2 * M)
                    tma.async_copy_global_to_shared(stats_desc, [row], sh.q_full.index(s), sh.stats.index(2 * s))
                    mbarrier.expect(sh.do_full.index(s), do_desc.block_type.nbytes + M * 4)
                    descriptors.load(do_desc, sh.do.index(s), sh.do_full.index(s), head, q_at, q_length, m * M)
                    tma.async_copy_global_to_shared(
                        stats_desc, [row + M], sh.do_full.index(s), sh.stats.index(2 * s + 1)
                    )
                    t += 1
            n += 1
        number = gl.atomic_add(
            counter_ptr, 1, sem="relaxed"
        )  # not before: the tiles get shorter, and who is early takes the next
    mbarrier.wait(sh.ring_empty.index(n % RING), ((n // RING) & 1) ^ 1)
    _put(sh, n, 0, 0)
    for i in gl.static_range(1, 6):
        _put(sh, n, i, 0)
    mbarrier.arrive(sh.ring_full.index(n % RING), count=1)
