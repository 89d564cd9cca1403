// Products with a weight in one of GGUF's block formats, and its values: riftco/kernels/gguf_linear/formats.py is the
// table of what the bytes mean. The format is a number that is the same for every thread, not a kernel of its own.
#include <metal_stdlib>
using namespace metal;
#include "quantized.h"

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };  // ggml's numbers

inline float half_at(device const uchar* b) { return float(as_type<half>(ushort(b[0] | (b[1] << 8)))); }

inline int nibble(device const uchar* b, uint i, uint run) {  // of each run of bytes first all low halves, then all high
  const uchar byte = b[i / (2 * run) * run + i % run];
  return i / run % 2 ? byte >> 4 : byte & 15;
}

inline int fifth_bit(device const uchar* b, uint i) { return (b[i / 8] >> (i % 8) & 1) << 4; }

// Element i of a block, w = q * scale + offset. Products of scales and q are exact in float32, so w is rounded once.
inline float value_32(device const uchar* b, uint i, long format) {
  const float scale = half_at(b);
  switch (format) {
    case Q4_0: return float(nibble(b + 2, i, 16) - 8) * scale;
    case Q4_1: return float(nibble(b + 4, i, 16)) * scale + half_at(b + 2);
    case Q5_0: return float((nibble(b + 6, i, 16) | fifth_bit(b + 2, i)) - 16) * scale;
    case Q5_1: return float(nibble(b + 8, i, 16) | fifth_bit(b + 4, i)) * scale + half_at(b + 2);
    default: return float(as_type<char>(b[2 + i])) * scale;  // Q8_0
  }
}

inline float value_k(device const uchar* b, uint i, long format) {
  if (format == Q6_K) {
    const int high = (b[128 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) << 4;
    return float((nibble(b, i, 64) | high) - 32) * (half_at(b + 208) * float(as_type<char>(b[192 + i / 16])));
  }
  const uint g = i / 32;  // eight groups, each with a 6-bit factor of the scale and of the offset
  const int factor = g < 4 ? b[4 + g] & 63 : (b[8 + g] & 15) | (b[g] >> 2 & 48);
  const int least = g < 4 ? b[8 + g] & 63 : (b[8 + g] >> 4) | (b[4 + g] >> 2 & 48);
  const int q = format == Q4_K ? nibble(b + 16, i, 32) : nibble(b + 48, i, 32) | (b[16 + i % 32] >> g & 1) << 4;
  return float(q) * (half_at(b) * float(factor)) - half_at(b + 2) * float(least);
}

inline long block_bytes(long format) {
  switch (format) {
    case Q4_0: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case Q4_K: return 144;
    case Q5_K: return 176;
    default: return 210;  // Q6_K
  }
}

struct GGUF {
  device const uchar* data;
  device const float* unused;
  long K;
  long format;
  inline float operator()(long n, long k) const {
    const bool super = format >= Q4_K;
    const long block = super ? 256 : 32;
    device const uchar* b = data + (n * (K / block) + k / block) * block_bytes(format);
    return super ? value_k(b, k % block, format) : value_32(b, k % block, format);
  }
};

INSTANTIATE_QUANTIZED("gguf", "f32", float, GGUF)
INSTANTIATE_QUANTIZED("gguf", "f16", half, GGUF)
INSTANTIATE_QUANTIZED("gguf", "bf16", bfloat, GGUF)
