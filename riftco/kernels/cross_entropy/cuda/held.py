"""Loss and gradient, or the loss, of long plain rows of 16-bit logits: a program a row, few instructions an element.

Logits come two in a 32-bit word, chunks of T times 16 bytes; the last chunks of a row stay in registers between the
two walks, the others are read again from the L2 cache. An exponential is one fused multiply-add and one exp2: with
t = top c rounded to float32, exp2(u c - t) differs from exp2((u - top) c) by the same factor for all u, which `fma`
gives exactly, so nothing is lost at large logits.

A row is one piece of memory (SPAN 0), or its fewer than 2 ** 31 words lie in panels of SPAN words, which R chunks
divide. lay: (words from a panel's end to the next one's begin; the first panel that lies elsewhere, this row's begin
there, the words of all panels before; the panel that is narrower, the last, and how many words nearer the row's are).
"""

import triton
import triton.language as tl

from . import pieces
from .pieces import LARGEST

# beyond it what rounding top c takes away, 2 ** 5 at 1e9, is soon an exponent too large for float32: rows whose top
# lies there are computed from u - top; masked logits of other rows lie below -FAR, where they add up to nothing
FAR = tl.constexpr(1e8)


@triton.jit
def _halves(w, HALF: tl.constexpr):
    if HALF:
        low = w.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (w << 16).to(tl.float32, bitcast=True)
        high = (w & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _bits(x, HALF: tl.constexpr):
    """float32 rounded to 16 bits, in the lower half of a word."""
    return x.to(tl.float16 if HALF else tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _word(low, high, HALF: tl.constexpr, PACKED: tl.constexpr):
    if PACKED and HALF:
        w = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, True, 1)
    elif PACKED:
        w = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, True, 1)
    else:
        w = (_bits(high, HALF) << 16) | _bits(low, HALF)
    return w


@triton.jit
def _larger(a, b, HALF: tl.constexpr, PACKED: tl.constexpr):
    if PACKED and HALF:
        w = tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)
    elif PACKED:
        w = tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)
    else:
        a_low, a_high = _halves(a, HALF)
        b_low, b_high = _halves(b, HALF)
        w = _word(tl.maximum(a_low, b_low), tl.maximum(a_high, b_high), HALF, False)
    return w


@triton.jit
def _nothing(HALF: tl.constexpr):
    """The bits of -inf."""
    return tl.full([], 0xFC00 if HALF else 0xFF80, tl.int32)


@triton.jit
def _with(w, o, y, bits):
    """Words of the pairs o, with the 16 bits in place of class y's."""
    even = (w & -65536) | bits
    odd = (w & 0xFFFF) | (bits << 16)
    return tl.where(o == (y >> 1), tl.where((y & 1) == 0, even, odd), w)


@triton.jit
def _place(row, start, SPAN: tl.constexpr, lay):
    """(a pointer, how many words behind it) word `start` of a row and those behind it in its panel lie."""
    if SPAN:
        i = start // SPAN
        start += i * lay[0] - tl.where(i >= lay[1], lay[3], 0) - tl.where(i == lay[4], lay[5], 0)
        row = tl.where(i >= lay[1], lay[2], row)
    return row, start


@triton.jit
def _one(row, like, y, SPAN: tl.constexpr, lay):
    """Class y of a row, of x's dtype."""
    base, at = _place(row, y >> 1, SPAN, lay)
    return base.to(like.dtype, bitcast=True) + (at * 2 + (y & 1))


@triton.jit
def _load(row, o, inside, TAIL: tl.constexpr, HALF: tl.constexpr, EVICT: tl.constexpr):
    NOTHING: tl.constexpr = -67044352 if HALF else -8323200  # twice -inf
    if TAIL:
        w = tl.load(row + o, mask=inside, other=NOTHING, eviction_policy=EVICT)
    else:
        w = tl.load(row + o, eviction_policy=EVICT)
    return w


