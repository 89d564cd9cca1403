"""What the cross-entropy kernels are made of.

A row is taken in tiles [T, R, E]: E contiguous elements of one thread (16 bytes), T threads, R repeats, so that the
sums over R and E stay in a thread and a row costs one reduction over threads. T comes first, or lanes go along R.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def offsets(R: tl.constexpr, T: tl.constexpr, E: tl.constexpr):
    t = tl.arange(0, T)[:, None, None]
    r = tl.arange(0, R)[None, :, None]
    return r * (T * E) + t * E + tl.arange(0, E)[None, None, :]


@triton.jit
def opaque(x):
    """x, hidden from the compiler: else it keeps the float32 products of a 16-bit tile alive across the row."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def tanh(x):
    """Near 0, where (1 - t) / (1 + t) loses its digits, by the series."""
    near = tl.where(tl.abs(x) < 0.3, x, 0.0)
    y = near * near
    series = near + near * y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 + y * (-1382 / 155925)))))
    t = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - t) / (1 + t)
    return tl.where(tl.abs(x) < 0.3, series, tl.where(x < 0, -far, far))


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0, to float32's accuracy."""
    near = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))))
    return tl.where(x > -0.125, near, tl.exp2(x * LOG2E) - 1)


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0, to float32's accuracy."""
    w = 1 + x
    lost = tl.where(w > 1, x / tl.where(w > 1, w - 1, 1.0), 1.0)  # what rounding 1 + x took away
    return tl.where(w == 1, x, tl.where(x < 1, tl.log(w) * lost, tl.log(w)))


@triton.jit
def log_of(total, others):
    """log(total), which is others + exp(s (u_y - top)); to float32's accuracy where that is others + 1."""
    one = (total == 1 + others) & (others < 1)
    some = one & (total > 1)
    lost = tl.where(some, others / tl.where(some, total - 1, 1.0), 1.0)  # what rounding 1 + others took away
    return tl.where(one & (total == 1), others, tl.log(total) * lost)


@triton.jit
def times(z_loss, x):
    """z_loss * x; without a z_loss 0, also where x is infinite."""
    return tl.where(z_loss == 0.0, 0.0, z_loss * x)


@triton.jit
def score(x, cap, slope, SOFTCAP: tl.constexpr):
    """u of spec.py; slope = logit_scale / softcap."""
    x = x.to(tl.float32)
    if SOFTCAP:
        x = tanh(x * slope) * cap
    return x


@triton.jit
def label(target_ptr, row_weight_ptr, n, ignore_index, HAS_ROW_WEIGHT: tl.constexpr):
    """(label, row weight, whether the row is computed) of row n."""
    y = tl.load(target_ptr + n).to(tl.int64)
    w = tl.load(row_weight_ptr + n) if HAS_ROW_WEIGHT else 1.0
    return y, w, (y != ignore_index) & (y >= 0) & (w != 0.0)


@triton.jit
def shares(top, others, u_y, y, V, c):
    """u_y - top, its exponential, and the row's sum of those from the others' part of it."""
    d_y = tl.where(y < V, u_y - top, -float("inf"))
    e_y = tl.exp2(d_y * c)
    return d_y, e_y, others + e_y


@triton.jit
def slopes(top, others, total, e_y, a, over, up, z_loss, s):
    """(k, the label's gradient): any other gradient is k exp(s (u - top)). a, over: spec.backward's, times up."""
    if z_loss != 0.0:
        over += 2 * z_loss * (s * top + log_of(total, others)) * up
    r = 1 / total
    rest_p = tl.where(others == float("inf"), 1.0, others * r)  # 1 - p, which keeps its digits
    return (a + over) * r, over * (e_y * r) - a * rest_p


@triton.jit
def class_weights(weight_ptr, v, V, HAS: tl.constexpr):
    if HAS:
        w = tl.load(weight_ptr + v, mask=v < V, other=0.0)
    else:
        w = tl.where(v < V, 1.0, 0.0)
    return w


