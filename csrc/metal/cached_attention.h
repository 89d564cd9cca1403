// Shared by cached_attention*.metal: parameters, runs, which keys a query row sees, cached rows as they are stored.
#pragma once
#include "attention.h"

#define HEADS 4     // one for each simdgroup
#define THREADS 128
#define COLUMNS 2   // of the head dim, of a thread

// R runs, T query rows, S new keys, H query heads, K key heads, D head dim, W rows of a slot.
struct CachedAttentionParams {  // mirrors riftco/metal/cached_attention.py
  long T;
  long S;
  long H;
  long K;
  long D;
  long runs;
  long slots;
  long W;
  long pages;
  long page_size;
  long table_stride;  // 0: slots, not pages
  long packed;
  long has_sinks;
  long left;  // -1: no limit
  long pieces;
  long chunk;
  long need_k;
  long need_v;
  Strides q;
  Strides k;
  Strides v;
  Strides k_cache;  // batch: of a page, or of a slot
  Strides v_cache;
  Strides k_scale;
  Strides v_scale;
  Strides d_out;
  float scale;
  float softcap;
};

// A run: where its first new key sits, its query rows and its new keys.
struct Run {
  bool live;
  long slot;
  long start;
  long first_row;
  long rows;
  long first_key;
  long keys;
};

struct Runs {
  device const int* slots;
  device const int* positions;
  device const int* cu_q;
  device const int* cu_k;
};

// The run of query row `at`, or of new key `at`.
inline Run run_of(long at, bool of_keys, Runs runs, constant CachedAttentionParams& p) {
  Run found = {false, 0, 0, 0, 0, 0, 0};
  long n;
  if (p.packed) {
    device const int* of = of_keys ? runs.cu_k : runs.cu_q;
    long lo = 0, hi = p.runs + 1;  // how many runs start up to `at`, by bisection
    while (lo < hi) {
      const long middle = (lo + hi) / 2;
      if (of[middle] <= at) {
        lo = middle + 1;
      } else {
        hi = middle;
      }
    }
    n = lo - 1;
    if (n < 0 || n >= p.runs) return found;
    // bounds that are not there are moved inside: no foreign memory
    found.first_row = clamp(long(runs.cu_q[n]), long(0), p.T);
    found.rows = clamp(long(runs.cu_q[n + 1]), long(0), p.T) - found.first_row;
    found.first_key = clamp(long(runs.cu_k[n]), long(0), p.S);
    found.keys = clamp(long(runs.cu_k[n + 1]), long(0), p.S) - found.first_key;
  } else {
    found.rows = p.T / p.runs;
    found.keys = p.S / p.runs;
    n = at / (of_keys ? found.keys : found.rows);
    found.first_row = n * found.rows;
    found.first_key = n * found.keys;
  }
  found.slot = runs.slots[n];
  found.start = runs.positions[n];
  found.live = found.slot >= 0 && found.slot < p.slots;
  return found;
}

// What one query row sees: `prefix` rows of its slot from `first` on, and `fresh` new keys from row `first_new` on.
struct Sight {
  bool live;
  long slot;
  long first;
  long prefix;
  long first_new;
  long fresh;
};

inline Sight sight_of(long t, Runs runs, constant CachedAttentionParams& p) {
  const Run run = run_of(t, false, runs, p);
  if (!run.live) return {false, 0, 0, 0, 0, 0};
  const long at = run.start + run.keys - run.rows + t - run.first_row;
  const long lowest = p.left < 0 ? 0 : max(at - p.left, long(0));
  const long prefix_end = min(min(run.start, at + 1), p.W), new_first = max(lowest - run.start, long(0));
  return {true, run.slot, lowest, max(prefix_end - lowest, long(0)), run.first_key + new_first,
          max(min(run.keys, at - run.start + 1) - new_first, long(0))};
}

// The cached row `w` of a slot, in elements from the cache's first.
inline long cached_row(long w, long slot, device const int* table, constant Strides& strides,
                       constant CachedAttentionParams& p) {
  if (p.table_stride == 0) return slot * strides.batch + w * strides.row;
  const long page = clamp(long(table[slot * p.table_stride + w / p.page_size]), long(0), p.pages - 1);
  return page * strides.batch + w % p.page_size * strides.row;
}

template <typename C>
inline float stored(device const C* row, device const half* scale, long d) {
  return float(row[d]);
}
template <>
inline float stored<char>(device const char* row, device const half* scale, long d) {  // q8_0
  return float(row[d]) * float(scale[d / 32]);
}