@triton.jit
def _chunks(
    row, start, o, pairs, SPAN: tl.constexpr, lay, N: tl.constexpr, LAST: tl.constexpr, HALF: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """N chunks from pair `start` on, of one panel; LAST: the row ends within the last of them."""
    base, at = _place(row, start, SPAN, lay)
    words = ()
    for i in tl.static_range(N):
        chunk = i * o.shape[0] * o.shape[1]
        w = _load(base, at + chunk + o, start + chunk + o < pairs, LAST and i == N - 1, HALF, EVICT)
        words = words + (w,)  # type: ignore[assignment]
    return words


@triton.jit
def _statistics(words, start, o, y, m, t, s, c, HALF: tl.constexpr, PACKED: tl.constexpr):
    """Chunks from pair `start` on into a thread's state: m the largest u, t = m c, s the sum of exp2(u c - t), all
    without the label y. Also the chunks with -inf in y's place."""
    N: tl.constexpr = len(words)
    B: tl.constexpr = o.shape[0] * o.shape[1]
    if (y >= 2 * start) & (y < 2 * (start + N * B)):
        without = ()
        for i in tl.static_range(N):
            without = without + (_with(words[i], start + i * B + o, y, _nothing(HALF)),)  # type: ignore[assignment]
        words = without
    most = words[0]
    for i in tl.static_range(1, N):
        most = _larger(most, words[i], HALF, PACKED)
    low, high = _halves(most, HALF)
    m = tl.maximum(m, tl.max(tl.maximum(low, high), 1))
    new = tl.minimum(tl.maximum(m * c, -FAR), FAR)
    s *= tl.exp2(t - new)
    for i in tl.static_range(N):
        low, high = _halves(words[i], HALF)
        s += tl.sum(tl.exp2(tl.fma(low, c, -new[:, None])) + tl.exp2(tl.fma(high, c, -new[:, None])), 1)
    return words, m, new, s


@triton.jit
def _store(base, at, w, t, k, hot, c, start, o, y, pairs, TAIL: tl.constexpr, HALF: tl.constexpr, PACKED: tl.constexpr):
    """The gradient of the chunk from pair `start` on, which lies `at` words behind base."""
    low, high = _halves(w, HALF)
    d = _word(tl.exp2(tl.fma(low, c, -t)) * k, tl.exp2(tl.fma(high, c, -t)) * k, HALF, PACKED)
    if (y >= 2 * start) & (y < 2 * (start + o.shape[0] * o.shape[1])):
        d = _with(d, start + o, y, _bits(hot, HALF))
    if TAIL:
        tl.store(base + at + o, d, mask=start + o < pairs, cache_modifier=".cs")
    else:
        tl.store(base + at + o, d, cache_modifier=".cs")


@triton.jit
def _up(up_ptr, at, factor, HAS: tl.constexpr):
    return (tl.load(up_ptr + at).to(tl.float32) if HAS else 1.0) * factor


@triton.jit
def _slopes(top, others, u_y, y, V, c, up, z_loss, s):
    _, e_y, total = pieces.shares(top, others, u_y, y, V, c)
    return pieces.slopes(top, others, total, e_y, up, tl.full([], 0.0, tl.float32), up, z_loss, s)


@triton.jit
def _loss(top, others, u_y, y, V, c, row_weight, z_loss, s):
    """(the logarithm of the row's sum of exp(s (u - top)), its loss)."""
    d_y, _, total = pieces.shares(top, others, u_y, y, V, c)
    log_total = pieces.log_of(total, others)
    log_p = tl.where(y < V, s * d_y, float("nan")) - log_total
    lse = s * top + log_total
    return log_total, (pieces.times(z_loss, lse * lse) - log_p) * row_weight


@triton.jit
def _far_sum(row, pairs, y, top, c, o, SPAN: tl.constexpr, lay, CHUNKS: tl.constexpr, HALF: tl.constexpr):
    s = tl.zeros([o.shape[0]], tl.float32)
    for i in range(CHUNKS):
        start = i * o.shape[0] * o.shape[1]
        base, at = _place(row, start, SPAN, lay)
        w = _load(base, at + o, start + o < pairs, True, HALF, "")
        w = _with(w, start + o, y, _nothing(HALF))
        low, high = _halves(w, HALF)
        s += tl.sum(tl.exp2((low - top) * c) + tl.exp2((high - top) * c), 1)
    return tl.sum(s, 0)


@triton.jit
def _far_gradient(
    row, g_row, pairs, y, top, k, hot, c, o, SPAN: tl.constexpr, lay, CHUNKS: tl.constexpr, HALF: tl.constexpr
):
    for i in range(CHUNKS):
        start = i * o.shape[0] * o.shape[1]
        base, at = _place(row, start, SPAN, lay)
        low, high = _halves(_load(base, at + o, start + o < pairs, True, HALF, ""), HALF)
        d = _word(tl.exp2((low - top) * c) * k, tl.exp2((high - top) * c) * k, HALF, False)
        base, at = _place(g_row, start, SPAN, lay)
        tl.store(base + at + o, _with(d, start + o, y, _bits(hot, HALF)), mask=start + o < pairs)


@triton.jit(do_not_specialize=["first", "elsewhere", "last", "narrower"])
def held_rows(
    x_ptr, g_ptr, elsewhere_ptr, target_ptr, row_weight_ptr, up_ptr, loss_ptr, top_ptr, log_total_ptr,
    first, inner, x_outer, x_inner, g_outer, g_inner, stride_up, V, ignore_index, z_loss, s, scale,
    between, elsewhere, last, narrower, SPAN: tl.constexpr, HAS_UP: tl.constexpr, HAS_ROW_WEIGHT: tl.constexpr,
    CHUNKS: tl.constexpr, HELD: tl.constexpr, R: tl.constexpr, T: tl.constexpr, HALF: tl.constexpr,
    PACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As rows.forward_rows with GRAD; of CHUNKS chunks the last HELD are held, the others come R at a time. EARLY: this
    may begin before the kernel ahead of it has written `up`, its only result that is read here. narrower: by how many
    times 16 bytes a row of the last panel is; of panels the gradient lies where they do."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0)
    row_of_all = n.to(tl.int64) + first
    y, row_weight, live = pieces.label(target_ptr, row_weight_ptr, row_of_all, ignore_index, HAS_ROW_WEIGHT)
    outer, within = (n // inner).to(tl.int64), (n % inner).to(tl.int64)
    x_row = x_ptr + outer * x_outer + within * x_inner
    g_row = (g_ptr + outer * g_outer + within * g_inner).to(tl.pointer_type(tl.int32), bitcast=True)
    row = x_row.to(tl.pointer_type(tl.int32), bitcast=True)
    pairs = V // 2
    o = tl.arange(0, T)[:, None] * 4 + tl.arange(0, 4)[None, :]
    there = row
    if SPAN:
        there = elsewhere_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + n.to(tl.int64) * SPAN
    lay = (between, elsewhere, there, elsewhere * (SPAN + between), last, n * narrower * 4)
    B: tl.constexpr = T * 4
    FREE: tl.constexpr = CHUNKS - HELD
    loss = 0.0
    top = 0.0
    log_total = 0.0
    if live:
        c = s * pieces.LOG2E
        u_y = tl.load(_one(row, x_ptr, y, SPAN, lay), mask=y < V, other=0.0).to(tl.float32)
        u_y = tl.where(y < V, u_y, float("nan"))
        if not EARLY:  # read here, where it costs no time
            up = _up(up_ptr, row_of_all * stride_up, row_weight * scale, HAS_UP)
        at_y = tl.where(y < V, y, -1).to(tl.int32)
        sums = tl.zeros([T], tl.float32)
        m = sums - LARGEST
        t = sums - FAR
        for b in range(FREE // R):
            words = _chunks(row, b * R * B, o, pairs, SPAN, lay, R, False, HALF, "evict_last")
            words, m, t, sums = _statistics(words, b * R * B, o, at_y, m, t, sums, c, HALF, PACKED)
        held = ()
        for i in tl.static_range(0, HELD, R):
            if i + R < HELD:
                held = held + _chunks(row, (FREE + i) * B, o, pairs, SPAN, lay, R, False, HALF, "evict_first")
            else:
                held = held + _chunks(row, (FREE + i) * B, o, pairs, SPAN, lay, HELD - i, True, HALF, "evict_first")
        held, m, t, sums = _statistics(held, FREE * B, o, at_y, m, t, sums, c, HALF, PACKED)
        top = tl.minimum(tl.maximum(tl.max(m, 0), u_y), LARGEST)  # NaN of no class counts for nothing
        whole = top * c
        lost = tl.fma(top, c, -whole)
        if EARLY:
            tl.extra.cuda.gdc_wait()
            up = _up(up_ptr, row_of_all * stride_up, row_weight * scale, HAS_UP)
        up = tl.where(y < V, up, float("nan"))
        if tl.abs(whole) <= FAR:
            others = tl.sum(sums * tl.exp2(t - whole - lost), 0)
            k, hot = _slopes(top, others, u_y, y, V, c, up, z_loss, s)
            k *= tl.exp2(-lost)
            for i in tl.static_range(HELD):
                start = (FREE + i) * B
                base, at = _place(g_row, start, SPAN, lay)
                _store(base, at, held[i], whole, k, hot, c, start, o, at_y, pairs, i == HELD - 1, HALF, PACKED)
            for b in range(FREE // R):
                start = (FREE - R - b * R) * B
                again = _chunks(row, start, o, pairs, SPAN, lay, R, False, HALF, "evict_first")
                base, at = _place(g_row, start, SPAN, lay)
                for i in tl.static_range(R):
                    _store(
                        base, at + i * B, again[i], whole, k, hot, c, start + i * B, o, at_y, pairs, False, HALF, PACKED
                    )
        else:
            others = _far_sum(row, pairs, at_y, top, c, o, SPAN, lay, CHUNKS, HALF)
            k, hot = _slopes(top, others, u_y, y, V, c, up, z_loss, s)
            _far_gradient(row, g_row, pairs, at_y, top, k, hot, c, o, SPAN, lay, CHUNKS, HALF)
        log_total, loss = _loss(top, others, u_y, y, V, c, row_weight, z_loss, s)
    else:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        for i in range(CHUNKS):
            base, at = _place(g_row, i * B, SPAN, lay)
            tl.store(base + at + o, tl.zeros([T, 4], tl.int32), mask=i * B + o < pairs)
    tl.store(loss_ptr + row_of_all, loss)
    tl.store(top_ptr + row_of_all, top)
    tl.store(log_total_ptr + row_of_all, log_total)


@triton.jit(do_not_specialize=["first"])
def loss_rows(
    x_ptr, target_ptr, row_weight_ptr, loss_ptr, top_ptr, log_total_ptr,
    first, inner, x_outer, x_inner, V, ignore_index, z_loss, s,
    HAS_ROW_WEIGHT: tl.constexpr, CHUNKS: tl.constexpr, HELD: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
    HALF: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The loss alone: a row is read once, R chunks at a time and the last HELD. As rows.forward_rows without GRAD."""
    n = tl.program_id(0)
    row_of_all = n.to(tl.int64) + first
    y, row_weight, live = pieces.label(target_ptr, row_weight_ptr, row_of_all, ignore_index, HAS_ROW_WEIGHT)
    x_row = x_ptr + (n // inner).to(tl.int64) * x_outer + (n % inner).to(tl.int64) * x_inner
    row = x_row.to(tl.pointer_type(tl.int32), bitcast=True)
    pairs = V // 2
    o = tl.arange(0, T)[:, None] * 4 + tl.arange(0, 4)[None, :]
    lay = (0, 0, row, 0, 0, 0)
    B: tl.constexpr = T * 4
    FREE: tl.constexpr = CHUNKS - HELD
    loss = 0.0
    top = 0.0
    log_total = 0.0
    if live:
        c = s * pieces.LOG2E
        u_y = tl.load(_one(row, x_ptr, y, 0, lay), mask=y < V, other=0.0).to(tl.float32)
        u_y = tl.where(y < V, u_y, float("nan"))
        at_y = tl.where(y < V, y, -1).to(tl.int32)
        sums = tl.zeros([T], tl.float32)
        m = sums - LARGEST
        t = sums - FAR
        for b in range(FREE // R):
            words = _chunks(row, b * R * B, o, pairs, 0, lay, R, False, HALF, "evict_first")
            words, m, t, sums = _statistics(words, b * R * B, o, at_y, m, t, sums, c, HALF, PACKED)
        words = _chunks(row, FREE * B, o, pairs, 0, lay, HELD, True, HALF, "evict_first")
        words, m, t, sums = _statistics(words, FREE * B, o, at_y, m, t, sums, c, HALF, PACKED)
        top = tl.minimum(tl.maximum(tl.max(m, 0), u_y), LARGEST)  # NaN of no class counts for nothing
        whole = top * c
        if tl.abs(whole) <= FAR:
            others = tl.sum(sums * tl.exp2(t - whole - tl.fma(top, c, -whole)), 0)
        else:
            others = _far_sum(row, pairs, at_y, top, c, o, 0, lay, CHUNKS, HALF)
        log_total, loss = _loss(top, others, u_y, y, V, c, row_weight, z_loss, s)
    tl.store(loss_ptr + row_of_all, loss)
    tl.store(top_ptr + row_of_all, top)
    tl.store(log_total_ptr + row_of_all, log_total)
