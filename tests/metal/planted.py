"""Bugs planted in the shaders and in how they are launched, by shader: (old, new, case of the room). `old` occurs once
in the shader with its headers.
"""

NUMBERS = {  # the numbers of the case must be wrong
    "nf4": [
        ("e & 1 ? byte & 15 : byte >> 4", "e & 1 ? byte >> 4 : byte & 15", "blocks across rows"),
        ("absmax[e >> shift]", "absmax[0]", "blocks across rows"),
        ("float total = simd_sum(sum[m])", "float total = sum[m]", "blocks across rows"),
        ("if (m < p.M) sum[m]", "if (m < 1) sum[m]", "blocks across rows"),
        ("simdgroup / 2 * 16", "0", "several tiles"),
        ("out[e] + (p.has_bias", "out[e] + (!p.has_bias", "several tiles"),
        ("x[row_offset(*rows, m) + k * stride]", "x[row_offset(*rows, k) + m * stride]", "several tiles"),
        (
            "product_tile<T>(a, b, m0, k0, p.M, p.K, p.N,",
            "product_tile<T>(a, b, m0, k0, p.M, p.K, p.N - 1,",
            "many rows",
        ),
    ],
}
OUT_OF_BOUNDS = {  # AddressSanitizer must see it
    "nf4": [
        ("for (long k = lane; k < p.K; k += lanes)", "for (long k = lane; k <= p.K; k += lanes)", "blocks across rows"),
        ("m0 + i < M && k0 + k < K ? a(", "m0 + i < M && k0 + k <= K ? a(", "many rows"),
        ("n0 + j < N && k0 + k < K ? b(", "k0 + k < K ? b(", "several tiles"),
        ("if (m < p.M && k < p.K) d_x", "if (m < p.M) d_x", "many rows"),
        ("threadgroup T right[TILE * PITCH];\n  threadgroup float out[TILE * TILE];\n  const RowsOperand<T> a = {x",
         "threadgroup T right[TILE * TILE];\n  threadgroup float out[TILE * TILE];\n  const RowsOperand<T> a = {x",
         "several tiles"),
    ],
}  # fmt: skip
ADDRESS_SPACES = {  # the lint must refuse it
    "nf4": [("device const float* absmax;", "threadgroup const float* absmax;")],
}
