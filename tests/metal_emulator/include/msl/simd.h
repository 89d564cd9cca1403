// Simdgroup functions over 32 lanes. They exchange registers and order no memory: a kernel that passes data through
// threadgroup memory still needs simdgroup_barrier, and the race check holds it to that.
#pragma once

namespace msl {
template <class T>
__attribute__((no_sanitize("thread"))) inline T lane_of(const unsigned char* slots, uint lane) {
  return *(const T*)(slots + 32 * lane);
}
}  // namespace msl

// Publish x, wait for the other lanes, and see everyone's value through lane_of<T>(slots, lane).
#define MSL_EXCHANGE(T, x)                                          \
  static_assert(sizeof(T) <= 32, "one slot");                       \
  *(T*)msl_simd_slot() = (x);                                       \
  const unsigned char* slots = msl_simd_exchange(__builtin_return_address(0)); \
  const uint lane = msl_lane(), lanes = msl_lanes();                \
  (void)lane, (void)lanes, (void)slots;

namespace metal {
#define MSL_REDUCE(name, combine)                        \
  template <class T>                                     \
  MSL_RENDEZVOUS inline T name(T x) {                    \
    MSL_EXCHANGE(T, x)                                   \
    T a = msl::lane_of<T>(slots, 0);                     \
    for (uint i = 1; i < lanes; i++) {                   \
      T b = msl::lane_of<T>(slots, i);                   \
      a = combine;                                       \
    }                                                    \
    return a;                                            \
  }
MSL_REDUCE(simd_sum, a + b)
MSL_REDUCE(simd_product, a * b)
MSL_REDUCE(simd_max, max(a, b))
MSL_REDUCE(simd_min, min(a, b))
MSL_REDUCE(simd_and, a & b)
MSL_REDUCE(simd_or, a | b)
#undef MSL_REDUCE

#define MSL_SHUFFLE(name, parameter, source)                  \
  template <class T>                                          \
  MSL_RENDEZVOUS inline T name(T x, ushort parameter) {       \
    MSL_EXCHANGE(T, x)                                        \
    return msl::lane_of<T>(slots, (source) & 31);             \
  }
MSL_SHUFFLE(simd_broadcast, from, from)
MSL_SHUFFLE(simd_shuffle, from, from)
MSL_SHUFFLE(simd_shuffle_xor, mask, lane ^ mask)
MSL_SHUFFLE(simd_shuffle_down, delta, lane + delta < lanes ? lane + delta : lane)
MSL_SHUFFLE(simd_shuffle_up, delta, lane >= delta ? lane - delta : lane)
#undef MSL_SHUFFLE
template <class T>
MSL_RENDEZVOUS inline T simd_broadcast_first(T x) {
  MSL_EXCHANGE(T, x)
  return msl::lane_of<T>(slots, 0);
}
template <class T>
MSL_RENDEZVOUS inline T simd_prefix_exclusive_sum(T x) {
  MSL_EXCHANGE(T, x)
  T sum = 0;
  for (uint i = 0; i < lane; i++) sum = sum + msl::lane_of<T>(slots, i);
  return sum;
}
template <class T>
MSL_RENDEZVOUS inline T simd_prefix_inclusive_sum(T x) {
  MSL_EXCHANGE(T, x)
  T sum = 0;
  for (uint i = 0; i <= lane; i++) sum = sum + msl::lane_of<T>(slots, i);
  return sum;
}
MSL_RENDEZVOUS inline bool simd_any(bool x) {
  MSL_EXCHANGE(bool, x)
  for (uint i = 0; i < lanes; i++)
    if (msl::lane_of<bool>(slots, i)) return true;
  return false;
}
MSL_RENDEZVOUS inline bool simd_all(bool x) {
  MSL_EXCHANGE(bool, x)
  for (uint i = 0; i < lanes; i++)
    if (!msl::lane_of<bool>(slots, i)) return false;
  return true;
}
}  // namespace metal
