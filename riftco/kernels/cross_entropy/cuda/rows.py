"""One program a row: the loss alone, the loss and its gradient, or the gradient of rows whose statistics are known."""

import triton
import triton.language as tl

from . import pieces
from .pieces import LARGEST


@triton.jit
def _weights_of(
    class_weight_ptr, weight_sum_ptr, y, V, smoothing, CLASS: tl.constexpr, SMOOTH: tl.constexpr
):  # fmt: skip
    """(a, smoothing / V sum(w), smoothing / V w[y]) of spec.backward."""
    a = tl.load(class_weight_ptr + y, mask=y < V, other=0.0) if CLASS else 1.0
    rest = 0.0
    even_y = 0.0
    if SMOOTH:
        even_y = smoothing / V * a
        a = (1 - smoothing) * a
        rest = smoothing / V * (tl.load(weight_sum_ptr) if CLASS else V * 1.0)
    return a, rest, even_y


@triton.jit
def _picked(row_ptr, y, stride_v, V, cap, slope, SOFTCAP: tl.constexpr):
    """u of the label; NaN where it is no class."""
    u = pieces.score(tl.load(row_ptr + y * stride_v, mask=y < V, other=0.0), cap, slope, SOFTCAP)
    return tl.where(y < V, u, float("nan"))


@triton.jit
def _start(T: tl.constexpr):
    zero = tl.zeros([T], tl.float32)
    return zero - LARGEST, zero, zero, zero, zero - float("inf"), tl.zeros([T], tl.int32)


@triton.jit
def _clear(g_ptr, stride_g, V, R: tl.constexpr, T: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr):
    o = pieces.offsets(R, T, E)
    for start in range(0, V, R * T * E):
        v = start + o
        at = v.to(tl.int64) if WIDE else v
        tl.store(g_ptr + at * stride_g, tl.zeros([T, R, E], g_ptr.dtype.element_ty), mask=v < V)


