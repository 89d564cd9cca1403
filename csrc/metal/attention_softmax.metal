// The softmax of materialised attention: riftco/kernels/attention/masked_softmax.py says what it means. A threadgroup
// works on one row of scores at a time.
#include <metal_stdlib>
using namespace metal;
#include "common.h"

struct SoftmaxParams {  // as riftco/metal/attention_softmax.py packs it
  Rows rows;  // of the scores, or of the probabilities' gradient
  long stride;
  long N;
  long S;
  long has_lse;  // lse is wanted, or its gradient is there
};

// p = exp(s - lse); a row of -inf alone gives zeros and lse -inf.
template <typename T>
[[kernel]] void attention_softmax_fwd(
    device T* p [[buffer(0)]],
    device float* lse [[buffer(1)]],
    device const T* s [[buffer(2)]],
    constant SoftmaxParams& params [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float shared[2 * 32];
  for (long n = group; n < params.N; n += groups) {
    device const T* row = s + row_offset(params.rows, n);
    MaxSum part = {-INFINITY, 0.0f};
    for (long c = thread_index; c < params.S; c += threads) {
      const float x = float(row[c * params.stride]);
      if (x > part.largest) part = rescaled(part, x);
      part.sum += precise::exp(x - shift(part.largest));
    }
    const MaxSum all = threadgroup_max_sum(part, shared, lane, simdgroup, simdgroups);
    const float scale = all.largest == INFINITY ? NAN : all.sum == 0.0f ? 0.0f : 1.0f / all.sum;
    for (long c = thread_index; c < params.S; c += threads) {
      p[n * params.S + c] = T(precise::exp(float(row[c * params.stride]) - shift(all.largest)) * scale);
    }
    if (params.has_lse && thread_index == 0) lse[n] = all.largest + precise::log(all.sum);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next row uses the array again
  }
}

// d_s = p * (d_p - sum(d_p p) + d_lse)
template <typename T>
[[kernel]] void attention_softmax_bwd(
    device T* d_s [[buffer(0)]],
    device const T* d_p [[buffer(1)]],
    device const float* d_lse [[buffer(2)]],
    device const T* p [[buffer(3)]],
    constant SoftmaxParams& params [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[32];
  for (long n = group; n < params.N; n += groups) {
    device const T* upstream = d_p + row_offset(params.rows, n);
    device const T* weight = p + n * params.S;
    float sum = 0.0f;
    for (long c = thread_index; c < params.S; c += threads) {
      sum += float(upstream[c * params.stride]) * float(weight[c]);
    }
    sum = threadgroup_sum(sum, sums, lane, simdgroup, simdgroups);
    if (params.has_lse) sum -= d_lse[n];
    for (long c = thread_index; c < params.S; c += threads) {
      d_s[n * params.S + c] = T(float(weight[c]) * (float(upstream[c * params.stride]) - sum));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next row uses the array again
  }
}

#define INSTANTIATE(NAME, T)                                                                                    \
  template [[host_name("attention_softmax_fwd_" NAME)]] [[kernel]] decltype(attention_softmax_fwd<T>)            \
      attention_softmax_fwd<T>;                                                                                  \
  template [[host_name("attention_softmax_bwd_" NAME)]] [[kernel]] decltype(attention_softmax_bwd<T>)            \
      attention_softmax_bwd<T>;
INSTANTIATE("f32", float)
INSTANTIATE("f16", half)
INSTANTIATE("bf16", bfloat)
