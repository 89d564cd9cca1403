// Products with a frozen quantised weight W [N, K], for any format that can decode one element; the format's .metal
// file instantiates them. W's values are rounded to T before they are multiplied, as a dequantised weight's would be.
#pragma once
#include "common.h"
#include "matmul.h"

struct QuantizedParams {  // as riftco/metal/_quantized.py packs it
  Rows x;                 // the rows that are multiplied
  long stride_k;
  long M;
  long N;
  long K;
  long block;  // what the format makes of it
  long has_bias;
};

#define GEMV_ROWS 8  // rows of x for which a product reads each element of W once and keeps no tile

template <typename T>
struct RowsOperand {
  device const T* x;
  constant Rows* rows;
  long stride;
  bool k_fast;
  inline T operator()(long m, long k) const { return x[row_offset(*rows, m) + k * stride]; }
};

// W^T [K, N], and W [N, K] whose reduced index is n.
template <typename T, typename Format>
struct Transposed {
  Format w;
  bool k_fast;
  inline T operator()(long k, long n) const { return T(w(n, k)); }
};
template <typename T, typename Format>
struct Straight {
  Format w;
  bool k_fast;
  inline T operator()(long n, long k) const { return T(w(n, k)); }
};

// y[m, n] = sum of x[m, k] W[n, k], for at most GEMV_ROWS rows: a simdgroup takes one n at a time.
template <typename T, typename Format>
[[kernel]] void quantized_gemv(
    device T* y [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device const uchar* data [[buffer(2)]],
    device const float* scales [[buffer(3)]],
    device const T* bias [[buffer(4)]],
    constant QuantizedParams& p [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint lanes [[threads_per_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const Format w = {data, scales, p.K, p.block};
  for (long n = long(group) * simdgroups + simdgroup; n < p.N; n += long(groups) * simdgroups) {
    float sum[GEMV_ROWS];
    for (uint m = 0; m < GEMV_ROWS; m++) sum[m] = 0.0f;
    for (long k = lane; k < p.K; k += lanes) {
      const float value = float(T(w(n, k)));
      for (uint m = 0; m < GEMV_ROWS; m++)
        if (m < p.M) sum[m] += float(x[row_offset(p.x, m) + k * p.stride_k]) * value;
    }
    for (uint m = 0; m < GEMV_ROWS; m++) {
      const float total = simd_sum(sum[m]) + (p.has_bias ? float(bias[n]) : 0.0f);
      if (lane == 0 && m < p.M) y[m * p.N + n] = T(total);
    }
  }
}

// y = x W^T + bias, a tile of y at a time.
template <typename T, typename Format>
[[kernel]] void quantized_gemm(
    device T* y [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device const uchar* data [[buffer(2)]],
    device const float* scales [[buffer(3)]],
    device const T* bias [[buffer(4)]],
    constant QuantizedParams& p [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup T left[TILE * PITCH];
  threadgroup T right[TILE * PITCH];
  threadgroup float out[TILE * TILE];
  const RowsOperand<T> a = {x, &p.x, p.stride_k, p.stride_k == 1};
  const Transposed<T, Format> b = {{data, scales, p.K, p.block}, true};
  const long tiles_m = (p.M + TILE - 1) / TILE, tiles = tiles_m * ((p.N + TILE - 1) / TILE);
  for (long tile = group; tile < tiles; tile += groups) {
    const long m0 = tile % tiles_m * TILE, n0 = tile / tiles_m * TILE;
    product_tile<T>(a, b, m0, n0, p.M, p.N, p.K, left, right, out, thread_index, simdgroup);
    for (uint e = thread_index; e < TILE * TILE; e += TILE_THREADS) {
      const long m = m0 + e / TILE, n = n0 + e % TILE;
      if (m < p.M && n < p.N) y[m * p.N + n] = T(out[e] + (p.has_bias ? float(bias[n]) : 0.0f));
    }
  }
}

// d_x = d_y W, a tile of d_x at a time.
template <typename T, typename Format>
[[kernel]] void quantized_gemm_dx(
    device T* d_x [[buffer(0)]],
    device const T* d_y [[buffer(1)]],
    device const uchar* data [[buffer(2)]],
    device const float* scales [[buffer(3)]],
    constant QuantizedParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup T left[TILE * PITCH];
  threadgroup T right[TILE * PITCH];
  threadgroup float out[TILE * TILE];
  const RowsOperand<T> a = {d_y, &p.x, p.stride_k, p.stride_k == 1};
  const Straight<T, Format> b = {{data, scales, p.K, p.block}, false};
  const long tiles_m = (p.M + TILE - 1) / TILE, tiles = tiles_m * ((p.K + TILE - 1) / TILE);
  for (long tile = group; tile < tiles; tile += groups) {
    const long m0 = tile % tiles_m * TILE, k0 = tile / tiles_m * TILE;
    product_tile<T>(a, b, m0, k0, p.M, p.K, p.N, left, right, out, thread_index, simdgroup);
    for (uint e = thread_index; e < TILE * TILE; e += TILE_THREADS) {
      const long m = m0 + e / TILE, k = k0 + e % TILE;
      if (m < p.M && k < p.K) d_x[m * p.K + k] = T(out[e]);
    }
  }
}

struct DequantizeParams {
  long N;
  long K;
  long block;
};

// out[n, k] = W[n, k]; a threadgroup takes stretches of the flattened weight.
template <typename T, typename Format>
[[kernel]] void dequantize(
    device T* out [[buffer(0)]],
    device const uchar* data [[buffer(1)]],
    device const float* scales [[buffer(2)]],
    constant DequantizeParams& p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  const Format w = {data, scales, p.K, p.block};
  for (long e = long(group) * threads + thread_index; e < p.N * p.K; e += long(groups) * threads)
    out[e] = T(w(e / p.K, e % p.K));
}

#define INSTANTIATE_QUANTIZED(NAME, DTYPE, T, Format)                                                                \
  template [[host_name(NAME "_gemv_" DTYPE)]] [[kernel]] decltype(quantized_gemv<T, Format>)                         \
      quantized_gemv<T, Format>;                                                                                     \
  template [[host_name(NAME "_gemm_" DTYPE)]] [[kernel]] decltype(quantized_gemm<T, Format>)                         \
      quantized_gemm<T, Format>;                                                                                     \
  template [[host_name(NAME "_gemm_dx_" DTYPE)]] [[kernel]] decltype(quantized_gemm_dx<T, Format>)                   \
      quantized_gemm_dx<T, Format>;                                                                                  \
  template [[host_name(NAME "_dequantize_" DTYPE)]] [[kernel]] decltype(dequantize<T, Format>) dequantize<T, Format>;
