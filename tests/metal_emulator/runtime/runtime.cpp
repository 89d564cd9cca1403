// Runs a kernel: every Metal thread is a fiber, the threadgroups run one after another on the calling thread.
//
// Between two rendezvous (barrier, simd operation) threads of a group may run in any order on a GPU; here the seed
// picks one: 0 ascending, 1 descending, others a new random order each round. Built with MSL_TSAN (but itself not
// instrumented) it tells ThreadSanitizer about fibers and barriers; nothing else orders memory, so a missing barrier
// is a data race whatever the schedule. Each threadgroup then gets fresh memory: TSan would take reuse for a race.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "abi.h"
#include "fiber.h"

#ifdef MSL_TSAN
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
static constexpr unsigned kNoSync = 1;           // a switch alone orders nothing
static constexpr unsigned kMaxThreads = 224;     // TSan keeps 256 threads' states at a time
#else
static constexpr unsigned kMaxThreads = 1024;
#endif

using namespace msl;

namespace {
constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kThreadgroupBytes = 32 << 10;  // what every Apple GPU has
constexpr unsigned kSlotBytes = 32;

enum class State : unsigned char { ready, at_barrier, at_simd, done };

struct Fiber {
  void* sp;
  State state;
  bool at_simd_barrier;
  const void* site;
  unsigned lane, simdgroup, parity;
  Context context;
  void* tsan;
};

struct Kernel {
  Thunk run;
  std::vector<Bind> binds;
};

struct Array {  // one threadgroup array; its own allocation, so that AddressSanitizer sees its ends
  unsigned id;
  size_t bytes;
  void* data;
};

struct Group {
  const Kernel* kernel = nullptr;
  std::vector<Fiber> fibers;
  std::vector<unsigned char> slots;  // [simdgroup][parity][lane][kSlotBytes]
  std::vector<unsigned> lanes;       // of each simdgroup
  std::vector<Array> arrays;
  size_t array_bytes = 0;
  char* stacks = nullptr;
  size_t stack_count = 0;
  void* scheduler_sp = nullptr;
  Fiber* current = nullptr;
  std::string error;
  void* scheduler_tsan = nullptr;
  std::vector<char> sync;  // addresses that stand for the group's and the simdgroups' barriers
};

thread_local Group* G;
#ifdef MSL_TSAN
char launch_done;
#endif

std::map<std::string, Kernel>& registry() {
  static std::map<std::string, Kernel> kernels;
  return kernels;
}

void wait() {
  Fiber* me = G->current;
#ifdef MSL_TSAN
  __tsan_switch_to_fiber(G->scheduler_tsan, kNoSync);
#endif
  msl_switch(&me->sp, G->scheduler_sp);
}

void wait_ordered(bool orders_memory, size_t barrier) {
#ifdef MSL_TSAN
  if (orders_memory) __tsan_release(&G->sync[64 * barrier]);
  wait();
  if (orders_memory) __tsan_acquire(&G->sync[64 * barrier]);
#else
  (void)orders_memory, (void)barrier;
  wait();
#endif
}

void entry() {
  G->kernel->run(G->current->context, G->kernel->binds.data());
  G->current->state = State::done;
#ifdef MSL_TSAN
  __tsan_release(&launch_done);
#endif
  wait();
  __builtin_trap();
}
}  // namespace

