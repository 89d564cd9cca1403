// Attention of new rows over a cache: riftco/kernels/cached_attention/spec.py says what it means. A threadgroup owns a
// query row and up to four heads that read one key head: each cached row is read and dequantised once for them. Where
// decoding leaves a GPU idle the keys are cut into pieces: piece 0 the run's new keys, the others a part of the prefix
// each, joined by a second kernel.
#include <metal_stdlib>
using namespace metal;
#include "cached_attention.h"

template <typename T, typename C>
[[kernel]] void cached_attention_fwd(
    device T* out [[buffer(0)]],
    device float* lse [[buffer(1)]],
    device float* sums [[buffer(2)]],
    device float* totals [[buffer(3)]],
    device const T* q [[buffer(4)]],
    device const T* k [[buffer(5)]],
    device const T* v [[buffer(6)]],
    device const C* k_cache [[buffer(7)]],
    device const C* v_cache [[buffer(8)]],
    device const half* k_scale [[buffer(9)]],
    device const half* v_scale [[buffer(10)]],
    device const int* table [[buffer(11)]],
    device const int* slots [[buffer(12)]],
    device const int* positions [[buffer(13)]],
    device const int* cu_q [[buffer(14)]],
    device const int* cu_k [[buffer(15)]],
    device const float* sinks [[buffer(16)]],
    constant CachedAttentionParams& p [[buffer(17)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float scores[HEADS * THREADS];
  threadgroup float shrinks[HEADS];
  threadgroup float sums_of_weights[HEADS];
  const long G = p.H / p.K, parts = (G + HEADS - 1) / HEADS;
  for (long item = group; item < p.pieces * p.T * p.K * parts; item += groups) {
    const long piece = item % p.pieces, t = item / p.pieces / (p.K * parts);
    const long key_head = item / p.pieces / parts % p.K, part = item / p.pieces % parts;
    const long head = key_head * G + part * HEADS, heads = min(long(HEADS), G - part * HEADS);
    const Sight sees = sight_of(t, {slots, positions, cu_q, cu_k}, p);
    // keys are counted through the prefix into the new ones
    long from = 0, to = sees.prefix + sees.fresh;
    if (p.pieces > 1) {
      from = piece == 0 ? sees.prefix : (piece - 1) * p.chunk;
      if (piece > 0) to = min(sees.prefix, piece * p.chunk);
    }
    const long mine = head + min(long(simdgroup), heads - 1);  // the head whose softmax this simdgroup makes
    device const T* queries = q + t * p.q.row + head * p.q.head;
    device const T* keys = k + sees.first_new * p.k.row + key_head * p.k.head;
    device const T* values = v + sees.first_new * p.v.row + key_head * p.v.head;
    for (long column = 0; column < p.D; column += THREADS * COLUMNS) {  // scores again for every so many columns
      float sum[HEADS][COLUMNS];
      UNROLLED for (int i = 0; i < HEADS * COLUMNS; i++) sum[i / COLUMNS][i % COLUMNS] = 0.0f;
      float largest = -INFINITY, total = 0.0f;
      if (p.has_sinks && sees.live && piece == 0) {  // one more score, without a value
        largest = sinks[mine];
        total = largest > -INFINITY ? 1.0f : 0.0f;
      }
      for (long begin = from; begin < to; begin += THREADS) {
        const int count = min(long(THREADS), to - begin);
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the last weights have been read
        for (int n = simdgroup; n < count; n += HEADS) {
          float part_of[HEADS] = {0.0f, 0.0f, 0.0f, 0.0f};
          const long at = begin + n;
          const bool cached = at < sees.prefix;
          const long w = sees.first + at;
          device const C* row = k_cache;
          device const half* scale = k_scale;
          device const T* key = keys;
          if (cached) {
            row += cached_row(w, sees.slot, table, p.k_cache, p) + key_head * p.k_cache.head;
            if (sizeof(C) == 1) scale += cached_row(w, sees.slot, table, p.k_scale, p) + key_head * p.k_scale.head;
          } else {
            key += (at - sees.prefix) * p.k.row;
          }
          for (long d = lane; d < p.D; d += 32) {
            const float x = cached ? stored<C>(row, scale, d) : float(key[d * p.k.dim]);
            UNROLLED for (int h = 0; h < HEADS; h++)
              if (h < heads) part_of[h] += float(queries[h * p.q.head + d * p.q.dim]) * x;
          }
          UNROLLED for (int h = 0; h < HEADS; h++) {
            const float score = capped(simd_sum(part_of[h]), p);
            if (lane == 0) scores[h * THREADS + n] = score;
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        threadgroup float* mine_scores = scores + simdgroup * THREADS;
        float top = largest, weights = 0.0f;
        for (int n = lane; n < count; n += 32) top = max(top, mine_scores[n]);
        top = simd_max(top);
        for (int n = lane; n < count; n += 32) {
          const float weight = precise::exp(mine_scores[n] - shift(top));
          mine_scores[n] = weight;
          weights += weight;
        }
        const float shrink = precise::exp(largest - shift(top));
        total = total * shrink + simd_sum(weights);
        largest = top;
        if (lane == 0) {
          shrinks[simdgroup] = shrink;
          sums_of_weights[simdgroup] = total;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        UNROLLED for (int i = 0; i < HEADS * COLUMNS; i++) sum[i / COLUMNS][i % COLUMNS] *= shrinks[i / COLUMNS];
        for (int n = 0; n < count; n++) {
          const long at = begin + n;
          const bool cached = at < sees.prefix;
          const long w = sees.first + at;
          device const C* row = v_cache;
          device const half* scale = v_scale;
          device const T* value = values;
          if (cached) {
            row += cached_row(w, sees.slot, table, p.v_cache, p) + key_head * p.v_cache.head;
            if (sizeof(C) == 1) scale += cached_row(w, sees.slot, table, p.v_scale, p) + key_head * p.v_scale.head;
          } else {
            value += (at - sees.prefix) * p.v.row;
          }
          UNROLLED for (int c = 0; c < COLUMNS; c++) {
            const long d = column + c * THREADS + thread_index;
            if (d >= p.D) continue;
            const float x = cached ? stored<C>(row, scale, d) : float(value[d * p.v.dim]);
            UNROLLED for (int h = 0; h < HEADS; h++) sum[h][c] += scores[h * THREADS + n] * x;
          }
        }
      }
      const bool whole = p.pieces == 1;
      UNROLLED for (int h = 0; h < HEADS; h++) {
        if (h >= heads) continue;
        // without keys the sums are 0 and nobody has written what the weights are divided by
        const float divisor = whole && from < to && sums_of_weights[h] != 0.0f ? sums_of_weights[h] : 1.0f;
        const long place = (piece * p.T + t) * p.H + head + h;  // of a whole row: t * H + head
        UNROLLED for (int c = 0; c < COLUMNS; c++) {
          const long d = column + c * THREADS + thread_index;
          if (d >= p.D) continue;
          const float x = sum[h][c] / divisor;
          if (whole) {
            out[place * p.D + d] = T(x);
          } else {
            sums[place * p.D + d] = x;
          }
        }
      }
      if (column == 0 && lane == 0 && long(simdgroup) < heads) {
        if (whole) {
          lse[mine * p.T + t] = total == 0.0f ? -INFINITY : shift(largest) + precise::log(total);
        } else {
          device float* pair = totals + ((piece * p.T + t) * p.H + mine) * 2;
          pair[0] = largest;
          pair[1] = total;
        }
      }
    }
  }
}

// The pieces of a row and head together. A threadgroup takes one.
template <typename T>
[[kernel]] void cached_attention_join(
    device T* out [[buffer(0)]],
    device float* lse [[buffer(1)]],
    device const float* sums [[buffer(2)]],
    device const float* totals [[buffer(3)]],
    constant CachedAttentionParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  for (long place = group; place < p.T * p.H; place += groups) {
    MaxSum all = {-INFINITY, 0.0f};
    for (long piece = 0; piece < p.pieces; piece++)
      all.largest = nan_max(all.largest, totals[(piece * p.T * p.H + place) * 2]);
    for (long piece = 0; piece < p.pieces; piece++) {
      device const float* pair = totals + (piece * p.T * p.H + place) * 2;
      all.sum += rescaled({pair[0], pair[1]}, all.largest).sum;
    }
    for (long d = thread_index; d < p.D; d += threads) {
      float sum = 0.0f;
      for (long piece = 0; piece < p.pieces; piece++) {
        const long at = piece * p.T * p.H + place;
        sum += sums[at * p.D + d] * precise::exp(totals[at * 2] - shift(all.largest));
      }
      out[place * p.D + d] = T(all.sum == 0.0f ? 0.0f : sum / all.sum);
    }
    if (thread_index == 0)
      lse[place % p.H * p.T + place / p.H] =
          all.sum == 0.0f ? -INFINITY : shift(all.largest) + precise::log(all.sum);
  }
}

#define INSTANTIATE(NAME, T, C) \
  template [[host_name("cached_attention_fwd_" NAME)]] [[kernel]] decltype(cached_attention_fwd<T, C>) cached_attention_fwd<T, C>;
#define INSTANTIATE_NEW(NAME, T) \
  template [[host_name("cached_attention_join_" NAME)]] [[kernel]] decltype(cached_attention_join<T>) cached_attention_join<T>;

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
