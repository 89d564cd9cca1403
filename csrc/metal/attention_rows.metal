// Attention without simdgroup matrices, for any head dim: riftco/kernels/attention/spec.py says what it means. A
// threadgroup owns one row: a query row (forward, dQ) or a key (dK and dV). Simdgroups make scores, a lane a part of the
// head dim; then threads add up, a thread a column. Also delta, which both routes of the backward take.
#include <metal_stdlib>
using namespace metal;
#include "attention.h"

#define MOST_THREADS 128  // and so many scores at a time

// a . b in every lane of a simdgroup.
template <typename T>
inline float dot_product(device const T* a, long stride_a, device const T* b, long stride_b, long D, uint lane) {
  float sum = 0.0f;
  for (long d = lane; d < D; d += 32) sum += float(a[d * stride_a]) * float(b[d * stride_b]);
  return simd_sum(sum);
}

template <typename T>
[[kernel]] void attention_rows_fwd(
    device T* out [[buffer(0)]],
    device float* lse [[buffer(1)]],
    device const T* q [[buffer(2)]],
    device const T* k [[buffer(3)]],
    device const T* v [[buffer(4)]],
    device const int* cu_q [[buffer(5)]],
    device const int* cu_k [[buffer(6)]],
    device const int* k_lens [[buffer(7)]],
    device const float* sinks [[buffer(8)]],
    constant AttentionParams& p [[buffer(9)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scores[MOST_THREADS];
  threadgroup float shared[64];
  const Documents documents = {cu_q, cu_k, k_lens};
  for (long item = group; item < p.B * p.T * p.H; item += groups) {
    const long head = item % p.H, row = item / p.H % p.T, batch = item / p.H / p.T, key_head = head / (p.H / p.K);
    device const T* query = at_head(q, p.q, batch, head) + row * p.q.row;
    device const T* keys = at_head(k, p.k, batch, key_head);
    device const T* values = at_head(v, p.v, batch, key_head);
    const Range sees = keys_of(row, documents, batch, p);
    for (long column = 0; column < p.Dv; column += threads) {  // scores again for every `threads` columns
      const long d = column + thread_index;
      float largest = -INFINITY, total = 0.0f, sum = 0.0f;
      if (p.has_sinks && sees.hi >= 0) {  // one more score, without a value
        largest = sinks[head];
        total = largest > -INFINITY ? 1.0f : 0.0f;
      }
      for (int begin = sees.lo; begin < sees.hi; begin += threads) {
        const int count = min(int(threads), sees.hi - begin);
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the last weights have been read
        for (int n = simdgroup; n < count; n += simdgroups) {
          device const T* key = keys + (begin + n) * p.k.row;
          const float score = capped(dot_product(query, p.q.dim, key, p.k.dim, p.D, lane), p);
          if (lane == 0) scores[n] = score;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const float s = int(thread_index) < count ? scores[thread_index] : -INFINITY;
        const MaxSum all = threadgroup_max_sum({s, 1.0f}, shared, lane, simdgroup, simdgroups);
        const float top = max(largest, all.largest), shrink = precise::exp(largest - shift(top));
        total = total * shrink + rescaled(all, top).sum;
        sum *= shrink;
        largest = top;
        scores[thread_index] = precise::exp(s - shift(top));
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (d < p.Dv) {
          for (int n = 0; n < count; n++) sum += scores[n] * float(values[(begin + n) * p.v.row + d * p.v.dim]);
        }
      }
      const long at = (batch * p.T + row) * p.H + head;
      if (d < p.Dv) out[at * p.Dv + d] = T(total == 0.0f ? 0.0f : sum / total);
      if (d == 0)
        lse[(batch * p.H + head) * p.T + row] = total == 0.0f ? -INFINITY : shift(largest) + precise::log(total);
    }
  }
}

// delta = sum(dO O) - d_lse, and the largest |dO| of each row, from which float16's powers of two are made. A
// simdgroup takes a row. Rows that see nothing have delta 0.
template <typename T>
[[kernel]] void attention_delta(
    device float* delta [[buffer(0)]],
    device float* largest [[buffer(1)]],
    device const T* d_out [[buffer(2)]],
    device const T* out [[buffer(3)]],
    device const float* lse [[buffer(4)]],
    device const float* d_lse [[buffer(5)]],
    constant AttentionParams& p [[buffer(6)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  for (long item = long(group) * simdgroups + simdgroup; item < p.B * p.T * p.H; item += long(groups) * simdgroups) {
    const long head = item % p.H, row = item / p.H % p.T, batch = item / p.H / p.T;
    const long at = (batch * p.H + head) * p.T + row;
    device const T* gradient = at_head(d_out, p.d_out, batch, head) + row * p.d_out.row;
    float sum = 0.0f, most = 0.0f;
    for (long d = lane; d < p.Dv; d += 32) {
      const float g = float(gradient[d * p.d_out.dim]);
      sum += g * float(out[item * p.Dv + d]);
      most = max(most, isfinite(g) ? abs(g) : 0.0f);
    }
    sum = simd_sum(sum);
    most = simd_max(most);
    if (lane != 0) continue;
    const bool live = lse[at] != -INFINITY;
    delta[at] = live ? sum - (p.has_d_lse ? d_lse[at] : 0.0f) : 0.0f;
    largest[at] = most;
  }
}

template <typename T>
[[kernel]] void attention_rows_dq(
    device T* d_q [[buffer(0)]],
    device const T* d_out [[buffer(1)]],
    device const T* q [[buffer(2)]],
    device const T* k [[buffer(3)]],
    device const T* v [[buffer(4)]],
    device const float* lse [[buffer(5)]],
    device const float* delta [[buffer(6)]],
    device const int* cu_q [[buffer(7)]],
    device const int* cu_k [[buffer(8)]],
    device const int* k_lens [[buffer(9)]],
    constant AttentionParams& p [[buffer(10)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float gradients[MOST_THREADS];
  const Documents documents = {cu_q, cu_k, k_lens};
  for (long item = group; item < p.B * p.T * p.H; item += groups) {
    const long head = item % p.H, row = item / p.H % p.T, batch = item / p.H / p.T, key_head = head / (p.H / p.K);
    const long at = (batch * p.H + head) * p.T + row;
    device const T* query = at_head(q, p.q, batch, head) + row * p.q.row;
    device const T* gradient = at_head(d_out, p.d_out, batch, head) + row * p.d_out.row;
    device const T* keys = at_head(k, p.k, batch, key_head);
    device const T* values = at_head(v, p.v, batch, key_head);
    const Range sees = keys_of(row, documents, batch, p);
    for (long column = 0; column < p.D; column += threads) {  // scores again for every `threads` columns
      const long d = column + thread_index;
      float sum = 0.0f;
      for (int begin = sees.lo; begin < sees.hi; begin += threads) {
        const int count = min(int(threads), sees.hi - begin);
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the last gradients have been read
        for (int n = simdgroup; n < count; n += simdgroups) {
          device const T* key = keys + (begin + n) * p.k.row;
          device const T* value = values + (begin + n) * p.v.row;
          const float score = dot_product(query, p.q.dim, key, p.k.dim, p.D, lane);
          const float dp = dot_product(gradient, p.d_out.dim, value, p.v.dim, p.Dv, lane);
          if (lane == 0) gradients[n] = weight_of(score, dp, lse[at], delta[at], p).ds;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (d < p.D) {
          for (int n = 0; n < count; n++) sum += gradients[n] * float(keys[(begin + n) * p.k.row + d * p.k.dim]);
        }
      }
      if (d < p.D) d_q[((batch * p.T + row) * p.H + head) * p.D + d] = T(sum);
    }
  }
}

template <typename T>
[[kernel]] void attention_rows_dkdv(
    device T* d_k [[buffer(0)]],
    device T* d_v [[buffer(1)]],
    device const T* d_out [[buffer(2)]],
    device const T* q [[buffer(3)]],
    device const T* k [[buffer(4)]],
    device const T* v [[buffer(5)]],
    device const float* lse [[buffer(6)]],
    device const float* delta [[buffer(7)]],
    device const int* cu_q [[buffer(8)]],
    device const int* cu_k [[buffer(9)]],
    device const int* k_lens [[buffer(10)]],
    constant AttentionParams& p [[buffer(11)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float weights[MOST_THREADS];
  threadgroup float gradients[MOST_THREADS];
  const Documents documents = {cu_q, cu_k, k_lens};
  const long wanted = p.S - p.kv_grad_start, heads = p.H / p.K;
  for (long item = group; item < p.B * wanted * p.K; item += groups) {
    const long key_head = item % p.K, j = item / p.K % wanted + p.kv_grad_start, batch = item / p.K / wanted;
    device const T* key = at_head(k, p.k, batch, key_head) + j * p.k.row;
    device const T* value = at_head(v, p.v, batch, key_head) + j * p.v.row;
    const Range seen = rows_of(j, documents, batch, p);
    for (long column = 0; column < max(p.D, p.Dv); column += threads) {  // weights again for every `threads` columns
      const long d = column + thread_index;
      float sum_k = 0.0f, sum_v = 0.0f;
      for (long head = key_head * heads; head < (key_head + 1) * heads; head++) {
        device const T* queries = at_head(q, p.q, batch, head);
        device const T* d_outs = at_head(d_out, p.d_out, batch, head);
        const long row_values = (batch * p.H + head) * p.T;
        for (int begin = seen.lo; begin < seen.hi; begin += threads) {
          const int count = min(int(threads), seen.hi - begin);
          threadgroup_barrier(mem_flags::mem_threadgroup);  // the last weights have been read
          for (int n = simdgroup; n < count; n += simdgroups) {
            const long i = begin + n;
            const float score = dot_product(queries + i * p.q.row, p.q.dim, key, p.k.dim, p.D, lane);
            const float dp = dot_product(d_outs + i * p.d_out.row, p.d_out.dim, value, p.v.dim, p.Dv, lane);
            const Weight w = weight_of(score, dp, lse[row_values + i], delta[row_values + i], p);
            if (lane == 0) {
              weights[n] = w.p;
              gradients[n] = w.ds;
            }
          }
          threadgroup_barrier(mem_flags::mem_threadgroup);
          for (int n = 0; n < count; n++) {
            const long i = begin + n;
            if (d < p.D) sum_k += gradients[n] * float(queries[i * p.q.row + d * p.q.dim]);
            if (d < p.Dv) sum_v += weights[n] * float(d_outs[i * p.d_out.row + d * p.d_out.dim]);
          }
        }
      }
      if (p.need_k && d < p.D) d_k[item * p.D + d] = T(sum_k);
      if (p.need_v && d < p.Dv) d_v[item * p.Dv + d] = T(sum_v);
    }
  }
}

#define INSTANTIATE(NAME, T)                                                                                       \
  template [[host_name("attention_rows_fwd_" NAME)]] [[kernel]] decltype(attention_rows_fwd<T>)                    \
      attention_rows_fwd<T>;                                                                                       \
  template [[host_name("attention_delta_" NAME)]] [[kernel]] decltype(attention_delta<T>) attention_delta<T>;      \
  template [[host_name("attention_rows_dq_" NAME)]] [[kernel]] decltype(attention_rows_dq<T>) attention_rows_dq<T>; \
  template [[host_name("attention_rows_dkdv_" NAME)]] [[kernel]] decltype(attention_rows_dkdv<T>)                  \
      attention_rows_dkdv<T>;

INSTANTIATE("f32", float)
INSTANTIATE("f16", half)
INSTANTIATE("bf16", bfloat)
