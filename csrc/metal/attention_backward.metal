// Attention backward on simdgroup matrices: riftco/kernels/attention/spec.py says what it means. Two kernels: one owns
// query rows and walks keys (dQ), one owns keys and walks the query rows of its whole group of heads (dK and dV). Both
// make the scores again from lse; nothing is added atomically, so that results are equal between runs.
#include <metal_stdlib>
using namespace metal;
#include "attention_tiles.h"

// scores = Q K^T, then dO V^T, each [BQ, BK]: two simdgroups share each.
template <typename T, int DMAX, int BQ, int BK>
inline void products(threadgroup const T* q, threadgroup const T* d_out, threadgroup const T* k, threadgroup const T* v,
                     threadgroup float* scores, int blocks, uint simdgroup) {
  constexpr int ROWS = BQ > 8 ? BQ / 16 : 1, COLUMNS = BQ > 8 ? BK / 8 : BK / 16;  // 8x8 products of one simdgroup
  const int second = simdgroup % 2;
  const int row = BQ > 8 ? second * ROWS * 8 : 0, column = BQ > 8 ? 0 : second * COLUMNS * 8;
  threadgroup const T* a = (simdgroup < 2 ? q : d_out) + row * DMAX;
  threadgroup const T* b = (simdgroup < 2 ? k : v) + column * DMAX;
  threadgroup float* to = scores + (simdgroup < 2 ? 0 : BQ * BK) + row * BK + column;
  simdgroup_float8x8 sums[ROWS * COLUMNS];
  UNROLLED for (int i = 0; i < ROWS * COLUMNS; i++) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int d = 0; d < blocks; d++) {
    simdgroup_matrix<T, 8, 8> left[ROWS], right;
    UNROLLED for (int r = 0; r < ROWS; r++) simdgroup_load(left[r], a + r * 8 * DMAX + d * 8, DMAX);
    UNROLLED for (int c = 0; c < COLUMNS; c++) {
      simdgroup_load(right, b + c * 8 * DMAX + d * 8, DMAX, ulong2(0, 0), true);
      UNROLLED for (int r = 0; r < ROWS; r++)
        simdgroup_multiply_accumulate(sums[r * COLUMNS + c], left[r], right, sums[r * COLUMNS + c]);
    }
  }
  UNROLLED for (int i = 0; i < ROWS * COLUMNS; i++)
    simdgroup_store(sums[i], to + i / COLUMNS * 8 * BK + i % COLUMNS * 8, BK);
}

