"""The matrix product of every Triton kernel here."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b):
    """a [M, K] @ b [K, N] in float32, without TF32. With one row the products are summed outside the matrix unit.

    Triton's interpreter multiplies bfloat16 bit patterns as integers, so there the operands are widened first; the
    product is the same.
    """
    if a.shape[0] == 1:
        product = tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    elif INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product
