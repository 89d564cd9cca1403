// Tiles of attention's matrix kernels: four simdgroups, operands in threadgroup memory in their own type, sums, scores
// and weights in float32.
#pragma once
#include "attention.h"

#define TILE_THREADS 128
// Bytes of a row from which only small tiles fit 32 KiB: head dim 256 in 16 bits. In float32 no tile fits at 256.
#define LONG_ROW 512

// Rows first, first + 1, .. of an operand as tile [ROWS, DMAX]; rows outside `there` and columns from D up to the next
// multiple of 8 are 0, columns beyond unwritten. Rows that are the tile's own may be of no document: what they hold,
// even NaN, stays in their scores, which masks replace. Rows walked over must exist, as 0 times NaN is NaN.
template <typename T, int ROWS, int DMAX>
inline void stage(threadgroup T* tile, device const T* from, constant Strides& strides, int first, Range there,
                  int D, uint thread_index) {
  for (int e = thread_index; e < ROWS * DMAX; e += TILE_THREADS) {
    const int d = e % DMAX, row = first + e / DMAX;
    if (d >= (D + 7) / 8 * 8) continue;
    const bool inside = d < D && row >= there.lo && row < there.hi;
    tile[e] = inside ? from[row * strides.row + d * strides.dim] : T(0.0f);
  }
}

// The least and last of the ranges of up to 32 rows, in every lane.
inline Range united(Range mine) {
  const bool some = mine.hi > mine.lo;
  const int last = simd_max(some ? mine.hi : 0);
  return {min(simd_min(some ? mine.lo : 0x7fffffff), last), last};
}

// 8x8 sums of a simdgroup -> out [.., D] in its type, through `scratch` of 64 floats. `row`: that of the sums' first;
// rows below `rows` exist. The caller's lanes hold `factor` of row lane / 4.
template <typename T>
inline void store_sums(simdgroup_float8x8 sums, threadgroup float* scratch, device T* out, long row_stride, int row,
                       int rows, int column, int D, float factor, uint lane) {
  simdgroup_store(sums, scratch, 8);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int d = 2 * (lane % 4); d < 2 * int(lane % 4) + 2; d++) {
    const int i = lane / 4;
    if (row + i < rows && column + d < D) out[(row + i) * row_stride + column + d] = T(scratch[i * 8 + d] * factor);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}