template <typename T, int DMAX>
[[kernel]] void attention_dq(
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
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr bool LONG = DMAX * sizeof(T) >= LONG_ROW;
  constexpr int BQ = LONG ? 16 : 32, BK = LONG ? 8 : 16, ROWS = BQ / 8, COLUMNS = DMAX / 32;
  threadgroup T q_tile[BQ * DMAX];
  threadgroup T d_out_tile[BQ * DMAX];
  threadgroup T k_tile[BK * DMAX];
  threadgroup T v_tile[BK * DMAX];
  threadgroup float scores[2 * BQ * BK];
  threadgroup int lo[BQ];
  threadgroup int hi[BQ];
  threadgroup float row_lse[BQ];
  threadgroup float row_delta[BQ];
  const Documents documents = {cu_q, cu_k, k_lens};
  const int D = p.D, blocks = (D + 7) / 8, tiles = (p.T + BQ - 1) / BQ;
  for (long item = group; item < p.B * p.H * tiles; item += groups) {
    const int first = (tiles - 1 - item % tiles) * BQ;
    const long batch = item / tiles / p.H, head = item / tiles % p.H, key_head = head / (p.H / p.K);
    const long row_values = (batch * p.H + head) * p.T;
    device const T* keys = at_head(k, p.k, batch, key_head);
    device const T* values = at_head(v, p.v, batch, key_head);
    const Range rows = {0, int(p.T)};
    Range mine = {0, -1};
    if (lane < BQ) mine = keys_of(first + lane, documents, batch, p);
    const Range all = united(mine);
    stage<T, BQ, DMAX>(q_tile, at_head(q, p.q, batch, head), p.q, first, rows, D, thread_index);
    stage<T, BQ, DMAX>(d_out_tile, at_head(d_out, p.d_out, batch, head), p.d_out, first, rows, D, thread_index);
    if (thread_index < BQ) {
      const bool there = first + thread_index < p.T;
      lo[thread_index] = mine.lo;
      hi[thread_index] = mine.hi;
      row_lse[thread_index] = there ? lse[row_values + first + thread_index] : 0.0f;
      row_delta[thread_index] = there ? delta[row_values + first + thread_index] : 0.0f;
    }
    simdgroup_float8x8 sums[ROWS * COLUMNS];  // columns simdgroup, simdgroup + 4, ..
    UNROLLED for (int i = 0; i < ROWS * COLUMNS; i++) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int begin = all.lo; begin < all.hi; begin += BK) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the last keys have been read
      stage<T, BK, DMAX>(k_tile, keys, p.k, begin, {begin, all.hi}, D, thread_index);
      stage<T, BK, DMAX>(v_tile, values, p.v, begin, {begin, all.hi}, D, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      products<T, DMAX, BQ, BK>(q_tile, d_out_tile, k_tile, v_tile, scores, blocks, simdgroup);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int e = thread_index; e < BQ * BK; e += TILE_THREADS) {
        const int r = e / BK, j = begin + e % BK;
        const bool sees = j >= lo[r] && j < hi[r];
        scores[e] = sees ? weight_of(scores[e], scores[BQ * BK + e], row_lse[r], row_delta[r], p).ds : 0.0f;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLLED for (int n = 0; n < BK / 8; n++) {
        simdgroup_float8x8 left[ROWS];
        UNROLLED for (int r = 0; r < ROWS; r++) simdgroup_load(left[r], scores + r * 8 * BK + n * 8, BK);
        UNROLLED for (int c = 0; c < COLUMNS; c++) {
          const int column = simdgroup + 4 * c;
          if (column >= blocks) continue;
          simdgroup_matrix<T, 8, 8> right;
          simdgroup_load(right, k_tile + n * 8 * DMAX + column * 8, DMAX);
          UNROLLED for (int r = 0; r < ROWS; r++)
            simdgroup_multiply_accumulate(sums[r * COLUMNS + c], left[r], right, sums[r * COLUMNS + c]);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // scores are scratch from here on
    device T* to = d_q + (batch * p.T * p.H + head) * D;
    UNROLLED for (int i = 0; i < ROWS * COLUMNS; i++) {
      const int column = simdgroup + 4 * (i % COLUMNS), row = first + i / COLUMNS * 8;
      if (column < blocks)
        store_sums(sums[i], scores + simdgroup * 64, to, p.H * D, row, p.T, column * 8, D, 1.0f, lane);
    }
  }
}

template <typename T, int DMAX>
[[kernel]] void attention_dkdv(
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
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr bool LONG = DMAX * sizeof(T) >= LONG_ROW;
  constexpr int BQ = LONG ? 8 : 16, BK = LONG ? 16 : 32, ROWS = BK / 8, COLUMNS = DMAX / 32;
  threadgroup T q_tile[BQ * DMAX];
  threadgroup T d_out_tile[BQ * DMAX];
  threadgroup T k_tile[BK * DMAX];
  threadgroup T v_tile[BK * DMAX];
  threadgroup float scores[2 * BQ * BK];
  threadgroup int lo[BK];
  threadgroup int hi[BK];
  threadgroup float row_lse[BQ];
  threadgroup float row_delta[BQ];
  const Documents documents = {cu_q, cu_k, k_lens};
  const int D = p.D, blocks = (D + 7) / 8, wanted = p.S - p.kv_grad_start, tiles = (wanted + BK - 1) / BK;
  const long heads = p.H / p.K;
  for (long item = group; item < p.B * p.K * tiles; item += groups) {
    const int first = p.kv_grad_start + item % tiles * BK;
    const long batch = item / tiles / p.K, key_head = item / tiles % p.K;
    Range mine = {0, -1};
    if (lane < BK) mine = rows_of(first + lane, documents, batch, p);
    const Range all = united(mine);
    const Range there = {0, int(p.S)};
    stage<T, BK, DMAX>(k_tile, at_head(k, p.k, batch, key_head), p.k, first, there, D, thread_index);
    stage<T, BK, DMAX>(v_tile, at_head(v, p.v, batch, key_head), p.v, first, there, D, thread_index);
    if (thread_index < BK) {
      lo[thread_index] = mine.lo;
      hi[thread_index] = mine.hi;
    }
    simdgroup_float8x8 sums_k[ROWS * COLUMNS], sums_v[ROWS * COLUMNS];  // columns simdgroup, simdgroup + 4, ..
    UNROLLED for (int i = 0; i < ROWS * COLUMNS; i++) {
      sums_k[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      sums_v[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (long head = key_head * heads; head < (key_head + 1) * heads; head++) {
      device const T* queries = at_head(q, p.q, batch, head);
      device const T* d_outs = at_head(d_out, p.d_out, batch, head);
      const long row_values = (batch * p.H + head) * p.T;
      for (int begin = all.lo; begin < all.hi; begin += BQ) {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the last rows have been read
        stage<T, BQ, DMAX>(q_tile, queries, p.q, begin, {begin, all.hi}, D, thread_index);
        stage<T, BQ, DMAX>(d_out_tile, d_outs, p.d_out, begin, {begin, all.hi}, D, thread_index);
        if (thread_index < BQ) {
          const int i = begin + thread_index;
          row_lse[thread_index] = i < all.hi ? lse[row_values + i] : 0.0f;
          row_delta[thread_index] = i < all.hi ? delta[row_values + i] : 0.0f;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        products<T, DMAX, BQ, BK>(q_tile, d_out_tile, k_tile, v_tile, scores, blocks, simdgroup);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int e = thread_index; e < BQ * BK; e += TILE_THREADS) {
          const int r = e / BK, i = begin + r, j = e % BK;
          Weight w = {0.0f, 0.0f};
          if (i >= lo[j] && i < hi[j]) w = weight_of(scores[e], scores[BQ * BK + e], row_lse[r], row_delta[r], p);
          scores[e] = w.p;
          scores[BQ * BK + e] = w.ds;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        UNROLLED for (int r = 0; r < BQ / 8; r++) {
          simdgroup_float8x8 weights[ROWS], gradients[ROWS];  // transposed: [keys, query rows]
          UNROLLED for (int n = 0; n < ROWS; n++) {
            simdgroup_load(weights[n], scores + r * 8 * BK + n * 8, BK, ulong2(0, 0), true);
            simdgroup_load(gradients[n], scores + BQ * BK + r * 8 * BK + n * 8, BK, ulong2(0, 0), true);
          }
          UNROLLED for (int c = 0; c < COLUMNS; c++) {
            const int column = simdgroup + 4 * c;
            if (column >= blocks) continue;
            simdgroup_matrix<T, 8, 8> right;
            simdgroup_load(right, d_out_tile + r * 8 * DMAX + column * 8, DMAX);
            UNROLLED for (int n = 0; n < ROWS; n++)
              simdgroup_multiply_accumulate(sums_v[n * COLUMNS + c], weights[n], right, sums_v[n * COLUMNS + c]);
            simdgroup_load(right, q_tile + r * 8 * DMAX + column * 8, DMAX);
            UNROLLED for (int n = 0; n < ROWS; n++)
              simdgroup_multiply_accumulate(sums_k[n * COLUMNS + c], gradients[n], right, sums_k[n * COLUMNS + c]);
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // scores are scratch from here on
    const long to = (batch * wanted * p.K + key_head) * D;
    UNROLLED for (int i = 0; i < ROWS * COLUMNS; i++) {
      const int column = simdgroup + 4 * (i % COLUMNS), row = first - p.kv_grad_start + i / COLUMNS * 8;
      if (column >= blocks) continue;
      threadgroup float* scratch = scores + simdgroup * 64;
      if (p.need_k) store_sums(sums_k[i], scratch, d_k + to, p.K * D, row, wanted, column * 8, D, 1.0f, lane);
      if (p.need_v) store_sums(sums_v[i], scratch, d_v + to, p.K * D, row, wanted, column * 8, D, 1.0f, lane);
    }
  }
}

#define INSTANTIATE(DMAX, NAME, T)                                                                      \
  template [[host_name("attention_dq_" #DMAX "_" NAME)]] [[kernel]] decltype(attention_dq<T, DMAX>)     \
      attention_dq<T, DMAX>;                                                                            \
  template [[host_name("attention_dkdv_" #DMAX "_" NAME)]] [[kernel]] decltype(attention_dkdv<T, DMAX>) \
      attention_dkdv<T, DMAX>;

INSTANTIATE(64, "f32", float)
INSTANTIATE(128, "f32", float)
INSTANTIATE(64, "f16", half)
INSTANTIATE(128, "f16", half)
INSTANTIATE(256, "f16", half)
INSTANTIATE(64, "bf16", bfloat)
INSTANTIATE(128, "bf16", bfloat)
INSTANTIATE(256, "bf16", bfloat)