extern "C" {
void msl_threadgroup_barrier(const void* site, bool orders_memory) {
  Fiber* me = G->current;
  me->state = State::at_barrier;
  me->site = site;
  wait_ordered(orders_memory, 0);
}
void msl_simdgroup_barrier(const void* site, bool orders_memory) {
  Fiber* me = G->current;
  me->state = State::at_simd;
  me->site = site;
  wait_ordered(orders_memory, 1 + me->simdgroup);
}
void* msl_simd_slot() {
  Fiber* me = G->current;
  return &G->slots[((me->simdgroup * 2 + me->parity) * 32 + me->lane) * kSlotBytes];
}
const unsigned char* msl_simd_exchange(const void* site) {
  Fiber* me = G->current;
  me->state = State::at_simd;
  me->site = site;
  // two buffers in turn: a fast lane may publish its next value while a slow one still reads this one
  const unsigned char* slots = &G->slots[(me->simdgroup * 2 + me->parity) * 32 * kSlotBytes];
  me->parity ^= 1;
  wait();
  return slots;
}
unsigned msl_lane() { return G->current->lane; }
unsigned msl_lanes() { return G->lanes[G->current->simdgroup]; }
void* msl_threadgroup_array(unsigned id, unsigned long bytes) {
  for (const Array& a : G->arrays)
    if (a.id == id) return a.data;
#ifdef MSL_TSAN  // the array is there when the group starts; that a thread makes it here is no write of that thread
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
  void* data = std::malloc(bytes);
  std::memset(data, 0xFF, bytes);  // NaN as float, half and bfloat
#ifdef MSL_TSAN
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
#endif
  G->arrays.push_back({id, bytes, data});
  G->array_bytes += (bytes + 15) & ~size_t(15);
  if (G->array_bytes > kThreadgroupBytes)
    G->error = "threadgroup memory: " + std::to_string(G->array_bytes) + " bytes, more than 32768";
  return data;
}
int msl_register(const char* host_name, Thunk run, const Bind* binds, int count) {
  if (!registry().emplace(host_name, Kernel{run, {binds, binds + count}}).second) {
    std::fprintf(stderr, "two kernels are named %s\n", host_name);
    std::abort();
  }
  return 0;
}
int msl_has(const char* host_name) { return registry().count(host_name); }
}

