// Rotary position embedding: riftco/kernels/rope/spec.py says what it means. A threadgroup takes one token, all heads of
// q and then of k. A thread reads both elements of a pair before it writes either, so that the result may lie where the
// input did: the buffers of in-place calls are the same.
#include <metal_stdlib>
using namespace metal;
#include "common.h"

struct Heads {  // [B, T, heads, D], as it is read and as it is written
  long b, t, h, d;
  long out_b, out_t, out_h, out_d;
  long heads;
  long D;
};

struct RopeParams {  // as riftco/metal/rope.py packs it
  Heads q;
  Heads k;
  long cos_p, cos_i, sin_p, sin_i;
  long position_b, position_t;
  long tokens;  // B * T
  long T;
  long max_position;
  long half_dim;  // R / 2
  long has_positions;
  long has_k;
  long interleaved;
  long transpose;
};

template <typename T>
inline void turn(
    device T* out, device const T* x, constant Heads& s, long b, long t, long p, device const float* cosines,
    device const float* sines, constant RopeParams& params, uint thread_index, uint threads) {
  device T* to = out + b * s.out_b + t * s.out_t;
  device const T* from = x + b * s.b + t * s.t;
  const bool inside = p >= 0 && p < params.max_position;
  for (long e = thread_index; e < s.heads * params.half_dim; e += threads) {
    const long h = e / params.half_dim, i = e % params.half_dim;
    const long first = params.interleaved ? 2 * i : i, second = params.interleaved ? 2 * i + 1 : i + params.half_dim;
    const float c = inside ? cosines[p * params.cos_p + i * params.cos_i] : NAN;
    float n = inside ? sines[p * params.sin_p + i * params.sin_i] : NAN;
    if (params.transpose) n = -n;
    const float a = float(from[h * s.h + first * s.d]), z = float(from[h * s.h + second * s.d]);
    to[h * s.out_h + first * s.out_d] = T(a * c - z * n);
    to[h * s.out_h + second * s.out_d] = T(z * c + a * n);
  }
  const long turned = 2 * params.half_dim, rest = s.D - turned;
  for (long e = thread_index; e < s.heads * rest; e += threads) {
    const long h = e / rest, d = turned + e % rest;
    to[h * s.out_h + d * s.out_d] = from[h * s.h + d * s.d];
  }
}

template <typename T, typename Position>
[[kernel]] void rope(
    device T* q_out [[buffer(0)]],
    device T* k_out [[buffer(1)]],
    device const T* q [[buffer(2)]],
    device const T* k [[buffer(3)]],
    device const float* cosines [[buffer(4)]],
    device const float* sines [[buffer(5)]],
    device const Position* positions [[buffer(6)]],
    constant RopeParams& params [[buffer(7)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  for (long token = group; token < params.tokens; token += groups) {
    const long b = token / params.T, t = token % params.T;
    const long p = params.has_positions ? positions[b * params.position_b + t * params.position_t] : t;
    turn(q_out, q, params.q, b, t, p, cosines, sines, params, thread_index, threads);
    if (params.has_k) turn(k_out, k, params.k, b, t, p, cosines, sines, params, thread_index, threads);
  }
}

#define INSTANTIATE(NAME, T, Position)                                                                               \
  template [[host_name("rope_" NAME)]] [[kernel]] decltype(rope<T, Position>) rope<T, Position>;

INSTANTIATE("f32_i32", float, int)
INSTANTIATE("f32_i64", float, long)
INSTANTIATE("f16_i32", half, int)
INSTANTIATE("f16_i64", half, long)
INSTANTIATE("bf16_i32", bfloat, int)
INSTANTIATE("bf16_i64", bfloat, long)
