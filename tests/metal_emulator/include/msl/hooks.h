// What a kernel asks of the runtime, and barriers. Barriers and simd operations are rendezvous: `convergent` and
// `noduplicate` keep the optimiser from splitting one call into several, `noinline` makes the return address name the
// call site, by which the runtime tells divergent threads.
#pragma once

#define MSL_RENDEZVOUS __attribute__((noinline, convergent, noduplicate, no_sanitize("thread")))

extern "C" {
// `orders_memory`: whether memory written before is visible to the other threads after.
__attribute__((convergent, noduplicate)) void msl_threadgroup_barrier(const void* site, bool orders_memory);
__attribute__((convergent, noduplicate)) void msl_simdgroup_barrier(const void* site, bool orders_memory);
// This lane's 32 bytes in the simdgroup's exchange buffer; then wait for all lanes and get the buffer of all.
void* msl_simd_slot();
__attribute__((convergent, noduplicate)) const unsigned char* msl_simd_exchange(const void* site);
uint msl_lane();
uint msl_lanes();  // in this simdgroup: 32, or fewer in the last one of a threadgroup
void* msl_threadgroup_array(uint id, ulong bytes);
}

namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

MSL_RENDEZVOUS inline void threadgroup_barrier(mem_flags flags) {
  msl_threadgroup_barrier(__builtin_return_address(0), flags != mem_flags::mem_none);
}
MSL_RENDEZVOUS inline void simdgroup_barrier(mem_flags flags) {
  msl_simdgroup_barrier(__builtin_return_address(0), flags != mem_flags::mem_none);
}
}  // namespace metal
