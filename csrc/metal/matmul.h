// Tiles of a matrix product on simdgroup matrices, with operands that say how an element is read: from memory, through
// a list of rows, or decoded from a quantised block. A threadgroup of TILE_THREADS makes one tile at a time.
#pragma once
#include <metal_simdgroup_matrix>

#define TILE 32            // rows, columns and depth
#define PITCH 36           // elements from one row of an operand's tile to the next: no two rows start in one bank
#define TILE_THREADS 128   // four simdgroups, each with a quadrant of 16 x 16

// out[i][j] = sum over k of a(m0 + i, k) * b(k, n0 + j) for all threads to read. a and b give T; `k_fast` says that an
// operand lies with k as its fastest index, so that neighbouring threads read neighbouring elements. K > 0: its barriers
// are what lets the next tile use `out` again.
template <typename T, typename A, typename B>
inline void product_tile(
    A a, B b, long m0, long n0, long M, long N, long K, threadgroup T* left, threadgroup T* right,
    threadgroup float* out, uint thread_index, uint simdgroup) {
  const uint row = simdgroup / 2 * 16, column = simdgroup % 2 * 16;
  simdgroup_float8x8 sum[2][2];
  for (uint i = 0; i < 2; i++)
    for (uint j = 0; j < 2; j++) sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (long k0 = 0; k0 < K; k0 += TILE) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last step's tiles have been read
    for (uint e = thread_index; e < TILE * TILE; e += TILE_THREADS) {
      const uint slow = e / TILE, fast = e % TILE;
      const uint i = a.k_fast ? slow : fast, k = a.k_fast ? fast : slow;
      left[i * PITCH + k] = m0 + i < M && k0 + k < K ? a(m0 + i, k0 + k) : T(0.0f);
    }
    for (uint e = thread_index; e < TILE * TILE; e += TILE_THREADS) {
      const uint slow = e / TILE, fast = e % TILE;
      const uint j = b.k_fast ? slow : fast, k = b.k_fast ? fast : slow;
      right[k * PITCH + j] = n0 + j < N && k0 + k < K ? b(k0 + k, n0 + j) : T(0.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = 0; k < TILE; k += 8) {
      simdgroup_matrix<T, 8, 8> x[2], y[2];
      for (uint i = 0; i < 2; i++) {
        simdgroup_load(x[i], left + (row + 8 * i) * PITCH + k, PITCH);
        simdgroup_load(y[i], right + k * PITCH + column + 8 * i, PITCH);
      }
      for (uint i = 0; i < 2; i++)
        for (uint j = 0; j < 2; j++) simdgroup_multiply_accumulate(sum[i][j], x[i], y[j], sum[i][j]);
    }
  }
  for (uint i = 0; i < 2; i++)
    for (uint j = 0; j < 2; j++) simdgroup_store(sum[i][j], out + (row + 8 * i) * TILE + column + 8 * j, TILE);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
