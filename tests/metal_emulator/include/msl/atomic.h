// Relaxed atomics on integers. Float atomics are left out: riftco's kernels are deterministic.
#pragma once

namespace metal {
enum memory_order { memory_order_relaxed = __ATOMIC_RELAXED };
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;

template <class P>
inline auto atomic_load_explicit(P p, memory_order) {
  return __atomic_load_n(&p->value, __ATOMIC_RELAXED);
}
template <class P, class T>
inline void atomic_store_explicit(P p, T value, memory_order) {
  __atomic_store_n(&p->value, value, __ATOMIC_RELAXED);
}
#define MSL_FETCH(name, builtin)                                   \
  template <class P, class T>                                      \
  inline auto name(P p, T value, memory_order) {                   \
    return builtin(&p->value, value, __ATOMIC_RELAXED);            \
  }
MSL_FETCH(atomic_fetch_add_explicit, __atomic_fetch_add)
MSL_FETCH(atomic_fetch_max_explicit, __atomic_fetch_max)
MSL_FETCH(atomic_fetch_min_explicit, __atomic_fetch_min)
MSL_FETCH(atomic_fetch_or_explicit, __atomic_fetch_or)
#undef MSL_FETCH
}  // namespace metal