@triton.jit
def statistics(
    x, start, v, V, state, y, u_y, weight_ptr, cap, slope, c,
    SOFTCAP: tl.constexpr, CLASS: tl.constexpr, SMOOTH: tl.constexpr, METRICS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One tile, from class `start` on, into the threads' running state.

    m: the largest u, within the finite numbers, y's among them or not; s: sum of exp(s (u - m)) without the label y,
    whose part would hide the others' in a confident row; h: sum of exp(..) (u - m), also without y; q: sum of
    w (u - u_y), differences that lose nothing; best, at: the largest logit as it came and where.
    """
    m, s, h, q, best, at = state
    LEAN: tl.constexpr = not (SOFTCAP or SMOOTH or METRICS)
    here = (y >= start) & (y < start + x.shape[0] * x.shape[1] * x.shape[2])
    if LEAN and here:  # while x has 16 bits: a choice among the exponentials costs 20 registers
        x = tl.where(v == y, tl.full([], -float("inf"), tl.float32).to(x.dtype), x)
    u = score(x, cap, slope, SOFTCAP)
    if TAIL and SOFTCAP:  # elements behind the row were loaded as -inf, which a softcap makes finite
        u = tl.where(v < V, u, -float("inf"))
    new = tl.minimum(tl.maximum(m, tl.max(tl.max(u, 2), 1)), LARGEST)
    d = u - new[:, None, None]
    e = tl.exp2(d * c)
    if not LEAN and here:
        e = tl.where(v == y, 0.0, e)
    decay = tl.exp2(tl.maximum(m - new, -1e30) * c)  # 0 at the start, without an overflow
    if METRICS:
        h = (h + s * tl.where(s > 0, m - new, 0.0)) * decay + tl.sum(tl.sum(e * tl.where(e > 0, d, 0.0), 2), 1)
        raw = tl.where(v < V, x.to(tl.float32), -float("inf"))
        top = tl.max(tl.max(raw, 2), 1)
        first = tl.min(tl.min(tl.where(raw == top[:, None, None], v, 2147483647), 2), 1)
        at = tl.where(top > best, first, at)
        best = tl.maximum(best, top)
    if SMOOTH:
        w = class_weights(weight_ptr, v, V, CLASS)
        q += tl.sum(tl.sum(w * tl.where(v < V, u - u_y, 0.0), 2), 1)
    s = s * decay + tl.sum(tl.sum(e, 2), 1)
    return new, s, h, q, best, at


@triton.jit
def combined(state, u_y, c, METRICS: tl.constexpr, SMOOTH: tl.constexpr):
    """The threads' states and the label's u -> (top, s, h, q, argmax) of the row."""
    m, s, h, q, best, at = state
    top = tl.minimum(tl.maximum(tl.max(m, 0), u_y), LARGEST)  # NaN of no class counts for nothing
    decay = tl.exp2(tl.maximum(m - top, -1e30) * c)
    total = tl.sum(s * decay, 0)
    row_h = 0.0
    argmax = 0
    row_q = 0.0
    if METRICS:
        row_h = tl.sum((h + s * tl.where(s > 0, m - top, 0.0)) * decay, 0)
        argmax = tl.min(tl.where(best == tl.max(best, 0), at, 2147483647), 0)
    if SMOOTH:
        row_q = tl.sum(q, 0)
    return top, total, row_h, row_q, argmax


@triton.jit
def gradient(
    x, v, V, top, c, k, even, weight_ptr, cap, slope,
    SOFTCAP: tl.constexpr, CLASS: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """k exp(s (u - top)) - even w, times the softcap's slope. k and even carry the upstream gradient."""
    u = score(x, cap, slope, SOFTCAP)
    g = tl.exp2((u - top) * c) * k
    if SMOOTH:
        g -= even * class_weights(weight_ptr, v, V, CLASS)
    if SOFTCAP:
        g *= 1 - (u / cap) * (u / cap)
    return g
