// Attention over a cache, backward: riftco/kernels/cached_attention/spec.py says what it means. The scores are made again
// from lse; nothing is added atomically. A threadgroup owns a query row and up to four heads (dQ), or a new key (dK, dV).
#include <metal_stdlib>
using namespace metal;
#include "cached_attention.h"

// d_q, over every key. A threadgroup works as in the forward, on whole rows.
template <typename T, typename C>
[[kernel]] void cached_attention_dq(
    device T* d_q [[buffer(0)]],
    device const T* d_out [[buffer(1)]],
    device const T* q [[buffer(2)]],
    device const T* k [[buffer(3)]],
    device const T* v [[buffer(4)]],
    device const float* lse [[buffer(5)]],
    device const float* delta [[buffer(6)]],
    device const C* k_cache [[buffer(7)]],
    device const C* v_cache [[buffer(8)]],
    device const half* k_scale [[buffer(9)]],
    device const half* v_scale [[buffer(10)]],
    device const int* table [[buffer(11)]],
    device const int* slots [[buffer(12)]],
    device const int* positions [[buffer(13)]],
    device const int* cu_q [[buffer(14)]],
    device const int* cu_k [[buffer(15)]],
    constant CachedAttentionParams& p [[buffer(16)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float gradients[HEADS * THREADS];
  const long G = p.H / p.K, parts = (G + HEADS - 1) / HEADS;
  for (long item = group; item < p.T * p.K * parts; item += groups) {
    const long t = item / (p.K * parts), key_head = item / parts % p.K, part = item % parts;
    const long head = key_head * G + part * HEADS, heads = min(long(HEADS), G - part * HEADS);
    const Sight sees = sight_of(t, {slots, positions, cu_q, cu_k}, p);
    const long to = sees.prefix + sees.fresh;
    device const T* queries = q + t * p.q.row + head * p.q.head;
    device const T* d_outs = d_out + t * p.d_out.row + head * p.d_out.head;
    device const T* keys = k + sees.first_new * p.k.row + key_head * p.k.head;
    device const T* values = v + sees.first_new * p.v.row + key_head * p.v.head;
    for (long column = 0; column < p.D; column += THREADS * COLUMNS) {  // scores again for every so many columns
      float sum[HEADS][COLUMNS];
      UNROLLED for (int i = 0; i < HEADS * COLUMNS; i++) sum[i / COLUMNS][i % COLUMNS] = 0.0f;
      for (long begin = 0; begin < to; begin += THREADS) {
        const int count = min(long(THREADS), to - begin);
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the last gradients have been read
        for (int n = simdgroup; n < count; n += HEADS) {
          float score_of[HEADS] = {0.0f, 0.0f, 0.0f, 0.0f}, dp_of[HEADS] = {0.0f, 0.0f, 0.0f, 0.0f};
          const long at = begin + n, w = sees.first + at;
          const bool cached = at < sees.prefix;
          device const C* k_row = k_cache;
          device const C* v_row = v_cache;
          device const half* ks_row = k_scale;
          device const half* vs_row = v_scale;
          device const T* key = keys;
          device const T* value = values;
          if (cached) {
            k_row += cached_row(w, sees.slot, table, p.k_cache, p) + key_head * p.k_cache.head;
            v_row += cached_row(w, sees.slot, table, p.v_cache, p) + key_head * p.v_cache.head;
            if (sizeof(C) == 1) {
              ks_row += cached_row(w, sees.slot, table, p.k_scale, p) + key_head * p.k_scale.head;
              vs_row += cached_row(w, sees.slot, table, p.v_scale, p) + key_head * p.v_scale.head;
            }
          } else {
            key += (at - sees.prefix) * p.k.row;
            value += (at - sees.prefix) * p.v.row;
          }
          for (long d = lane; d < p.D; d += 32) {
            const float x = cached ? stored<C>(k_row, ks_row, d) : float(key[d * p.k.dim]);
            const float y = cached ? stored<C>(v_row, vs_row, d) : float(value[d * p.v.dim]);
            UNROLLED for (int h = 0; h < HEADS; h++) {
              if (h >= heads) continue;
              score_of[h] += float(queries[h * p.q.head + d * p.q.dim]) * x;
              dp_of[h] += float(d_outs[h * p.d_out.head + d * p.d_out.dim]) * y;
            }
          }
          UNROLLED for (int h = 0; h < HEADS; h++) {
            const float score = simd_sum(score_of[h]), dp = simd_sum(dp_of[h]);
            const long row = (head + min(long(h), heads - 1)) * p.T + t;
            if (lane == 0) gradients[h * THREADS + n] = weight_of(score, dp, lse[row], delta[row], p).ds;
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int n = 0; n < count; n++) {
          const long at = begin + n, w = sees.first + at;
          const bool cached = at < sees.prefix;
          device const C* row = k_cache;
          device const half* scale = k_scale;
          device const T* key = keys;
          if (cached) {
            row += cached_row(w, sees.slot, table, p.k_cache, p) + key_head * p.k_cache.head;
            if (sizeof(C) == 1) scale += cached_row(w, sees.slot, table, p.k_scale, p) + key_head * p.k_scale.head;
          } else {
            key += (at - sees.prefix) * p.k.row;
          }
          UNROLLED for (int c = 0; c < COLUMNS; c++) {
            const long d = column + c * THREADS + thread_index;
            if (d >= p.D) continue;
            const float x = cached ? stored<C>(row, scale, d) : float(key[d * p.k.dim]);
            UNROLLED for (int h = 0; h < HEADS; h++) sum[h][c] += gradients[h * THREADS + n] * x;
          }
        }
      }
      UNROLLED for (int h = 0; h < HEADS; h++) {
        if (h >= heads) continue;
        UNROLLED for (int c = 0; c < COLUMNS; c++) {
          const long d = column + c * THREADS + thread_index;
          if (d < p.D) d_q[(t * p.H + head + h) * p.D + d] = T(sum[h][c]);
        }
      }
    }
  }
}

// d_k and d_v of the new keys; the prefix is a constant. A threadgroup owns a key and walks the rows of its whole group.
template <typename T>
[[kernel]] void cached_attention_dkdv(
    device T* d_k [[buffer(0)]],
    device T* d_v [[buffer(1)]],
    device const T* d_out [[buffer(2)]],
    device const T* q [[buffer(3)]],
    device const T* k [[buffer(4)]],
    device const T* v [[buffer(5)]],
    device const float* lse [[buffer(6)]],
    device const float* delta [[buffer(7)]],
    device const int* slots [[buffer(8)]],
    device const int* positions [[buffer(9)]],
    device const int* cu_q [[buffer(10)]],
    device const int* cu_k [[buffer(11)]],
    constant CachedAttentionParams& p [[buffer(12)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float weights[THREADS];
  threadgroup float gradients[THREADS];
  const long G = p.H / p.K;
  for (long item = group; item < p.S * p.K; item += groups) {
    const long j = item / p.K, key_head = item % p.K;
    const Run run = run_of(j, true, {slots, positions, cu_q, cu_k}, p);
    // the run's row i sits where its new key i + keys - rows does
    const long place = j - run.first_key - run.keys + run.rows;
    const long from = max(place, long(0));
    const long end = p.left < 0 ? run.rows : min(run.rows, place + p.left + 1), to = run.live ? end : 0;
    device const T* key = k + j * p.k.row + key_head * p.k.head;
    device const T* value = v + j * p.v.row + key_head * p.v.head;
    for (long column = 0; column < p.D; column += THREADS) {  // weights again for every so many columns
      const long d = column + thread_index;
      float sum_k = 0.0f, sum_v = 0.0f;
      for (long head = key_head * G; head < (key_head + 1) * G; head++) {
        device const T* queries = q + run.first_row * p.q.row + head * p.q.head;
        device const T* d_outs = d_out + run.first_row * p.d_out.row + head * p.d_out.head;
        for (long begin = from; begin < to; begin += THREADS) {
          const int count = min(long(THREADS), to - begin);
          threadgroup_barrier(mem_flags::mem_threadgroup);  // the last weights have been read
          for (int n = simdgroup; n < count; n += THREADS / 32) {
            const long i = begin + n, row = head * p.T + run.first_row + i;
            float score = 0.0f, dp = 0.0f;
            for (long e = lane; e < p.D; e += 32) {
              score += float(queries[i * p.q.row + e * p.q.dim]) * float(key[e * p.k.dim]);
              dp += float(d_outs[i * p.d_out.row + e * p.d_out.dim]) * float(value[e * p.v.dim]);
            }
            const Weight w = weight_of(simd_sum(score), simd_sum(dp), lse[row], delta[row], p);
            if (lane == 0) {
              weights[n] = w.p;
              gradients[n] = w.ds;
            }
          }
          threadgroup_barrier(mem_flags::mem_threadgroup);
          for (int n = 0; n < count; n++) {
            if (d >= p.D) continue;
            const long i = begin + n;
            sum_k += gradients[n] * float(queries[i * p.q.row + d * p.q.dim]);
            sum_v += weights[n] * float(d_outs[i * p.d_out.row + d * p.d_out.dim]);
          }
        }
      }
      if (p.need_k && d < p.D) d_k[item * p.D + d] = T(sum_k);
      if (p.need_v && d < p.D) d_v[item * p.D + d] = T(sum_v);
    }
  }
}

#define INSTANTIATE(NAME, T, C) \
  template [[host_name("cached_attention_dq_" NAME)]] [[kernel]] decltype(cached_attention_dq<T, C>) cached_attention_dq<T, C>;
#define INSTANTIATE_NEW(NAME, T) \
  template [[host_name("cached_attention_dkdv_" NAME)]] [[kernel]] decltype(cached_attention_dkdv<T>) cached_attention_dkdv<T>;

INSTANTIATE("f32_f32", float, float)
INSTANTIATE("f32_f16", float, half)
INSTANTIATE("f32_bf16", float, bfloat)
INSTANTIATE("f32_i8", float, char)
INSTANTIATE("f16_f32", half, float)
INSTANTIATE("f16_f16", half, half)
INSTANTIATE("f16_bf16", half, bfloat)
INSTANTIATE("f16_i8", half, char)
INSTANTIATE("bf16_f32", bfloat, float)
INSTANTIATE("bf16_f16", bfloat, half)
INSTANTIATE("bf16_bf16", bfloat, bfloat)
INSTANTIATE("bf16_i8", bfloat, char)
INSTANTIATE_NEW("f32", float)
INSTANTIATE_NEW("f16", half)
INSTANTIATE_NEW("bf16", bfloat)
