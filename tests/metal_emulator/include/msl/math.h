// Math, common, geometric and conversion functions. There is none for bfloat, as in Metal: convert to float first.
#pragma once

namespace metal {
#define MSL_UNARY(name, expression)                            \
  inline float name(float x) { return expression; }            \
  inline half name(half v) {                                   \
    float x = v;                                               \
    return (half)(expression);                                 \
  }                                                            \
  template <int N>                                             \
  inline vec<float, N> name(vec<float, N> v) {                 \
    vec<float, N> r;                                           \
    for (int i = 0; i < N; i++) {                              \
      float x = v[i];                                          \
      r[i] = expression;                                       \
    }                                                          \
    return r;                                                  \
  }
MSL_UNARY(exp, __builtin_expf(x))
MSL_UNARY(exp2, __builtin_exp2f(x))
MSL_UNARY(log, __builtin_logf(x))
MSL_UNARY(log2, __builtin_log2f(x))
MSL_UNARY(sqrt, __builtin_sqrtf(x))
MSL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))
MSL_UNARY(tanh, __builtin_tanhf(x))
MSL_UNARY(sin, __builtin_sinf(x))
MSL_UNARY(cos, __builtin_cosf(x))
MSL_UNARY(abs, __builtin_fabsf(x))
MSL_UNARY(fabs, __builtin_fabsf(x))
MSL_UNARY(floor, __builtin_floorf(x))
MSL_UNARY(ceil, __builtin_ceilf(x))
MSL_UNARY(round, __builtin_roundf(x))
MSL_UNARY(rint, __builtin_rintf(x))
MSL_UNARY(trunc, __builtin_truncf(x))
#undef MSL_UNARY
inline int abs(int x) { return x < 0 ? -x : x; }
inline float pow(float a, float b) { return __builtin_powf(a, b); }
inline float fmod(float a, float b) { return __builtin_fmodf(a, b); }
inline float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
inline float copysign(float a, float b) { return __builtin_copysignf(a, b); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return (half)__builtin_fmaf(a, b, c); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }

#define MSL_PAIRWISE(name, condition)                                    \
  template <class T>                                                     \
  inline T name(T a, T b) {                                              \
    if constexpr (msl::Shape<T>::n == 1) {                               \
      return condition ? b : a;                                          \
    } else {                                                             \
      T r;                                                               \
      for (int i = 0; i < msl::Shape<T>::n; i++) r[i] = name(a[i], b[i]); \
      return r;                                                          \
    }                                                                    \
  }
MSL_PAIRWISE(max, a < b)
MSL_PAIRWISE(min, b < a)
#undef MSL_PAIRWISE
inline float fmax(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fmin(float a, float b) { return __builtin_fminf(a, b); }
template <class T>
inline T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T>
inline T select(T a, T b, bool second) {
  return second ? b : a;
}
template <class T>
inline msl::element_t<T> dot(T a, T b) {
  msl::element_t<T> sum = 0;
  for (int i = 0; i < msl::Shape<T>::n; i++) sum += a[i] * b[i];
  return sum;
}
template <class To, class From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return __builtin_bit_cast(To, from);
}
inline uint popcount(uint x) { return __builtin_popcount(x); }

namespace precise {
using metal::cos;
using metal::exp;
using metal::exp2;
using metal::log;
using metal::log2;
using metal::pow;
using metal::rsqrt;
using metal::sin;
using metal::sqrt;
using metal::tanh;
}  // namespace precise
namespace fast {
using namespace precise;
}
}  // namespace metal
