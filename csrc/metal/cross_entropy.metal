// Cross-entropy of integer labels: riftco/kernels/cross_entropy/spec.py says what it means. A threadgroup works on one
// row at a time, in float32: one read for the statistics (an online maximum and sums), one for the gradient.
#include <metal_stdlib>
using namespace metal;
#include "common.h"

struct CrossEntropyParams {  // as riftco/metal/cross_entropy.py packs it
  Rows logits;
  long stride_v;
  Rows gradient;
  long gradient_stride_v;
  long stride_up;
  long stride_up_lse;
  long N;
  long V;
  long ignore_index;
  long has_row_weight;
  long has_class_weight;
  long has_up;
  long has_up_lse;
  long metrics;
  long grad;  // cross_entropy_fwd: the gradient is made, too
  float smoothing;
  float z_loss;
  float softcap;  // 0: none
  float logit_scale;
};

// A row without a label, or of weight 0, is skipped: its logits are not read.
inline bool is_live(long y, float w, constant CrossEntropyParams& p) {
  return y != p.ignore_index && y >= 0 && w != 0.0f;
}

inline float score(float x, constant CrossEntropyParams& p) {
  return p.softcap == 0.0f ? x : p.softcap * precise::tanh(x * (p.logit_scale / p.softcap));
}
inline float score_scale(constant CrossEntropyParams& p) { return p.softcap == 0.0f ? p.logit_scale : 1.0f; }

// Of a part of a row, with e = exp(s (u - top)): the sums of e and of e (u - top) leave the label out, that of
// w (u - top) does not. Only finite values are a top: inf - inf would be NaN.
struct Statistics {
  float top;
  float sum;
  float energy;
  float even;   // with the classes' weights, for smoothing
  float weight;  // the classes' weights themselves
};

inline Statistics moved(Statistics part, float top, float s) {
  const float by = part.top - top, factor = precise::exp(s * by);
  part.energy = part.sum == 0.0f ? 0.0f : factor * (part.energy + by * part.sum);
  part.sum = part.sum == 0.0f ? 0.0f : factor * part.sum;
  part.even = part.weight == 0.0f ? 0.0f : part.even + by * part.weight;
  part.top = top;
  return part;
}

inline Statistics simd_statistics(Statistics part, float s) {
  part = moved(part, simd_max(part.top), s);
  part.sum = simd_sum(part.sum);
  part.energy = simd_sum(part.energy);
  part.even = simd_sum(part.even);
  part.weight = simd_sum(part.weight);
  return part;
}

// What the gradient of a row needs.
struct Row {
  float top;
  float log_total;
  float up;       // NaN where the label is no class
  float up_lse;
  float a;        // (1 - smoothing) w[y]
  float rest;     // smoothing / V sum(w) + 2 z_loss lse
  float each;     // smoothing / V
};

inline float gradient(float x, long v, long y, Row r, device const float* class_weight, constant CrossEntropyParams& p) {
  const float u = score(x, p);
  const float log_p = score_scale(p) * (u - r.top) - r.log_total;
  const float probability = precise::exp(log_p);
  float d = r.a * (v == y ? exp_m1(log_p) : probability) + r.rest * probability;  // p - 1 keeps its digits near 1
  if (r.each != 0.0f) d -= r.each * (p.has_class_weight ? class_weight[v] : 1.0f);
  d = (d * r.up + (p.has_up_lse ? r.up_lse * probability : 0.0f)) * p.logit_scale;
  return p.softcap == 0.0f ? d : d * (1.0f - (u / p.softcap) * (u / p.softcap));
}

inline Row row_of(
    float top, float log_total, long y, float up, float up_lse, device const float* class_weight,
    device const float* weight_sum, constant CrossEntropyParams& p) {
  const float w = !p.has_class_weight ? 1.0f : y >= 0 && y < p.V ? class_weight[y] : 0.0f;
  const float each = p.smoothing / float(p.V);
  float rest = each == 0.0f ? 0.0f : each * (p.has_class_weight ? weight_sum[0] : float(p.V));
  if (p.z_loss != 0.0f) rest += 2.0f * p.z_loss * (score_scale(p) * top + log_total);
  return {top, log_total, y < p.V ? up : NAN, up_lse, (1.0f - p.smoothing) * w, rest, each};
}

