// Attention forward on simdgroup matrices: riftco/kernels/attention/spec.py says what it means. A threadgroup owns 32
// query rows of a head, each of its simdgroups 8, and walks the keys that they see: online softmax in float32.
#include <metal_stdlib>
using namespace metal;
#include "attention_tiles.h"

template <typename T, int DMAX>
[[kernel]] void attention_fwd(
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
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int BQ = 32, BK = DMAX * sizeof(T) >= LONG_ROW ? 16 : 32;
  threadgroup T q_tile[BQ * DMAX];
  threadgroup T kv_tile[BK * DMAX];  // keys, then values
  threadgroup float scores[4 * 8 * BK];
  threadgroup float diagonals[4 * 64];
  threadgroup float* my_scores = scores + simdgroup * 8 * BK;
  threadgroup float* diagonal = diagonals + simdgroup * 64;
  const Documents documents = {cu_q, cu_k, k_lens};
  const int D = p.D, blocks = (D + 7) / 8, tiles = (p.T + BQ - 1) / BQ;
  const int my_row = simdgroup * 8 + lane / 4, my_column = lane % 4;  // four lanes share a row's softmax
  for (long item = group; item < p.B * p.H * tiles; item += groups) {
    const int first = (tiles - 1 - item % tiles) * BQ;  // causal tiles see more the later they are: these first
    const long batch = item / tiles / p.H, head = item / tiles % p.H, key_head = head / (p.H / p.K);
    device const T* keys = at_head(k, p.k, batch, key_head);
    device const T* values = at_head(v, p.v, batch, key_head);
    const Range all = united(keys_of(first + lane, documents, batch, p));
    const Range sees = keys_of(first + my_row, documents, batch, p);
    const Range ours = united(sees);
    // the last tile's rows have been read before its last barrier
    stage<T, BQ, DMAX>(q_tile, at_head(q, p.q, batch, head), p.q, first, {0, int(p.T)}, D, thread_index);
    float largest = -INFINITY, total = 0.0f;
    if (p.has_sinks && sees.hi >= 0) {  // one more score, without a value
      largest = sinks[head];
      total = largest > -INFINITY ? 1.0f : 0.0f;
    }
    simdgroup_float8x8 sums[DMAX / 8];
    UNROLLED for (int d = 0; d < DMAX / 8; d++) sums[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int begin = all.lo; begin < all.hi; begin += BK) {
      const bool needed = begin < ours.hi && begin + BK > ours.lo;  // the same for all lanes of a simdgroup
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the last values have been read
      stage<T, BK, DMAX>(kv_tile, keys, p.k, begin, {begin, all.hi}, D, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (needed) {
        simdgroup_float8x8 s[BK / 8];
        UNROLLED for (int n = 0; n < BK / 8; n++) s[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        for (int d = 0; d < blocks; d++) {
          simdgroup_matrix<T, 8, 8> left, right;
          simdgroup_load(left, q_tile + simdgroup * 8 * DMAX + d * 8, DMAX);
          UNROLLED for (int n = 0; n < BK / 8; n++) {
            simdgroup_load(right, kv_tile + n * 8 * DMAX + d * 8, DMAX, ulong2(0, 0), true);
            simdgroup_multiply_accumulate(s[n], left, right, s[n]);
          }
        }
        UNROLLED for (int n = 0; n < BK / 8; n++) simdgroup_store(s[n], my_scores + n * 8, BK);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        threadgroup float* row = my_scores + (lane / 4) * BK + my_column;
        float x[BK / 4], top = largest;
        UNROLLED for (int c = 0; c < BK / 4; c++) {
          const int j = begin + my_column + 4 * c;
          x[c] = j >= sees.lo && j < sees.hi ? capped(row[4 * c], p) : -INFINITY;
          top = nan_max(top, x[c]);
        }
        top = nan_max(top, simd_shuffle_xor(top, 1));
        top = nan_max(top, simd_shuffle_xor(top, 2));
        // NaN and inf are set aside until the end: in the products below they would reach the tile's other rows
        const bool finite = top < INFINITY;
        float shrink = 1.0f, part = 0.0f;  // before the first score there is nothing to shrink
        if (largest != -INFINITY) shrink = finite ? precise::exp(largest - shift(top)) : 0.0f;
        UNROLLED for (int c = 0; c < BK / 4; c++) {
          const float weight = finite ? precise::exp(x[c] - shift(top)) : 0.0f;
          row[4 * c] = weight;
          part += weight;
        }
        part += simd_shuffle_xor(part, 1);
        part += simd_shuffle_xor(part, 2);
        total = total * shrink + part;
        largest = top;
        for (int c = 2 * my_column; c < 2 * my_column + 2; c++)
          diagonal[lane / 4 * 8 + c] = c == int(lane / 4) ? shrink : 0.0f;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (simd_any(shrink != 1.0f)) {
          simdgroup_float8x8 by_row;
          simdgroup_load(by_row, diagonal, 8);
          UNROLLED for (int d = 0; d < DMAX / 8; d++)
            if (d < blocks) simdgroup_multiply(sums[d], by_row, sums[d]);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the keys have been read
      stage<T, BK, DMAX>(kv_tile, values, p.v, begin, {begin, all.hi}, D, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (needed) {
        UNROLLED for (int n = 0; n < BK / 8; n++) {
          simdgroup_float8x8 weights;
          simdgroup_load(weights, my_scores + n * 8, BK);
          UNROLLED for (int d = 0; d < DMAX / 8; d++) {
            if (d >= blocks) continue;
            simdgroup_matrix<T, 8, 8> right;
            simdgroup_load(right, kv_tile + n * 8 * DMAX + d * 8, DMAX);
            simdgroup_multiply_accumulate(sums[d], weights, right, sums[d]);
          }
        }
      }
    }
    const bool finite = largest < INFINITY;
    const float factor = !finite ? NAN : total > 0.0f ? 1.0f / total : 0.0f;
    const int row = first + simdgroup * 8;
    device T* out_rows = out + (batch * p.T * p.H + head) * D;
    simdgroup_barrier(mem_flags::mem_threadgroup);  // my_scores is scratch from here on
    UNROLLED for (int d = 0; d < DMAX / 8; d++)
      if (d < blocks) store_sums(sums[d], my_scores, out_rows, p.H * D, row, p.T, d * 8, D, factor, lane);
    if (my_column == 0 && first + my_row < p.T)
      lse[(batch * p.H + head) * p.T + first + my_row] =
          !finite ? largest : total > 0.0f ? largest + precise::log(total) : -INFINITY;
  }
}

#define INSTANTIATE(DMAX, NAME, T)                                                                    \
  template [[host_name("attention_fwd_" #DMAX "_" NAME)]] [[kernel]] decltype(attention_fwd<T, DMAX>) \
      attention_fwd<T, DMAX>;

INSTANTIATE(64, "f32", float)
INSTANTIATE(128, "f32", float)
INSTANTIATE(64, "f16", half)
INSTANTIATE(128, "f16", half)
INSTANTIATE(256, "f16", half)
INSTANTIATE(64, "bf16", bfloat)
INSTANTIATE(128, "bf16", bfloat)
INSTANTIATE(256, "bf16", bfloat)
