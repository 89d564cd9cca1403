// The Adam step: riftco/kernels/adam/spec.py and equations.py say what it means. One launch a tensor, elementwise in
// float32; the gradient's norm is a largest magnitude and a sum of squares for each chunk, so that neither overflows.
#include <metal_stdlib>
using namespace metal;
#include "common.h"

#define CHUNK 16384

struct NormParams {  // as riftco/metal/adam.py packs it
  long numel;
};

// largest[c] = the largest magnitude of chunk c, NaN if there is one; squares[c] = sum of (g / largest[c])^2.
template <typename G>
[[kernel]] void adam_norm(
    device float* largest [[buffer(0)]],
    device float* squares [[buffer(1)]],
    device const G* grad [[buffer(2)]],
    constant NormParams& p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float maxima[32];
  threadgroup float broken[32];
  threadgroup float sums[32];
  for (long c = group; c * CHUNK < p.numel; c += groups) {
    const long last = min(c * CHUNK + CHUNK, p.numel);
    float most = 0.0f, nans = 0.0f;  // a maximum may drop NaN
    for (long e = c * CHUNK + thread_index; e < last; e += threads) {
      const float g = abs(float(grad[e]));
      if (isnan(g)) nans += 1.0f;
      else most = max(most, g);
    }
    most = simd_max(most);
    if (lane == 0) maxima[simdgroup] = most;
    nans = threadgroup_sum(nans, broken, lane, simdgroup, simdgroups);  // its barrier is the maxima's, too
    most = simd_max(lane < simdgroups ? maxima[lane] : 0.0f);
    const float unit = most > 0.0f && !isinf(most) ? most : 1.0f;
    float sum = 0.0f;
    for (long e = c * CHUNK + thread_index; e < last; e += threads) {
      const float g = float(grad[e]) / unit;
      sum += g * g;
    }
    sum = threadgroup_sum(sum, sums, lane, simdgroup, simdgroups);
    if (thread_index == 0) {
      largest[c] = nans > 0.0f ? NAN : most;
      squares[c] = sum;
    }
  }  // the next chunk writes each array after a barrier that follows its last read here
}

struct StepParams {  // as riftco/metal/adam.py packs it
  long numel;
  long decoupled;
  float log_beta1;
  float log_beta2;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
  float weight_decay;
};

// Nothing is written unless the step is committed. `step` has been counted already.
template <typename P, typename G>
[[kernel]] void adam_step(
    device P* param [[buffer(0)]],
    device float* exp_avg [[buffer(1)]],
    device float* exp_avg_sq [[buffer(2)]],
    device const G* grad [[buffer(3)]],
    device const float* step [[buffer(4)]],
    device const uchar* committed [[buffer(5)]],
    device const float* clip_scale [[buffer(6)]],
    device const float* lr [[buffer(7)]],
    constant StepParams& p [[buffer(8)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  if (!committed[0]) return;
  const float rate = lr[0] / -exp_m1(step[0] * p.log_beta1);
  const float root2 = precise::sqrt(-exp_m1(step[0] * p.log_beta2));
  const float scale = clip_scale[0], kept = 1.0f - lr[0] * p.weight_decay;
  for (long e = long(group) * threads + thread_index; e < p.numel; e += long(groups) * threads) {
    float value = float(param[e]), g = float(grad[e]) * scale;
    if (!p.decoupled) g += p.weight_decay * value;
    const float m = exp_avg[e] + p.one_minus_beta1 * (g - exp_avg[e]);
    const float v = p.beta2 * exp_avg_sq[e] + p.one_minus_beta2 * g * g;
    if (p.decoupled) value *= kept;
    exp_avg[e] = m;
    exp_avg_sq[e] = v;
    param[e] = P(value - rate * m / (precise::sqrt(v) / root2 + p.eps));
  }
}

#define INSTANTIATE_NORM(NAME, G)                                                                                    \
  template [[host_name("adam_norm_" NAME)]] [[kernel]] decltype(adam_norm<G>) adam_norm<G>;
#define INSTANTIATE_STEP(NAME, P, G)                                                                                 \
  template [[host_name("adam_step_" NAME)]] [[kernel]] decltype(adam_step<P, G>) adam_step<P, G>;

INSTANTIATE_NORM("f32", float)
INSTANTIATE_NORM("f16", half)
INSTANTIATE_NORM("bf16", bfloat)
INSTANTIATE_STEP("f32_f32", float, float)
INSTANTIATE_STEP("f16_f16", half, half)
INSTANTIATE_STEP("f16_f32", half, float)
INSTANTIATE_STEP("bf16_bf16", bfloat, bfloat)
INSTANTIATE_STEP("bf16_f32", bfloat, float)