template <typename T, typename Label>
[[kernel]] void cross_entropy_fwd(
    device float* loss [[buffer(0)]],
    device float* top [[buffer(1)]],
    device float* log_total [[buffer(2)]],
    device float* log_prob [[buffer(3)]],
    device float* entropy [[buffer(4)]],
    device long* argmax [[buffer(5)]],
    device T* d_logits [[buffer(6)]],  // may be the logits themselves
    device const T* logits [[buffer(7)]],
    device const Label* target [[buffer(8)]],
    device const float* row_weight [[buffer(9)]],
    device const float* class_weight [[buffer(10)]],
    device const float* weight_sum [[buffer(11)]],
    device const float* d_loss [[buffer(12)]],
    constant CrossEntropyParams& p [[buffer(13)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float shared[6 * 32];
  threadgroup uint places[32];
  const float s = score_scale(p);
  for (long n = group; n < p.N; n += groups) {
    const long y = target[n];
    const float w = p.has_row_weight ? row_weight[n] : 1.0f;
    device T* out = d_logits + (p.grad ? row_offset(p.gradient, n) : 0);
    if (!is_live(y, w, p)) {  // the same for all threads, so that no barrier diverges
      if (thread_index == 0) {
        loss[n] = top[n] = log_total[n] = 0.0f;
        if (p.metrics) {
          log_prob[n] = entropy[n] = 0.0f;
          argmax[n] = -1;
        }
      }
      if (p.grad)
        for (long v = thread_index; v < p.V; v += threads) out[v * p.gradient_stride_v] = T(0.0f);
      continue;
    }
    device const T* row = logits + row_offset(p.logits, n);
    const float u_y = y < p.V ? score(float(row[y * p.stride_v]), p) : 0.0f;
    Statistics part = {-FLT_MAX, 0.0f, 0.0f, 0.0f, 0.0f};
    float most = -INFINITY;  // of the logits themselves: a softcap may make ties
    uint place = p.V;
    for (long v = thread_index; v < p.V; v += threads) {
      const float x = float(row[v * p.stride_v]), u = score(x, p);
      const float higher = min(u, FLT_MAX);
      if (higher > part.top) part = moved(part, higher, s);
      const float by = u - part.top;
      if (v != y) {
        const float e = precise::exp(s * by);
        part.sum += e;
        part.energy += e > 0.0f ? e * by : 0.0f;
      }
      if (p.smoothing != 0.0f) {
        const float each = p.has_class_weight ? class_weight[v] : 1.0f;
        part.even += each * by;
        part.weight += each;
      }
      if (x > most) {
        most = x;
        place = v;
      }
    }
    part = simd_statistics(part, s);
    const float all_most = simd_max(most);
    place = simd_min(most == all_most ? place : uint(p.V));
    if (lane == 0) {
      shared[simdgroup] = part.top;
      shared[32 + simdgroup] = part.sum;
      shared[64 + simdgroup] = part.energy;
      shared[96 + simdgroup] = part.even;
      shared[128 + simdgroup] = part.weight;
      shared[160 + simdgroup] = all_most;
      places[simdgroup] = place;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    part = {-FLT_MAX, 0.0f, 0.0f, 0.0f, 0.0f};
    most = -INFINITY;
    place = p.V;
    if (lane < simdgroups) {
      part = {shared[lane], shared[32 + lane], shared[64 + lane], shared[96 + lane], shared[128 + lane]};
      most = shared[160 + lane];
      place = places[lane];
    }
    part = simd_statistics(part, s);
    place = simd_min(most == simd_max(most) ? place : uint(p.V));
    const float d_y = u_y - part.top;
    const float e_y = y < p.V ? precise::exp(s * d_y) : 0.0f;
    const float total = part.sum + e_y;
    // the label's own part would hide the others' where it is nearly all of the sum
    const float row_log_total = y < p.V && d_y == 0.0f ? log_1p(part.sum) : precise::log(total);
    const float log_p = y < p.V ? s * d_y - row_log_total : NAN;
    const Row r = row_of(
        part.top, row_log_total, y, (p.has_up ? d_loss[n * p.stride_up] : 1.0f) * w, 0.0f, class_weight, weight_sum, p);
    if (thread_index == 0) {
      float value = -r.a * log_p;
      if (r.each != 0.0f) value += r.each * (part.weight * row_log_total - s * part.even);
      if (p.z_loss != 0.0f) {
        const float lse = s * part.top + row_log_total;
        value += p.z_loss * lse * lse;
      }
      loss[n] = value * w;
      top[n] = part.top;
      log_total[n] = row_log_total;
      if (p.metrics) {
        log_prob[n] = log_p;
        entropy[n] = row_log_total - s * (part.energy + (e_y > 0.0f ? e_y * d_y : 0.0f)) / total;
        argmax[n] = place < p.V ? place : 0;
      }
    }
    if (p.grad)
      for (long v = thread_index; v < p.V; v += threads)
        out[v * p.gradient_stride_v] = T(gradient(float(row[v * p.stride_v]), v, y, r, class_weight, p));
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next row uses the arrays again
  }
}

template <typename T, typename Label>
[[kernel]] void cross_entropy_bwd(
    device T* d_logits [[buffer(0)]],
    device const T* logits [[buffer(1)]],
    device const Label* target [[buffer(2)]],
    device const float* row_weight [[buffer(3)]],
    device const float* class_weight [[buffer(4)]],
    device const float* weight_sum [[buffer(5)]],
    device const float* d_loss [[buffer(6)]],
    device const float* d_lse [[buffer(7)]],
    device const float* top [[buffer(8)]],
    device const float* log_total [[buffer(9)]],
    constant CrossEntropyParams& p [[buffer(10)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  for (long n = group; n < p.N; n += groups) {
    const long y = target[n];
    const float w = p.has_row_weight ? row_weight[n] : 1.0f;
    device T* out = d_logits + row_offset(p.gradient, n);
    const bool live = is_live(y, w, p);
    device const T* row = logits + row_offset(p.logits, n);
    Row r = row_of(
        top[n], log_total[n], y, p.has_up ? d_loss[n * p.stride_up] * w : 0.0f,
        p.has_up_lse ? d_lse[n * p.stride_up_lse] : 0.0f, class_weight, weight_sum, p);
    if (!p.has_up) r.up = 0.0f;
    for (long v = thread_index; v < p.V; v += threads)
      out[v * p.gradient_stride_v] = live ? T(gradient(float(row[v * p.stride_v]), v, y, r, class_weight, p)) : T(0.0f);
  }
}

struct ScaleParams {
  long numel;
};

// g *= scale; nothing is read where the scale is 1.
template <typename T>
[[kernel]] void cross_entropy_scale(
    device T* g [[buffer(0)]],
    device const float* scale [[buffer(1)]],
    constant ScaleParams& p [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  const float by = scale[0];
  if (by == 1.0f) return;
  for (long e = long(group) * threads + thread_index; e < p.numel; e += long(groups) * threads) g[e] = T(float(g[e]) * by);
}

#define INSTANTIATE(NAME, T, Label)                                                                                  \
  template [[host_name("cross_entropy_fwd_" NAME)]] [[kernel]] decltype(cross_entropy_fwd<T, Label>)                 \
      cross_entropy_fwd<T, Label>;                                                                                   \
  template [[host_name("cross_entropy_bwd_" NAME)]] [[kernel]] decltype(cross_entropy_bwd<T, Label>)                 \
      cross_entropy_bwd<T, Label>;
#define INSTANTIATE_SCALE(NAME, T)                                                                                   \
  template [[host_name("cross_entropy_scale_" NAME)]] [[kernel]] decltype(cross_entropy_scale<T>) cross_entropy_scale<T>;

INSTANTIATE("f32_i32", float, int)
INSTANTIATE("f32_i64", float, long)
INSTANTIATE("f16_i32", half, int)
INSTANTIATE("f16_i64", half, long)
INSTANTIATE("bf16_i32", bfloat, int)
INSTANTIATE("bf16_i64", bfloat, long)
INSTANTIATE_SCALE("f32", float)
INSTANTIATE_SCALE("f16", half)
INSTANTIATE_SCALE("bf16", bfloat)
