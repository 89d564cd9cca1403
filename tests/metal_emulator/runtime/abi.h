// Shared by translated kernels, the runtime and the stand-in for PyTorch's Metal library. Includes nothing: kernels
// must not see libc.
#pragma once

namespace msl {
enum class Kind : int { buffer, position };
enum Position : int {
  thread_position_in_grid,
  threadgroup_position_in_grid,
  thread_position_in_threadgroup,
  threads_per_threadgroup,
  threadgroups_per_grid,
  threads_per_grid,
  dispatch_threads_per_threadgroup,
  thread_index_in_threadgroup,
  thread_index_in_simdgroup,
  simdgroup_index_in_threadgroup,
  simdgroups_per_threadgroup,
  threads_per_simdgroup,
  positions_count
};

// How one kernel parameter gets its value: a buffer index or a position; bytes of one element; `constant T&` or not.
struct Bind {
  Kind kind;
  int index;
  unsigned long item;
  bool by_value;
};
struct Context {
  void** buffers;
  unsigned positions[positions_count][3];
};
typedef void (*Thunk)(const Context&, const Bind*);

// One argument of a launch.
enum class Given : int { nothing, tensor, bytes };
struct Arg {
  Given given;
  void* data;
  unsigned long bytes;
  unsigned long item;  // of a tensor: bytes of one element
};
}  // namespace msl

extern "C" {
int msl_register(const char* host_name, msl::Thunk run, const msl::Bind* binds, int count);
int msl_has(const char* host_name);
// Run a grid of `grid` threads in threadgroups of `group`; null, or what was wrong.
const char* msl_launch(const char* host_name, const msl::Arg* args, int count, const unsigned* grid,
                       const unsigned* group, unsigned long seed);
}
