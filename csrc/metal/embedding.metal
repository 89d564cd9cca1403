// Taking and replacing rows: riftco/kernels/embedding/spec.py says what it means. A threadgroup takes a row at a time.
#include <metal_stdlib>
using namespace metal;

struct RowsParams {  // as riftco/metal/embedding.py packs it
  long count;        // rows that are written
  long C;
  long rows;  // of the table
  long stride;
  long stride_c;
  long other_stride;
  long other_stride_c;
  long padding;  // a row whose gradient is 0; -1: none
  long by_frequency;
};

// out[i] = x[ids[i]].
template <typename T>
[[kernel]] void gather_rows(
    device T* out [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device const long* ids [[buffer(2)]],
    constant RowsParams& p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  for (long i = group; i < p.count; i += groups) {
    const long id = ids[i];
    const bool inside = id >= 0 && id < p.rows;
    for (long c = thread_index; c < p.C; c += threads)
      out[i * p.C + c] = inside ? x[id * p.stride + c * p.stride_c] : T(NAN);
  }
}

// out[r] = the sum of d_out[order[j]] for first[r] <= j < first[r + 1], in that order.
template <typename T>
[[kernel]] void sum_rows(
    device T* out [[buffer(0)]],
    device const T* d_out [[buffer(1)]],
    device const long* order [[buffer(2)]],
    device const long* first [[buffer(3)]],
    constant RowsParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  for (long r = group; r < p.count; r += groups) {
    const long begin = first[r], end = r == p.padding ? begin : first[r + 1];
    const float over = p.by_frequency && end > begin ? float(end - begin) : 1.0f;
    for (long c = thread_index; c < p.C; c += threads) {
      float sum = 0.0f;
      for (long j = begin; j < end; j++) sum += float(d_out[order[j] * p.stride + c * p.stride_c]);
      out[r * p.C + c] = T(sum / over);
    }
  }
}

// out[r] = rows[owner[r]] where there is one, else x[r].
template <typename T>
[[kernel]] void scatter_rows(
    device T* out [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device const T* rows [[buffer(2)]],
    device const long* owner [[buffer(3)]],
    constant RowsParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  for (long r = group; r < p.count; r += groups) {
    const long from = owner[r];
    for (long c = thread_index; c < p.C; c += threads)
      out[r * p.C + c] = from < 0 ? x[r * p.stride + c * p.stride_c] : rows[from * p.other_stride + c * p.other_stride_c];
  }
}

// d_x[r] = d_out[r], but 0 where the row was replaced.
template <typename T>
[[kernel]] void kept_rows(
    device T* d_x [[buffer(0)]],
    device const T* d_out [[buffer(1)]],
    device const long* owner [[buffer(2)]],
    constant RowsParams& p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  for (long r = group; r < p.count; r += groups) {
    const bool kept = owner[r] < 0;
    for (long c = thread_index; c < p.C; c += threads)
      d_x[r * p.C + c] = kept ? d_out[r * p.stride + c * p.stride_c] : T(0.0f);
  }
}

// d_rows[i] = d_out[ids[i]], but 0 where a later row took its place.
template <typename T>
[[kernel]] void owned_rows(
    device T* d_rows [[buffer(0)]],
    device const T* d_out [[buffer(1)]],
    device const long* ids [[buffer(2)]],
    device const long* owner [[buffer(3)]],
    constant RowsParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  for (long i = group; i < p.count; i += groups) {
    const long id = ids[i];
    const bool last = id >= 0 && id < p.rows && owner[id] == i;
    for (long c = thread_index; c < p.C; c += threads)
      d_rows[i * p.C + c] = last ? d_out[id * p.stride + c * p.stride_c] : T(0.0f);
  }
}

#define INSTANTIATE(NAME, T)                                                                                         \
  template [[host_name("embedding_gather_" NAME)]] [[kernel]] decltype(gather_rows<T>) gather_rows<T>;                    \
  template [[host_name("embedding_sum_" NAME)]] [[kernel]] decltype(sum_rows<T>) sum_rows<T>;                             \
  template [[host_name("embedding_scatter_" NAME)]] [[kernel]] decltype(scatter_rows<T>) scatter_rows<T>;                 \
  template [[host_name("embedding_kept_" NAME)]] [[kernel]] decltype(kept_rows<T>) kept_rows<T>;                          \
  template [[host_name("embedding_owned_" NAME)]] [[kernel]] decltype(owned_rows<T>) owned_rows<T>;

INSTANTIATE("f32", float)
INSTANTIATE("f16", half)
INSTANTIATE("bf16", bfloat)
