// Products with a weight in 4-bit NormalFloat, and its values: riftco/kernels/nf4/spec.py says what the bytes mean.
#include <metal_stdlib>
using namespace metal;
#include "quantized.h"

constant float NF4_VALUES[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// Two codes a byte, the even element of the flattened weight in the high nibble; one absmax for 2^shift elements.
struct NF4 {
  device const uchar* codes;
  device const float* absmax;
  long K;
  long shift;
  inline float operator()(long n, long k) const {
    const long e = n * K + k;
    const uchar byte = codes[e >> 1];
    return NF4_VALUES[e & 1 ? byte & 15 : byte >> 4] * absmax[e >> shift];
  }
};

INSTANTIATE_QUANTIZED("nf4", "f32", float, NF4)
INSTANTIATE_QUANTIZED("nf4", "f16", half, NF4)
INSTANTIATE_QUANTIZED("nf4", "bf16", bfloat, NF4)
