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
def _polynomial_exp2(x):
    """2^x for x <= 0 to 7.5e-5 (P is rounded to 16 bits), on the multiply-add pipe; below -126 that of -126.

    x = n + f, |f| <= 1/2: adding 1.5 * 2^23 leaves n in the low bits, which go to the exponent of 2^f.
    """
    x = gl.maximum(x, -126.0)
    y = x + 12582912.0
    f = x - (y - 12582912.0)
    r = ((0.055171669 * f + 0.24261113) * f + 0.69326099) * f + 0.99992807
    return (r.to(gl.int32, bitcast=True) + (y.to(gl.int32, bitcast=True) << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def _halves(x, N: gl.constexpr):
    """[ROWS, N] -> its left and right columns, in the registers where they are."""
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, N // 2]), (0, 2, 1)))


@gluon.jit
def _whole(a, b, N: gl.constexpr):
    both = gl.join(a, gl.convert_layout(b, a.type.layout, assert_trivial=True))
    return gl.reshape(gl.permute(both, (0, 2, 1)), [ROWS, N])


@gluon.jit
def _exp2(x, V: gl.constexpr):
    """2^x for x <= 0, a quarter of the columns without the special-function unit where the tiles say so."""
    BN: gl.constexpr = V.value.tiles.BN
    if not V.value.tiles.POLYNOMIAL:
        return gl.exp2(x)
    left, right = _halves(x, BN)
    third, fourth = _halves(right, BN // 2)
    e = _whole(gl.exp2(left), _whole(gl.exp2(third), _polynomial_exp2(fourth), BN // 2), BN)
    return gl.convert_layout(e, x.type.layout, assert_trivial=True)


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
    m_new = _larger(m, gl.reduce(s, 1, _larger))  # a NaN in a row must reach all of it: the polynomial drops it
    if V.value.CAP:
        x = s - m_new[:, None]
        alpha = gl.exp2(m - m_new)
    else:
        scaled = m_new * scale
        x = s * scale - scaled[:, None]
        alpha = gl.exp2(m * scale - scaled)
    if MASK:
        e = gl.exp2(x)  # exactly 0 where masked
    else:
        e = _exp2(x, V)
    return e, m_new, alpha