namespace {
[[noreturn]] void fail(const char* call) {  // under TSan every threadgroup keeps its stacks: a few hundred fit a process
  std::perror(call);
  std::fprintf(stderr, "no room for the stacks of another threadgroup; give the job fewer threadgroups\n");
  std::abort();
}

void map_stacks(Group& g, unsigned count) {
  if (g.stack_count >= count) return;
  if (g.stacks) munmap(g.stacks, g.stack_count * kStackBytes);
  void* memory = mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("mmap");
  g.stacks = static_cast<char*>(memory);
  g.stack_count = count;
  const size_t page = sysconf(_SC_PAGESIZE);
  for (unsigned i = 0; i < count; i++)  // an overflow must not reach the neighbour's stack
    if (mprotect(g.stacks + i * kStackBytes, page, PROT_NONE)) fail("mprotect");
}

void set_up(Group& g, const Kernel& kernel, void** buffers, const unsigned at[3], const unsigned groups[3],
            const unsigned group[3], const unsigned grid[3], const unsigned size[3]) {
  const unsigned count = size[0] * size[1] * size[2], simdgroups = (count + 31) / 32;
  map_stacks(g, count);
  g.kernel = &kernel;
  g.fibers.resize(count);
  g.lanes.assign(simdgroups, 0);
#ifdef MSL_TSAN
  g.scheduler_tsan = __tsan_get_current_fiber();
#endif
  g.slots.assign(simdgroups * 2 * 32 * kSlotBytes, 0xFF);
  g.sync.assign((1 + simdgroups) * 64, 0);
  for (const Array& a : g.arrays) std::memset(a.data, 0xFF, a.bytes);
  for (unsigned i = 0; i < count; i++) {
    Fiber& f = g.fibers[i];
    f.state = State::ready;
    f.lane = i % 32;
    f.simdgroup = i / 32;
    f.parity = 0;
    g.lanes[f.simdgroup]++;
    const unsigned t[3] = {i % size[0], i / size[0] % size[1], i / (size[0] * size[1])};
    f.context.buffers = buffers;
    auto& p = f.context.positions;
    for (int d = 0; d < 3; d++) {
      p[thread_position_in_grid][d] = at[d] * group[d] + t[d];
      p[threadgroup_position_in_grid][d] = at[d];
      p[thread_position_in_threadgroup][d] = t[d];
      p[threads_per_threadgroup][d] = size[d];
      p[threadgroups_per_grid][d] = groups[d];
      p[threads_per_grid][d] = grid[d];
      p[dispatch_threads_per_threadgroup][d] = group[d];
    }
    p[thread_index_in_threadgroup][0] = i;
    p[thread_index_in_simdgroup][0] = f.lane;
    p[simdgroup_index_in_threadgroup][0] = f.simdgroup;
    p[simdgroups_per_threadgroup][0] = simdgroups;
    p[threads_per_simdgroup][0] = 32;
    f.sp = msl_first_sp(g.stacks + (i + 1) * kStackBytes - 64, entry);
#ifdef MSL_TSAN
    f.tsan = __tsan_create_fiber(0);
#endif
  }
}

// Release every simdgroup whose lanes all wait at the same simd operation; true if there was one.
bool release_simdgroups(Group& g) {
  bool released = false;
  for (size_t first = 0; first < g.fibers.size(); first += 32) {
    const size_t last = std::min(g.fibers.size(), first + 32);
    size_t waiting = 0;
    bool same = true;
    for (size_t i = first; i < last; i++) {
      if (g.fibers[i].state != State::at_simd) continue;
      same &= g.fibers[i].site == g.fibers[first].site;
      waiting++;
    }
    if (waiting < last - first) continue;
    if (!same) {
      g.error = "lanes of one simdgroup reached different simd operations";
      return false;
    }
    for (size_t i = first; i < last; i++) g.fibers[i].state = State::ready;
    released = true;
  }
  return released;
}

void release_barrier(Group& g) {
  size_t waiting = 0, at_simd = 0, done = 0;
  bool same = true;
  const void* site = nullptr;
  for (const Fiber& f : g.fibers) {
    at_simd += f.state == State::at_simd;
    done += f.state == State::done;
    if (f.state != State::at_barrier) continue;
    same &= site == nullptr || site == f.site;
    site = f.site;
    waiting++;
  }
  if (waiting == g.fibers.size() && same) {
    for (Fiber& f : g.fibers) f.state = State::ready;
    return;
  }
  g.error = "divergence: " + std::to_string(waiting) + " of " + std::to_string(g.fibers.size()) +
            " threads wait at " + (same ? "a threadgroup_barrier, " : "different threadgroup_barriers, ") +
            std::to_string(at_simd) + " at a simd operation, " + std::to_string(done) + " have returned";
}

void run_group(Group& g, unsigned long seed) {
  const size_t count = g.fibers.size();
  std::vector<unsigned> order(count);
  for (size_t i = 0; i < count; i++) order[i] = seed == 1 ? count - 1 - i : i;
  std::mt19937_64 random(seed);
  size_t done = 0;
  while (true) {
    if (seed > 1) std::shuffle(order.begin(), order.end(), random);
    for (unsigned i : order) {
      Fiber& f = g.fibers[i];
      if (f.state != State::ready) continue;
      g.current = &f;
#ifdef MSL_TSAN
      __tsan_switch_to_fiber(f.tsan, kNoSync);
#endif
      msl_switch(&g.scheduler_sp, f.sp);
      done += f.state == State::done;
      if (!g.error.empty()) return;
    }
    if (done == count) break;
    if (!release_simdgroups(g) && g.error.empty()) release_barrier(g);
    if (!g.error.empty()) return;
  }
#ifdef MSL_TSAN
  for (Fiber& f : g.fibers) __tsan_destroy_fiber(f.tsan);
#endif
}

std::string check(const std::string& name, const Kernel& kernel, const Arg* args, int count, const unsigned* grid,
                  const unsigned* group) {
  const unsigned long threads = (unsigned long)group[0] * group[1] * group[2];
  if (threads == 0 || threads > kMaxThreads)
    return std::to_string(threads) + " threads per threadgroup; 1 to " + std::to_string(kMaxThreads) + " can run";
  if (!grid[0] || !grid[1] || !grid[2]) return "an empty grid";
  std::vector<bool> used(count, false);
  for (const Bind& b : kernel.binds) {
    if (b.kind != Kind::buffer) continue;
    const std::string which = "buffer(" + std::to_string(b.index) + ")";
    if (b.index >= count || args[b.index].given == Given::nothing) return which + " was not set";
    const Arg& a = args[b.index];
    used[b.index] = true;
    if (a.given == Given::bytes ? a.bytes != b.item && b.by_value : b.by_value && a.bytes < b.item)
      return which + " was set to " + std::to_string(a.bytes) + " bytes; the kernel reads a struct of " +
             std::to_string(b.item);
    if (a.given == Given::tensor && !b.by_value && a.item != b.item && a.item != 1)  // uint8 tensors hold packed words
      return which + " was set to a tensor of " + std::to_string(a.item) + "-byte elements; the kernel's have " +
             std::to_string(b.item);
  }
  for (int i = 0; i < count; i++)
    if (args[i].given != Given::nothing && !used[i]) return "the kernel has no buffer(" + std::to_string(i) + ")";
  return "";
}
}  // namespace

