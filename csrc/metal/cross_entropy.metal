// Cross-entropy of integer labels: riftco/kernels/cross_entropy/spec.py says what it means. A threadgroup works on one
// row at a time, in float32: read once forward (online maximum and sum), once backward. N rows, V vocabulary.
#include <metal_stdlib>
using namespace metal;
#include "common.h"

struct CrossEntropyParams {  // mirrors csrc/cross_entropy.h
  Rows logits;
  long stride_v;
  long stride_d_loss;
  long N;
  long V;
  long ignore_index;
  long has_weight;
};

// A row without a label, or of weight 0, is skipped: its logits are not read.
inline bool is_live(long y, float w, constant CrossEntropyParams& p) {
  return y != p.ignore_index && y >= 0 && w != 0.0f;
}

// `lse` holds two numbers a row: the shift (its maximum) at n, the logarithm of the sum of exp(x - shift) at N + n.
template <typename T, typename Label>
[[kernel]] void cross_entropy_fwd(
    device const T* logits [[buffer(0)]],
    device const Label* target [[buffer(1)]],
    device const float* row_weight [[buffer(2)]],
    device float* loss [[buffer(3)]],
    device float* lse [[buffer(4)]],
    constant CrossEntropyParams& p [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float shared[64];
  for (long n = group; n < p.N; n += groups) {
    const long y = target[n];
    const float w = p.has_weight ? row_weight[n] : 1.0f;
    if (!is_live(y, w, p)) {  // the same for all threads, so that no barrier diverges
      if (thread_index == 0) {
        loss[n] = 0.0f;
        lse[n] = lse[p.N + n] = 0.0f;
      }
      continue;
    }
    device const T* row = logits + row_offset(p.logits, n);
    MaxSum part = {-INFINITY, 0.0f};
    for (long v = thread_index; v < p.V; v += threads) {
      const float x = float(row[v * p.stride_v]);
      part = rescaled(part, max(part.largest, x));
      part.sum += v == y ? 0.0f : precise::exp(x - shift(part.largest));  // the label's part would hide the others'
    }
    const MaxSum all = threadgroup_max_sum(part, shared, lane, simdgroup, simdgroups);
    if (thread_index == 0) {
      const float top = shift(all.largest);
      const float picked = y < p.V ? float(row[y * p.stride_v]) - top : NAN;
      const float total = all.sum + (y < p.V ? precise::exp(picked) : 0.0f);
      const float log_total = picked == 0.0f ? log_1p(all.sum) : precise::log(total);
      loss[n] = (log_total - picked) * w;
      lse[n] = top;
      lse[p.N + n] = log_total;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next row reuses `shared`
  }
}

template <typename T, typename Label>
[[kernel]] void cross_entropy_bwd(
    device const float* d_loss [[buffer(0)]],
    device const T* logits [[buffer(1)]],
    device const Label* target [[buffer(2)]],
    device const float* row_weight [[buffer(3)]],
    device const float* lse [[buffer(4)]],
    device T* d_logits [[buffer(5)]],
    constant CrossEntropyParams& p [[buffer(6)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  for (long n = group; n < p.N; n += groups) {
    const long y = target[n];
    const float w = p.has_weight ? row_weight[n] : 1.0f;
    device T* out = d_logits + n * p.V;
    if (!is_live(y, w, p)) {
      for (long v = thread_index; v < p.V; v += threads) out[v] = T(0.0f);
      continue;
    }
    device const T* row = logits + row_offset(p.logits, n);
    const float top = lse[n], log_total = lse[p.N + n];
    const float scale = y < p.V ? d_loss[n * p.stride_d_loss] * w : NAN;
    for (long v = thread_index; v < p.V; v += threads) {
      const float log_p = (float(row[v * p.stride_v]) - top) - log_total;
      out[v] = T((v == y ? exp_m1(log_p) : precise::exp(log_p)) * scale);
    }
  }
}

#define INSTANTIATE(NAME, T, Label)                                                                                  \
  template [[host_name("cross_entropy_fwd_" NAME)]] [[kernel]] decltype(cross_entropy_fwd<T, Label>)                 \
      cross_entropy_fwd<T, Label>;                                                                                   \
  template [[host_name("cross_entropy_bwd_" NAME)]] [[kernel]] decltype(cross_entropy_bwd<T, Label>)                 \
      cross_entropy_bwd<T, Label>;

INSTANTIATE("f32_i32", float, int)
INSTANTIATE("f32_i64", float, long)
INSTANTIATE("f16_i32", half, int)
INSTANTIATE("f16_i64", half, long)
INSTANTIATE("bf16_i32", bfloat, int)
INSTANTIATE("bf16_i64", bfloat, long)
