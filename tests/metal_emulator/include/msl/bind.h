// From a kernel's C++ function to what the runtime calls: one thread's arguments out of buffers and thread positions.
#pragma once
#include "../../runtime/abi.h"

namespace msl {
template <class P>
struct Argument {  // a thread position: scalar or vector
  static constexpr ulong item = 0;
  static constexpr bool by_value = false;
  static P get(const Context& context, const Bind& bind) {
    const uint* source = context.positions[bind.index];
    if constexpr (Shape<P>::n == 1) {
      return (P)source[0];
    } else {
      P r;
      for (int i = 0; i < Shape<P>::n; i++) r[i] = (element_t<P>)source[i];
      return r;
    }
  }
};
template <class T>
struct Argument<T*> {  // a buffer
  static constexpr ulong item = sizeof(T);
  static constexpr bool by_value = false;
  static T* get(const Context& context, const Bind& bind) { return (T*)context.buffers[bind.index]; }
};
template <class T>
struct Argument<T&> {  // `constant Params&`
  static constexpr ulong item = sizeof(T);
  static constexpr bool by_value = true;
  static T& get(const Context& context, const Bind& bind) { return *(T*)context.buffers[bind.index]; }
};

template <int... I>
struct Sequence {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
  typedef Sequence<I...> type;
};

template <auto F>
struct Kernel;
template <class... A, void (*F)(A...)>
struct Kernel<F> {
  template <int... I>
  static void call(const Context& context, const Bind* binds, Sequence<I...>) {
    F(Argument<A>::get(context, binds[I])...);
  }
  static void run(const Context& context, const Bind* binds) {
    call(context, binds, typename Count<sizeof...(A)>::type{});
  }
  template <int N>
  static int add(const char* host_name, Bind (&binds)[N]) {
    static_assert(N == sizeof...(A), "every parameter is bound");
    const ulong items[] = {Argument<A>::item...};
    const bool by_value[] = {Argument<A>::by_value...};
    for (int i = 0; i < N; i++) {
      binds[i].item = items[i];
      binds[i].by_value = by_value[i];
    }
    return msl_register(host_name, &run, binds, N);
  }
};
}  // namespace msl