@triton.jit(do_not_specialize=["first"])
def forward_rows(
    x_ptr, g_ptr, target_ptr, row_weight_ptr, class_weight_ptr, weight_sum_ptr, up_ptr,
    loss_ptr, top_ptr, log_total_ptr, log_prob_ptr, entropy_ptr, argmax_ptr,
    first, inner, x_outer, x_inner, stride_x, g_outer, g_inner, stride_g, stride_up, V,
    ignore_index, smoothing, z_loss, cap, slope, s, scale,
    GRAD: tl.constexpr, HAS_UP: tl.constexpr, HAS_ROW_WEIGHT: tl.constexpr, CLASS: tl.constexpr,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, METRICS: tl.constexpr, WIDE: tl.constexpr, OPAQUE: tl.constexpr,
    KEEP: tl.constexpr, R: tl.constexpr, T: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The row's statistics and loss; with GRAD its gradient in a second walk, from the end: the last tiles lie in L2,
    the last KEEP of them stay in registers. x and g hold the rows from `first` on, all else holds all rows.
    """
    n = tl.program_id(0)
    outer = (n // inner).to(tl.int64)
    within = (n % inner).to(tl.int64)
    row_of_all = n.to(tl.int64) + first
    y, row_weight, live = pieces.label(target_ptr, row_weight_ptr, row_of_all, ignore_index, HAS_ROW_WEIGHT)
    if GRAD:
        g_row = g_ptr + outer * g_outer + within * g_inner
    loss = 0.0
    top = 0.0
    log_total = 0.0
    log_p = 0.0
    entropy = 0.0
    argmax = -1
    if live:
        c = s * 1.4426950408889634
        row = x_ptr + outer * x_outer + within * x_inner
        o = pieces.offsets(R, T, E)
        BLOCK: tl.constexpr = R * T * E
        # read before the reductions, whose barriers keep it ahead of the stores that may overwrite it
        u_y = _picked(row, y, stride_x, V, cap, slope, SOFTCAP)
        if GRAD:  # read here, where it costs no time
            up = (tl.load(up_ptr + row_of_all * stride_up).to(tl.float32) if HAS_UP else 1.0) * row_weight * scale
        state = _start(T)
        full = tl.maximum(tl.cdiv(V, BLOCK) - KEEP, 0)
        hot_class = tl.where(y < V, y, -1).to(tl.int32)
        for b in range(full):
            v = b * BLOCK + o
            at = v.to(tl.int64) if WIDE else v
            x = tl.load(row + at * stride_x, eviction_policy="evict_last")
            state = pieces.statistics(
                x, b * BLOCK, v, V, state, hot_class, u_y, class_weight_ptr, cap, slope, c,
                SOFTCAP, CLASS, SMOOTH, METRICS, False,
            )  # fmt: skip
        kept = ()
        for i in tl.static_range(KEEP):
            v = (full + i) * BLOCK + o
            at = v.to(tl.int64) if WIDE else v
            x = tl.load(row + at * stride_x, mask=v < V, other=-float("inf"), eviction_policy="evict_first")
            kept = kept + (x,)  # type: ignore[assignment]
        for i in tl.static_range(KEEP):
            v = (full + i) * BLOCK + o
            state = pieces.statistics(
                kept[i], (full + i) * BLOCK, v, V, state, hot_class, u_y, class_weight_ptr, cap, slope, c,
                SOFTCAP, CLASS, SMOOTH, METRICS, True,
            )  # fmt: skip
        top, others, h, q, argmax = pieces.combined(state, u_y, c, METRICS, SMOOTH)
        d_y, e_y, total = pieces.shares(top, others, u_y, y, V, c)
        a, rest, even_y = _weights_of(class_weight_ptr, weight_sum_ptr, y, V, smoothing, CLASS, SMOOTH)
        if GRAD:
            up = tl.where(y < V, up, float("nan"))
            k, hot = pieces.slopes(top, others, total, e_y, a * up, rest * up, up, z_loss, s)
            hot -= even_y * up
            even = smoothing / V * up
            for i in tl.static_range(KEEP):
                v = (full + i) * BLOCK + o
                at = v.to(tl.int64) if WIDE else v
                x = pieces.opaque(kept[i]) if OPAQUE else kept[i]
                d = pieces.gradient(
                    x, v, V, top, c, k, even, class_weight_ptr, cap, slope, SOFTCAP, CLASS, SMOOTH
                ).to(g_ptr.dtype.element_ty)  # fmt: skip
                tl.store(g_row + at * stride_g, d, mask=v < V, cache_modifier=".cs")
            for i in range(full):
                v = (full - 1 - i) * BLOCK + o
                at = v.to(tl.int64) if WIDE else v
                x = tl.load(row + at * stride_x, eviction_policy="evict_first")
                d = pieces.gradient(
                    x, v, V, top, c, k, even, class_weight_ptr, cap, slope, SOFTCAP, CLASS, SMOOTH
                ).to(g_ptr.dtype.element_ty)  # fmt: skip
                tl.store(g_row + at * stride_g, d, cache_modifier=".cs")
            tl.debug_barrier()  # the label's element was written by another thread
            if SOFTCAP:
                hot *= 1 - (u_y / cap) * (u_y / cap)
            tl.store(g_row + y * stride_g, hot.to(g_ptr.dtype.element_ty), mask=y < V)
        log_total = pieces.log_of(total, others)
        log_p = tl.where(y < V, s * d_y, float("nan")) - log_total
        lse = s * top + log_total
        loss = -a * log_p
        if SMOOTH:
            loss -= rest * log_p + smoothing / V * s * q
        loss = (loss + pieces.times(z_loss, lse * lse)) * row_weight
        if METRICS:
            entropy = log_total - s * (h + e_y * tl.where(e_y > 0, d_y, 0.0)) / total
    elif GRAD:
        _clear(g_row, stride_g, V, R, T, E, WIDE)
    tl.store(loss_ptr + row_of_all, loss)
    tl.store(top_ptr + row_of_all, top)
    tl.store(log_total_ptr + row_of_all, log_total)
    if METRICS:
        tl.store(log_prob_ptr + row_of_all, log_p)
        tl.store(entropy_ptr + row_of_all, entropy)
        tl.store(argmax_ptr + row_of_all, argmax)


@triton.jit
def backward_rows(
    x_ptr, g_ptr, target_ptr, row_weight_ptr, class_weight_ptr, weight_sum_ptr, up_ptr, up_lse_ptr,
    top_ptr, log_total_ptr, inner, x_outer, x_inner, stride_x, stride_up, stride_lse, V,
    ignore_index, smoothing, z_loss, cap, slope, s, scale,
    HAS_UP: tl.constexpr, HAS_UP_LSE: tl.constexpr, HAS_ROW_WEIGHT: tl.constexpr, CLASS: tl.constexpr,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """d_logits [N, V] from the upstream gradients of the row's loss and lse."""
    n = tl.program_id(0).to(tl.int64)
    y, row_weight, live = pieces.label(target_ptr, row_weight_ptr, n, ignore_index, HAS_ROW_WEIGHT)
    g_row = g_ptr + n * V
    if live:
        c = s * 1.4426950408889634
        row = x_ptr + (n // inner) * x_outer + (n % inner) * x_inner
        u_y = _picked(row, y, stride_x, V, cap, slope, SOFTCAP)
        top = tl.load(top_ptr + n)
        log_total = tl.load(log_total_ptr + n)
        log_p = s * (u_y - top) - log_total
        up = (tl.load(up_ptr + n * stride_up).to(tl.float32) if HAS_UP else 0.0) * row_weight * scale
        up = tl.where(y < V, up, float("nan"))
        a, rest, even_y = _weights_of(class_weight_ptr, weight_sum_ptr, y, V, smoothing, CLASS, SMOOTH)
        rest = (rest + pieces.times(2 * z_loss, s * top + log_total)) * up
        if HAS_UP_LSE:
            rest += tl.load(up_lse_ptr + n * stride_lse).to(tl.float32) * scale
        k = (a * up + rest) * tl.exp(-log_total)
        even = smoothing / V * up
        hot = a * up * pieces.expm1(log_p) + rest * tl.exp(log_p) - even_y * up
        if SOFTCAP:
            hot *= 1 - (u_y / cap) * (u_y / cap)
        o = pieces.offsets(R, T, E)
        for start in range(0, V, R * T * E):
            v = start + o
            at = v.to(tl.int64) if WIDE else v
            x = tl.load(row + at * stride_x, mask=v < V, other=-float("inf"), eviction_policy="evict_first")
            d = pieces.gradient(x, v, V, top, c, k, even, class_weight_ptr, cap, slope, SOFTCAP, CLASS, SMOOTH)
            d = tl.where(v == y, hot, d)
            tl.store(g_row + v, d.to(g_ptr.dtype.element_ty), mask=v < V, cache_modifier=".cs")
    else:
        _clear(g_row, 1, V, R, T, E, False)


@triton.jit
def count_labelled(target_ptr, over_ptr, reciprocal_ptr, N, ignore_index, BLOCK: tl.constexpr, FOLLOWED: tl.constexpr):
    """One program: the rows with a label, at least 1, and the reciprocal. FOLLOWED: the next kernel may begin."""
    if FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()
    o = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, N, BLOCK):
        y = tl.load(target_ptr + start + o, mask=start + o < N, other=-1)
        count += ((y != ignore_index) & (y >= 0)).to(tl.int32)
    over = tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    tl.store(over_ptr, over)
    tl.store(reciprocal_ptr, 1 / over)


@triton.jit
def mean_of(loss_ptr, over_ptr, mean_ptr, N, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program: sum of N losses / over. EARLY: this may begin before the kernel ahead of it has ended."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    o = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        total += tl.load(loss_ptr + start + o, mask=start + o < N, other=0.0)
    tl.store(mean_ptr, tl.div_rn(tl.sum(total, 0), tl.load(over_ptr)))


@triton.jit
def place_labelled(
    target_ptr, row_weight_ptr, reciprocal_ptr, places_ptr, N, ignore_index, HAS_ROW_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one over the rows with a label, at least 1; how many rows carry loss, the first and the last."""
    o = tl.arange(0, BLOCK)
    labels = tl.zeros([BLOCK], tl.int32)
    count = tl.zeros([BLOCK], tl.int32)
    first = tl.zeros([BLOCK], tl.int32) + N
    last = tl.zeros([BLOCK], tl.int32) - 1
    for start in range(0, N, BLOCK):
        n = start + o
        y = tl.load(target_ptr + n, mask=n < N, other=-1)
        live = (y != ignore_index) & (y >= 0)
        labels += live.to(tl.int32)
        if HAS_ROW_WEIGHT:
            live = live & (tl.load(row_weight_ptr + n, mask=n < N, other=0.0) != 0.0)
        count += live.to(tl.int32)
        first = tl.minimum(first, tl.where(live, n, N))
        last = tl.maximum(last, tl.where(live, n, -1))
    over = tl.maximum(tl.sum(labels, 0), 1).to(tl.float32)
    tl.store(reciprocal_ptr, tl.div_rn(tl.full([], 1.0, tl.float32), over))  # as PyTorch's reciprocal rounds
    tl.store(places_ptr, tl.sum(count, 0))
    tl.store(places_ptr + 1, tl.min(first, 0))
    tl.store(places_ptr + 2, tl.max(last, 0))


@triton.jit
def scale_unless_one(g_ptr, scale_ptr, n, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """g *= scale; nothing is touched when the scale is exactly 1."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    scale = tl.load(scale_ptr).to(tl.float32)
    if scale != 1.0:
        o = tl.arange(0, BLOCK)
        for b in range(tl.program_id(0).to(tl.int64), tl.cdiv(n, BLOCK), tl.num_programs(0)):
            at = b * BLOCK + o
            g = tl.load(g_ptr + at, mask=at < n).to(tl.float32) * scale
            tl.store(g_ptr + at, g.to(g_ptr.dtype.element_ty), mask=at < n)
