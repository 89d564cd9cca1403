// Shared by attention_*.metal: parameters, which keys a query row sees, operands as tiles in threadgroup memory.
#pragma once
#include "common.h"

// Loops over arrays of simdgroup matrices: unrolled, so that the arrays are registers.
#define UNROLLED _Pragma("clang loop unroll(full)")

struct Strides {
  long batch;
  long row;
  long head;
  long dim;
};

// B batch (1 for packed documents), T query rows, S keys, H query heads, K key heads, D and Dv head dims.
struct AttentionParams {  // mirrors riftco/metal/attention.py
  long B;
  long T;
  long S;
  long H;
  long K;
  long D;
  long Dv;
  long documents;  // 0: not packed
  long has_k_lens;
  long has_sinks;
  long has_d_lse;
  long left;  // -1: no limit
  long right;
  long kv_grad_start;
  long need_k;
  long need_v;
  Strides q;
  Strides k;
  Strides v;
  Strides d_out;
  float scale;
  float softcap;
};

// Row numbers below 2^31; hi < lo: the row does not exist.
struct Range {
  int lo;
  int hi;
};

struct Documents {
  device const int* cu_q;
  device const int* cu_k;
  device const int* k_lens;
};

// Rows and keys that belong together with row `at` of the side that `of` divides.
struct Bounds {
  bool exist;
  long q0;
  long q1;
  long k0;
  long k1;
};

inline Bounds bounds_of(long at, device const int* of, Documents documents, long batch, constant AttentionParams& p) {
  if (p.documents == 0) {
    const long keys = p.has_k_lens ? clamp(long(documents.k_lens[batch]), long(0), p.S) : p.S;
    return {true, 0, p.T, 0, keys};
  }
  long lo = 0, hi = p.documents + 1;  // how many documents start up to `at`, by bisection
  while (lo < hi) {
    const long middle = (lo + hi) / 2;
    if (of[middle] <= at) {
      lo = middle + 1;
    } else {
      hi = middle;
    }
  }
  const long n = lo - 1;
  if (n < 0 || n >= p.documents) return {false, 0, 0, 0, 0};
  // bounds that are not there are moved inside: no foreign memory
  return {true, max(long(documents.cu_q[n]), long(0)), min(long(documents.cu_q[n + 1]), p.T),
          max(long(documents.cu_k[n]), long(0)), min(long(documents.cu_k[n + 1]), p.S)};
}

// Query row i sees the keys lo <= j < hi, around the place that is as far from the end of its keys as it is from the
// end of its rows.
inline Range keys_of(long i, Documents documents, long batch, constant AttentionParams& p) {
  if (i >= p.T) return {0, -1};
  const Bounds b = bounds_of(i, documents.cu_q, documents, batch, p);
  if (!b.exist || i >= b.q1) return {0, -1};
  const long place = b.k1 - (b.q1 - i);
  const long lo = p.left < 0 ? b.k0 : max(b.k0, place - p.left);
  const long hi = p.right < 0 ? b.k1 : min(b.k1, place + p.right + 1);
  return {int(lo), int(max(lo, hi))};
}

// Key j is seen by the query rows lo <= i < hi.
inline Range rows_of(long j, Documents documents, long batch, constant AttentionParams& p) {
  if (j >= p.S) return {0, -1};
  const Bounds b = bounds_of(j, documents.cu_k, documents, batch, p);
  if (!b.exist || j >= b.k1) return {0, -1};
  const long place = b.q1 - (b.k1 - j);
  const long lo = p.right < 0 ? b.q0 : max(b.q0, place - p.right);
  const long hi = p.left < 0 ? b.q1 : min(b.q1, place + p.left + 1);
  return {int(lo), int(max(lo, hi))};
}

template <typename Params>
inline float capped(float score, constant Params& p) {
  const float scaled = score * p.scale;
  return p.softcap > 0.0f ? p.softcap * precise::tanh(scaled / p.softcap) : scaled;
}

// A softmax weight and the gradient of the unscaled score behind it.
struct Weight {
  float p;
  float ds;
};

template <typename Params>
inline Weight weight_of(float score, float dp, float lse, float delta, constant Params& p) {
  const float s = capped(score, p);
  const float weight = precise::exp(s - lse);
  const float slope = p.softcap > 0.0f ? 1.0f - (s / p.softcap) * (s / p.softcap) : 1.0f;
  return {weight, weight * (dp - delta) * p.scale * slope};
}

// The larger, NaN if either is: max would lose it.
inline float nan_max(float a, float b) { return isnan(a) || a > b ? a : b; }

template <typename T>
inline device T* at_head(device T* t, constant Strides& strides, long batch, long head) {
  return t + batch * strides.batch + head * strides.head;
}
