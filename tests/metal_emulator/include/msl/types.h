// Types, address spaces and vector constructors.
#pragma once

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX 65504.0f
#define M_PI_F 3.14159265358979323846f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f

// Execution erases the address spaces; the lint pass (-fsyntax-only) makes them part of the type, so that clang
// refuses a device pointer where threadgroup memory is asked for. `constant` is read-only in both.
#ifdef MSL_LINT
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
#define msl_threadgroup threadgroup  // in what translate.py has rewritten
#define thread
#define METAL_FUNC inline

typedef signed char int8_t;
typedef unsigned char uchar, uint8_t;
typedef short int16_t;
typedef unsigned short ushort, uint16_t;
typedef int int32_t;
typedef unsigned int uint, uint32_t;
typedef long int64_t, ptrdiff_t;
typedef unsigned long ulong, uint64_t, size_t;
typedef _Float16 half;
typedef __bf16 bfloat;

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}

namespace msl {
template <class T>
using identity_t = T;  // lets an array type be spelled where a cast wants a type's name

template <class T>
struct Shape {
  static constexpr int n = 1;
  typedef T element;
};
#define MSL_SHAPE(N)                                        \
  template <class T>                                        \
  struct Shape<T __attribute__((ext_vector_type(N)))> {     \
    static constexpr int n = N;                             \
    typedef T element;                                      \
  };
MSL_SHAPE(2)
MSL_SHAPE(3)
MSL_SHAPE(4)
#undef MSL_SHAPE
template <class T>
using element_t = typename Shape<T>::element;

template <class T, int N, class A>
inline void append(metal::vec<T, N>& result, int& filled, A a) {
  if constexpr (Shape<A>::n == 1) {
    result[filled++] = (T)a;
  } else {
    for (int i = 0; i < Shape<A>::n; i++) result[filled++] = (T)a[i];
  }
}
// vec<T, N>(parts...): one scalar fills all, otherwise the parts' elements must count N.
template <class T, int N, class... A>
inline metal::vec<T, N> make(A... parts) {
  metal::vec<T, N> result = (T)0;
  constexpr int given = (Shape<A>::n + ... + 0);
  static_assert(given == N || (given == 1 && sizeof...(A) == 1) || given == 0, "wrong number of elements");
  int filled = 0;
  (append<T, N>(result, filled, parts), ...);
  if constexpr (given == 1)
    for (int i = 1; i < N; i++) result[i] = result[0];
  return result;
}
}  // namespace msl

// The type `float4` and, as a function-like macro, its constructor `float4(...)`.
#define MSL_VECTORS(T)               \
  typedef metal::vec<T, 2> T##2;     \
  typedef metal::vec<T, 3> T##3;     \
  typedef metal::vec<T, 4> T##4;
MSL_VECTORS(float)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
#undef MSL_VECTORS
#define float2(...) msl::make<float, 2>(__VA_ARGS__)
#define float3(...) msl::make<float, 3>(__VA_ARGS__)
#define float4(...) msl::make<float, 4>(__VA_ARGS__)
#define half2(...) msl::make<half, 2>(__VA_ARGS__)
#define half3(...) msl::make<half, 3>(__VA_ARGS__)
#define half4(...) msl::make<half, 4>(__VA_ARGS__)
#define bfloat2(...) msl::make<bfloat, 2>(__VA_ARGS__)
#define bfloat3(...) msl::make<bfloat, 3>(__VA_ARGS__)
#define bfloat4(...) msl::make<bfloat, 4>(__VA_ARGS__)
#define char2(...) msl::make<char, 2>(__VA_ARGS__)
#define char4(...) msl::make<char, 4>(__VA_ARGS__)
#define uchar2(...) msl::make<uchar, 2>(__VA_ARGS__)
#define uchar4(...) msl::make<uchar, 4>(__VA_ARGS__)
#define short2(...) msl::make<short, 2>(__VA_ARGS__)
#define short4(...) msl::make<short, 4>(__VA_ARGS__)
#define ushort2(...) msl::make<ushort, 2>(__VA_ARGS__)
#define ushort4(...) msl::make<ushort, 4>(__VA_ARGS__)
#define int2(...) msl::make<int, 2>(__VA_ARGS__)
#define int3(...) msl::make<int, 3>(__VA_ARGS__)
#define int4(...) msl::make<int, 4>(__VA_ARGS__)
#define uint2(...) msl::make<uint, 2>(__VA_ARGS__)
#define uint3(...) msl::make<uint, 3>(__VA_ARGS__)
#define uint4(...) msl::make<uint, 4>(__VA_ARGS__)
#define long2(...) msl::make<long, 2>(__VA_ARGS__)
#define ulong2(...) msl::make<ulong, 2>(__VA_ARGS__)

namespace metal {
template <class T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
  static constexpr float max() { return FLT_MAX; }
  static constexpr float lowest() { return -FLT_MAX; }
  static constexpr float infinity() { return INFINITY; }
};
template <>
struct numeric_limits<int> {
  static constexpr int max() { return 0x7fffffff; }
  static constexpr int min() { return -0x7fffffff - 1; }
};
template <>
struct numeric_limits<uint> {
  static constexpr uint max() { return 0xffffffffu; }
  static constexpr uint min() { return 0; }
};
template <class A, class B>
constexpr bool is_same_v = __is_same(A, B);
template <class A, class B>
struct is_same {
  static constexpr bool value = is_same_v<A, B>;
};
template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
}  // namespace metal
