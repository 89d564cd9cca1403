// Normalisation of rows, with the mean taken off (layer_norm) or not (rms_norm); their .metal files instantiate it. A
// threadgroup works on one row at a time, in float32; a thread keeps to its columns, so that it reads back what it wrote.
#pragma once
#include "common.h"

struct NormForwardParams {  // as riftco/metal/_norm.py packs it
  Rows x;
  long stride_x;
  Rows residual;
  long stride_residual;
  long stride_weight;
  long stride_bias;
  long N;
  long C;
  long has_residual;
  long has_weight;
  long has_bias;
  float eps;
  float offset;
};

// y = z * rstd * (weight + offset) + bias with z = total - mean, total = x + residual rounded to T.
template <typename T, typename W, bool CENTRE>
[[kernel]] void norm_fwd(
    device T* y [[buffer(0)]],
    device T* total [[buffer(1)]],
    device float* mean [[buffer(2)]],
    device float* rstd [[buffer(3)]],
    device const T* x [[buffer(4)]],
    device const T* residual [[buffer(5)]],
    device const W* weight [[buffer(6)]],
    device const W* bias [[buffer(7)]],
    constant NormForwardParams& p [[buffer(8)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[32];
  threadgroup float rests[32];
  threadgroup float squares[32];
  for (long n = group; n < p.N; n += groups) {
    device const T* row = x + row_offset(p.x, n);
    device const T* other = residual + (p.has_residual ? row_offset(p.residual, n) : 0);
    device T* both = total + n * p.C;
    float sum = 0.0f;
    for (long c = thread_index; c < p.C; c += threads) {
      float value = float(row[c * p.stride_x]);
      if (p.has_residual) {
        both[c] = T(value + float(other[c * p.stride_residual]));
        value = float(both[c]);
      }
      sum += CENTRE ? value : value * value;
    }
    sum = threadgroup_sum(sum, sums, lane, simdgroup, simdgroups) / float(p.C);
    float centre = 0.0f;
    if (CENTRE) {
      centre = sum;
      float left = 0.0f, square = 0.0f;
      for (long c = thread_index; c < p.C; c += threads) {
        const float z = float(p.has_residual ? both[c] : row[c * p.stride_x]) - centre;
        left += z;
        square += z * z;
      }
      // what the first sum rounded away is put back: rows far from zero need it
      left = threadgroup_sum(left, rests, lane, simdgroup, simdgroups) / float(p.C);
      sum = threadgroup_sum(square, squares, lane, simdgroup, simdgroups) / float(p.C) - left * left;
      centre += left;
    }
    const float scale = 1.0f / precise::sqrt(sum + p.eps);
    for (long c = thread_index; c < p.C; c += threads) {
      float value = (float(p.has_residual ? both[c] : row[c * p.stride_x]) - centre) * scale;
      if (p.has_weight) value *= float(weight[c * p.stride_weight]) + p.offset;
      if (p.has_bias) value += float(bias[c * p.stride_bias]);
      y[n * p.C + c] = T(value);
    }
    if (thread_index == 0) {
      if (CENTRE) mean[n] = centre;
      rstd[n] = scale;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next row uses the arrays again
  }
}

struct NormBackwardParams {  // as riftco/metal/_norm.py packs it
  Rows d_y;
  long stride_d_y;
  Rows d_total;
  long stride_d_total;
  Rows x;
  long stride_x;
  long stride_weight;
  long N;
  long C;
  long has_d_total;
  long has_weight;
  long rows_each;  // of a share
  long shares;
  float offset;
};

// With z = (x - mean) * rstd and g = d_y * (weight + offset): d_x = rstd * (g - z mean(g z) - mean(g)) + d_total.
template <typename T, typename W, bool CENTRE>
[[kernel]] void norm_bwd(
    device T* d_x [[buffer(0)]],
    device const T* d_y [[buffer(1)]],
    device const T* d_total [[buffer(2)]],
    device const T* x [[buffer(3)]],
    device const W* weight [[buffer(4)]],
    device const float* mean [[buffer(5)]],
    device const float* rstd [[buffer(6)]],
    constant NormBackwardParams& p [[buffer(7)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[32];
  threadgroup float products[32];
  for (long n = group; n < p.N; n += groups) {
    device const T* row = x + row_offset(p.x, n);
    device const T* upstream = d_y + row_offset(p.d_y, n);
    device const T* other = d_total + (p.has_d_total ? row_offset(p.d_total, n) : 0);
    const float centre = CENTRE ? mean[n] : 0.0f, scale = rstd[n];
    float sum = 0.0f, product = 0.0f;
    for (long c = thread_index; c < p.C; c += threads) {
      const float z = (float(row[c * p.stride_x]) - centre) * scale;
      float g = float(upstream[c * p.stride_d_y]);
      if (p.has_weight) g *= float(weight[c * p.stride_weight]) + p.offset;
      sum += g;
      product += g * z;
    }
    if (CENTRE) sum = threadgroup_sum(sum, sums, lane, simdgroup, simdgroups) / float(p.C);
    product = threadgroup_sum(product, products, lane, simdgroup, simdgroups) / float(p.C);
    for (long c = thread_index; c < p.C; c += threads) {
      const float z = (float(row[c * p.stride_x]) - centre) * scale;
      float g = float(upstream[c * p.stride_d_y]);
      if (p.has_weight) g *= float(weight[c * p.stride_weight]) + p.offset;
      float d = scale * (g - z * product - (CENTRE ? sum : 0.0f));
      if (p.has_d_total) d += float(other[c * p.stride_d_total]);
      d_x[n * p.C + c] = T(d);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next row uses the arrays again
  }
}

// Shares of the rows' sums for the gradients of weight and bias, [shares, C] each; a thread goes down one column.
template <typename T, bool CENTRE>
[[kernel]] void norm_shares(
    device float* weight_part [[buffer(0)]],
    device float* bias_part [[buffer(1)]],
    device const T* d_y [[buffer(2)]],
    device const T* x [[buffer(3)]],
    device const float* mean [[buffer(4)]],
    device const float* rstd [[buffer(5)]],
    constant NormBackwardParams& p [[buffer(6)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  const long blocks = (p.C + threads - 1) / threads;
  for (long unit = group; unit < blocks * p.shares; unit += groups) {
    const long share = unit / blocks, c = unit % blocks * threads + thread_index;
    if (c >= p.C) continue;
    float weight_sum = 0.0f, bias_sum = 0.0f;
    for (long n = share * p.rows_each; n < min((share + 1) * p.rows_each, p.N); n++) {
      const float g = float(d_y[row_offset(p.d_y, n) + c * p.stride_d_y]);
      const float value = float(x[row_offset(p.x, n) + c * p.stride_x]);
      weight_sum += g * ((value - (CENTRE ? mean[n] : 0.0f)) * rstd[n]);
      bias_sum += g;
    }
    weight_part[share * p.C + c] = weight_sum;
    if (CENTRE) bias_part[share * p.C + c] = bias_sum;
  }
}

struct AddSharesParams {
  long shares;
  long C;
};

// out[c] = the sum of part[., c], in the shares' order.
template <typename W>
[[kernel]] void norm_add_shares(
    device W* out [[buffer(0)]],
    device const float* part [[buffer(1)]],
    constant AddSharesParams& p [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  for (long c = long(group) * threads + thread_index; c < p.C; c += long(groups) * threads) {
    float sum = 0.0f;
    for (long share = 0; share < p.shares; share++) sum += part[share * p.C + c];
    out[c] = W(sum);
  }
}

#define INSTANTIATE_ROWS(ROOM, NAME, T, W, CENTRE)                                                                   \
  template [[host_name(ROOM "_fwd_" NAME)]] [[kernel]] decltype(norm_fwd<T, W, CENTRE>) norm_fwd<T, W, CENTRE>;      \
  template [[host_name(ROOM "_bwd_" NAME)]] [[kernel]] decltype(norm_bwd<T, W, CENTRE>) norm_bwd<T, W, CENTRE>;
#define INSTANTIATE_COLUMNS(ROOM, NAME, T, CENTRE)                                                                   \
  template [[host_name(ROOM "_shares_" NAME)]] [[kernel]] decltype(norm_shares<T, CENTRE>) norm_shares<T, CENTRE>;   \
  template [[host_name(ROOM "_add_shares_" NAME)]] [[kernel]] decltype(norm_add_shares<T>) norm_add_shares<T>;