extern "C" const char* msl_launch(const char* host_name, const Arg* args, int count, const unsigned* grid,
                                  const unsigned* group, unsigned long seed) {
  static thread_local std::string result;
  const auto found = registry().find(host_name);
  if (found == registry().end()) {
    result = std::string("no kernel ") + host_name;
    return result.c_str();
  }
  result = check(host_name, found->second, args, count, grid, group);
  std::vector<void*> buffers(count);
  for (int i = 0; i < count; i++) buffers[i] = args[i].data;
  unsigned groups[3];
  for (int d = 0; d < 3; d++) groups[d] = (grid[d] + group[d] - 1) / (group[d] ? group[d] : 1);
  const unsigned long total = result.empty() ? (unsigned long)groups[0] * groups[1] * groups[2] : 0;
  Group* g = G = new Group;
  for (unsigned long n = 0; n < total && g->error.empty(); n++) {
#ifdef MSL_TSAN
    g = G = new Group;  // the last one's memory stays behind
#endif
    const unsigned long i = seed == 1 ? total - 1 - n : n;  // no order among threadgroups either
    const unsigned at[3] = {unsigned(i % groups[0]), unsigned(i / groups[0] % groups[1]),
                            unsigned(i / groups[0] / groups[1])};
    unsigned size[3];
    for (int d = 0; d < 3; d++) size[d] = std::min(group[d], grid[d] - at[d] * group[d]);
    set_up(*g, found->second, buffers.data(), at, groups, group, grid, size);
    run_group(*g, seed > 1 ? seed * 1000003 + i : seed);
  }
  if (!g->error.empty()) result = g->error;
#ifdef MSL_TSAN
  __tsan_acquire(&launch_done);  // the host reads the results; between threadgroups nothing is ordered
#else
  for (const Array& a : g->arrays) std::free(a.data);
  if (g->stacks) munmap(g->stacks, g->stack_count * kStackBytes);
  delete g;
#endif
  G = nullptr;
  if (!result.empty()) result = std::string(host_name) + ": " + result;
  return result.empty() ? nullptr : result.c_str();
}

// clang calls this for bfloat stores; libgcc before 13 lacks it. Round to nearest even, NaN stays a quiet NaN.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float value) {
  const unsigned bits = __builtin_bit_cast(unsigned, value);
  unsigned short high = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  if ((bits & 0x7fffffff) > 0x7f800000) high = (bits >> 16) | 0x40;
  return __builtin_bit_cast(__bf16, high);
}
