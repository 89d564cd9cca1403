"""The matrix product of every Triton kernel here."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b):
    """a [M, K] @ b [K, N] in float32, without TF32.

    Triton's interpreter multiplies bfloat16 bit patterns as integers, so there the operands are widened first; the
    product is the same.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")
