// 8x8 simdgroup matrices, two elements a lane. Which lane holds which element is undocumented on Apple GPUs, so
// thread_elements() is left out: a kernel that needs it cannot be checked here. Lane l holds row l / 4, columns
// 2 * (l % 4) and the next.
#pragma once

namespace metal {
template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "Metal has 8x8 only");
  vec<T, 2> pair;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    const uint row = msl_lane() / 4, column = 2 * (msl_lane() % 4);
    pair[0] = row == column ? diagonal : T(0);
    pair[1] = row == column + 1 ? diagonal : T(0);
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Rows, int Columns>
inline simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> m;
  m.pair[0] = m.pair[1] = value;
  return m;
}
template <class T, class P>
inline void simdgroup_load(
    thread simdgroup_matrix<T, 8, 8>& m, P source, ulong elements_per_row = 8, ulong2 origin = 0, bool transpose = false) {
  for (int k = 0; k < 2; k++) {
    ulong row = msl_lane() / 4, column = 2 * (msl_lane() % 4) + k;
    if (transpose) {
      ulong swap = row;
      row = column;
      column = swap;
    }
    m.pair[k] = source[(origin.y + row) * elements_per_row + origin.x + column];
  }
}
template <class T, class P>
inline void simdgroup_store(
    simdgroup_matrix<T, 8, 8> m, P target, ulong elements_per_row = 8, ulong2 origin = 0, bool transpose = false) {
  for (int k = 0; k < 2; k++) {
    ulong row = msl_lane() / 4, column = 2 * (msl_lane() % 4) + k;
    if (transpose) {
      ulong swap = row;
      row = column;
      column = swap;
    }
    target[(origin.y + row) * elements_per_row + origin.x + column] = m.pair[k];
  }
}
template <class D, class A, class B, class C>
MSL_RENDEZVOUS inline void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c) {
  vec<float, 4> published;
  published[0] = (float)a.pair[0];
  published[1] = (float)a.pair[1];
  published[2] = (float)b.pair[0];
  published[3] = (float)b.pair[1];
  typedef vec<float, 4> F4;
  MSL_EXCHANGE(F4, published)
  const uint row = lane / 4;
  float sum0 = (float)c.pair[0], sum1 = (float)c.pair[1];
  for (uint k = 0; k < 8; k++) {
    const float left = msl::lane_of<F4>(slots, row * 4 + k / 2)[k % 2];
    const F4 right = msl::lane_of<F4>(slots, k * 4 + lane % 4);
    sum0 += left * right[2];
    sum1 += left * right[3];
  }
  d.pair[0] = (D)sum0;
  d.pair[1] = (D)sum1;
}
template <class D, class A, class B>
inline void simdgroup_multiply(
    thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>((D)0));
}
}  // namespace metal
