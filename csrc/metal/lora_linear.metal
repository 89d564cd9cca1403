// The products of LoRA adapters: riftco/kernels/lora_linear/spec.py says what they mean. One kernel reads rows of x or
// d_y, as they lie or by a list of them, against a small matrix; the other adds a product to such rows.
#include <metal_stdlib>
using namespace metal;
#include "common.h"
#include "matmul.h"

struct ProductParams {  // as riftco/metal/lora_linear.py packs it
  Rows left;
  long left_stride;
  long right_k;
  long right_j;
  long out_i;
  long out_j;
  long I;
  long J;
  long K;
  long has_rows;
  long reduced;  // the sum runs over the rows of `left`, not along them
  float scale;
};

template <typename T, typename D>
struct Lines {  // rows of x or d_y
  device const T* data;
  device const long* rows;
  constant ProductParams* p;
  bool k_fast;
  inline D operator()(long i, long k) const {
    const long n = p->reduced ? k : i, c = p->reduced ? i : k;
    return D(float(data[row_offset(p->left, p->has_rows ? rows[n] : n) + c * p->left_stride]));
  }
};

template <typename D>
struct Matrix {
  device const D* data;
  long stride_0;
  long stride_1;
  bool k_fast;
  inline D operator()(long a, long b) const { return data[a * stride_0 + b * stride_1]; }
};

// out[i, j] = scale * the sum over k of left(i, k) right(k, j).
template <typename T, typename D, typename Out>
[[kernel]] void lora_product(
    device Out* out [[buffer(0)]],
    device const T* left [[buffer(1)]],
    device const D* right [[buffer(2)]],
    device const long* rows [[buffer(3)]],
    constant ProductParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup D a_tile[TILE * PITCH];
  threadgroup D b_tile[TILE * PITCH];
  threadgroup float sums[TILE * TILE];
  const Lines<T, D> a = {left, rows, &p, !p.reduced};
  const Matrix<D> b = {right, p.right_k, p.right_j, p.right_k == 1};
  const long tiles_i = (p.I + TILE - 1) / TILE, tiles = tiles_i * ((p.J + TILE - 1) / TILE);
  for (long tile = group; tile < tiles; tile += groups) {
    const long i0 = tile % tiles_i * TILE, j0 = tile / tiles_i * TILE;
    product_tile<D>(a, b, i0, j0, p.I, p.J, p.K, a_tile, b_tile, sums, thread_index, simdgroup);
    for (uint e = thread_index; e < TILE * TILE; e += TILE_THREADS) {
      const long i = i0 + e / TILE, j = j0 + e % TILE;
      if (i < p.I && j < p.J) out[i * p.out_i + j * p.out_j] = Out(p.scale * sums[e]);
    }
  }
}

// out[row(i), j] += scale * the sum over k of left[i, k] right(k, j); every row is there once.
template <typename T, typename D>
[[kernel]] void lora_add(
    device T* out [[buffer(0)]],
    device const D* left [[buffer(1)]],
    device const D* right [[buffer(2)]],
    device const long* rows [[buffer(3)]],
    constant ProductParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup D a_tile[TILE * PITCH];
  threadgroup D b_tile[TILE * PITCH];
  threadgroup float sums[TILE * TILE];
  const Matrix<D> a = {left, p.left.stride_inner, p.left_stride, true};
  const Matrix<D> b = {right, p.right_k, p.right_j, p.right_k == 1};
  const long tiles_i = (p.I + TILE - 1) / TILE, tiles = tiles_i * ((p.J + TILE - 1) / TILE);
  for (long tile = group; tile < tiles; tile += groups) {
    const long i0 = tile % tiles_i * TILE, j0 = tile / tiles_i * TILE;
    product_tile<D>(a, b, i0, j0, p.I, p.J, p.K, a_tile, b_tile, sums, thread_index, simdgroup);
    for (uint e = thread_index; e < TILE * TILE; e += TILE_THREADS) {
      const long i = i0 + e / TILE, j = j0 + e % TILE;
      if (i >= p.I || j >= p.J) continue;
      device T* to = out + (p.has_rows ? rows[i] : i) * p.out_i + j;
      *to = T(float(*to) + p.scale * sums[e]);
    }
  }
}

#define INSTANTIATE(NAME, T, D, Out)                                                                                 \
  template [[host_name("lora_linear_product_" NAME)]] [[kernel]] decltype(lora_product<T, D, Out>) lora_product<T, D, Out>;
#define INSTANTIATE_ADD(NAME, T, D)                                                                                  \
  template [[host_name("lora_linear_add_" NAME)]] [[kernel]] decltype(lora_add<T, D>) lora_add<T, D>;

INSTANTIATE("f32_f32_f32", float, float, float)
INSTANTIATE("f16_f16_f16", half, half, half)
INSTANTIATE("f16_f16_f32", half, half, float)
INSTANTIATE("f16_f32_f32", half, float, float)
INSTANTIATE("bf16_bf16_bf16", bfloat, bfloat, bfloat)
INSTANTIATE("bf16_bf16_f32", bfloat, bfloat, float)
INSTANTIATE("bf16_f32_f32", bfloat, float, float)
INSTANTIATE_ADD("f32_f32", float, float)
INSTANTIATE_ADD("f16_f16", half, half)
INSTANTIATE_ADD("f16_f32", half, float)
INSTANTIATE_ADD("bf16_bf16", bfloat, bfloat)
INSTANTIATE_ADD("bf16_f32", bfloat, float)
