"""The arithmetic between the two products, on the registers of one warpgroup."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from .variant import ROWS as _ROWS

ROWS = gl.constexpr(_ROWS)
NAN_WINS = gl.constexpr(PropagateNan.ALL)
LOW = gl.constexpr(-(2.0**100))  # a maximum before any key: finite, and exact in products, so that differences are 0


@gluon.jit
def row_sums(p, BN: gl.constexpr):
    """Sums over the registers of one thread: [ROWS, BN] -> [ROWS, 4]; the 4 lanes of a row are added at the end."""
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, BN // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def packed(e, dt: gl.constexpr, BN: gl.constexpr):
    """P as 16-bit pairs in int32 [ROWS, BN / 2]: halves carried over a loop's back edge one by one cost a move each."""
    first, second = gl.split(gl.reshape(e, [ROWS, BN // 2, 2]))
    asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dt == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def operand(pairs, dt: gl.constexpr, layout: gl.constexpr, BN: gl.constexpr):
    """The pairs as the left operand of P V: no instruction at all."""
    first = pairs.to(gl.int16).to(dt, bitcast=True)
    second = (pairs >> 16).to(gl.int16).to(dt, bitcast=True)
    p = gl.reshape(gl.join(first, second), [ROWS, BN])
    return gl.convert_layout(p, layout, assert_trivial=True)


@gluon.jit
def capped(x, cap):
    """cap * tanh(x) as cap - 2 cap / (1 + exp(2 x)), to float32's accuracy; x comes times 2 log2(e)."""
    r = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + gl.exp2(x)], dtype=gl.float32, is_pure=True, pack=1
    )
    return cap - 2.0 * cap * r


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=NAN_WINS)


@gluon.jit
def softmax(s, m, scale, cap, low, high, col0, MASK: gl.constexpr, V: gl.constexpr):
    """P of a block, not divided by its sum; the new row maxima; and the factor for what was summed before.

    Scores times `scale` are powers of 2, or capped scores are. A row sees the keys low <= j < high; col0 is the block's
    first.
    """
    if V.value.CAP:
        s = capped(s * scale, cap)
    if MASK:
        cols = gl.arange(0, V.value.tiles.BN, gl.SliceLayout(0, s.type.layout))
        seen = cols[None, :] < (high - col0)[:, None]
        if V.value.LEFT:
            seen = seen & (cols[None, :] >= (low - col0)[:, None])
        s = gl.where(seen, s, float("-inf"))
    m_new = _larger(m, gl.reduce(s, 1, _larger))  # a NaN in a row must reach all of it
    if V.value.CAP:
        x = s - m_new[:, None]
        alpha = gl.exp2(m - m_new)
    else:
        scaled = m_new * scale
        x = s * scale - scaled[:, None]
        alpha = gl.exp2(m * scale - scaled)
    return gl.exp2(x), m_new, alpha
