// Shared by the shaders. riftco.metal.source() puts it in place of the #include: Metal compiles text at run time.
#pragma once

// A tensor [..., C] as rows; mirrors riftco/kernels/_launch.py as_rows and csrc/launch.h.
struct Rows {
  long inner;
  long stride_outer;
  long stride_inner;
};

inline long row_offset(constant Rows& rows, long n) {
  return (n / rows.inner) * rows.stride_outer + (n % rows.inner) * rows.stride_inner;
}

// A sum of exponentials as largest exponent and sum of exp(x - shift(largest)): no exponential overflows, and neither
// a part of -inf alone nor one with +inf gives inf - inf.
struct MaxSum {
  float largest;
  float sum;
};

inline float shift(float largest) { return isinf(largest) ? 0.0f : largest; }

inline MaxSum rescaled(MaxSum part, float largest) {
  return {largest, part.sum * precise::exp(part.largest - shift(largest))};
}

// The whole threadgroup's MaxSum in every thread. `shared`: 2 * 32 floats, which the caller may use again only after
// another barrier.
inline MaxSum threadgroup_max_sum(MaxSum part, threadgroup float* shared, uint lane, uint simdgroup, uint simdgroups) {
  part = rescaled(part, simd_max(part.largest));
  part.sum = simd_sum(part.sum);
  if (lane == 0) {
    shared[simdgroup] = part.largest;
    shared[32 + simdgroup] = part.sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  MaxSum all = {-INFINITY, 0.0f};
  if (lane < simdgroups) all = {shared[lane], shared[32 + lane]};
  all = rescaled(all, simd_max(all.largest));
  all.sum = simd_sum(all.sum);
  return all;
}

// The whole threadgroup's sum in every thread. `shared`: 32 floats, which the caller may use again only after another
// barrier.
inline float threadgroup_sum(float part, threadgroup float* shared, uint lane, uint simdgroup, uint simdgroups) {
  part = simd_sum(part);
  if (lane == 0) shared[simdgroup] = part;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simdgroups ? shared[lane] : 0.0f);
}

// log(1 + x) for x >= 0 and exp(x) - 1 for x <= 0, to float's accuracy: Metal has neither.
inline float log_1p(float x) {
  const float w = 1.0f + x;
  if (w == 1.0f) return x;
  return x < 1.0f ? precise::log(w) * (x / (w - 1.0f)) : precise::log(w);
}
inline float exp_m1(float x) {
  if (x < -0.125f) return precise::exp(x) - 1.0f;
  return x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))));
}
