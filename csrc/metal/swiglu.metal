// Gated linear units: riftco/kernels/swiglu/spec.py says what they mean. Elementwise, in float32; a threadgroup takes a
// stretch of one row at a time.
#include <metal_stdlib>
using namespace metal;
#include "common.h"

struct SwigluParams {  // as riftco/metal/swiglu.py packs it
  Rows gate;
  long gate_stride;
  Rows up;
  long up_stride;
  Rows d_out;
  long d_out_stride;
  long N;
  long F;
  long activation;  // 0 silu, 1 gelu, 2 gelu_tanh
  long need_gate;
  long need_up;
};

#define STRETCH 1024

struct Stretch {
  long n;
  long first;
  long last;  // and one more
};

inline long stretches(constant SwigluParams& p) { return (p.F + STRETCH - 1) / STRETCH; }

inline Stretch stretch(constant SwigluParams& p, long unit) {
  const long first = unit % stretches(p) * STRETCH;
  return {unit / stretches(p), first, min(first + STRETCH, p.F)};
}

struct Gate {  // the activation is g * s, its derivative is slope
  float s;
  float slope;
};

inline float sigmoid(float x) {
  const float e = precise::exp(-abs(x));  // never above 1, so that nothing overflows
  // exactly 0 where exp(-x) is beyond float32, as in PyTorch's x / (1 + exp(-x)): an infinite factor then gives NaN
  return (x >= 0.0f ? 1.0f : x < -88.72284f ? 0.0f : e) / (1.0f + e);
}

// The standard normal's distribution function, to float32's accuracy. Metal has no erf: around 0 a polynomial in g^2,
// beyond 1 the density times one in 1 / (1 + 0.4 |g|), both fitted by least squares.
inline float normal_cdf(float g) {
  const float a = abs(g), u = g * g;
  if (a < 1.0f)
    return 0.5f + g * (0.39894229f + u * (-0.066490382f + u * (0.0099735502f + u * (-0.0011872890f +
           u * (0.00011532113f + u * (-9.2747432e-06f + u * 5.3737813e-07f))))));
  const float t = 1.0f / (1.0f + 0.4f * a);
  const float q = -1.8372570e-05f + t * (0.16004518f + t * (0.15447238f + t * (0.16520901f + t * (-0.033872321f +
                  t * (0.29421908f + t * (-0.42922458f + t * (0.24463131f + t * (-0.059212439f + t * 0.0037507319f))))))));
  const float tail = precise::exp(-0.5f * u) * q;
  return g < 0.0f ? tail : 1.0f - tail;
}

inline Gate activated(float g, long activation) {
  const float near = clamp(g, -30.0f, 30.0f);  // s is 0 or 1 beyond, and powers of g must not become infinite
  if (activation == 1) {
    const float s = normal_cdf(near);
    return {s, s + g * precise::exp(-0.5f * near * near) * 0.3989422804014327f};
  }
  float u2 = g, d_u2 = 1.0f;
  if (activation == 2) {
    u2 = 1.5957691216057308f * (near + 0.044715f * near * near * near);
    d_u2 = 1.5957691216057308f * (1.0f + 0.134145f * near * near);
  }
  const float s = sigmoid(u2);
  return {s, s + g * s * sigmoid(-u2) * d_u2};
}

template <typename T>
[[kernel]] void swiglu_fwd(
    device T* out [[buffer(0)]],
    device const T* gate [[buffer(1)]],
    device const T* up [[buffer(2)]],
    constant SwigluParams& p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  for (long unit = group; unit < p.N * stretches(p); unit += groups) {
    const Stretch at = stretch(p, unit);
    const long n = at.n;
    device const T* g = gate + row_offset(p.gate, n);
    device const T* u = up + row_offset(p.up, n);
    for (long f = at.first + thread_index; f < at.last; f += threads) {
      const float x = float(g[f * p.gate_stride]);
      out[n * p.F + f] = T(x * activated(x, p.activation).s * float(u[f * p.up_stride]));
    }
  }
}

template <typename T>
[[kernel]] void swiglu_bwd(
    device T* d_gate [[buffer(0)]],
    device T* d_up [[buffer(1)]],
    device const T* d_out [[buffer(2)]],
    device const T* gate [[buffer(3)]],
    device const T* up [[buffer(4)]],
    constant SwigluParams& p [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  for (long unit = group; unit < p.N * stretches(p); unit += groups) {
    const Stretch at = stretch(p, unit);
    const long n = at.n;
    device const T* g = gate + row_offset(p.gate, n);
    device const T* u = up + row_offset(p.up, n);
    device const T* d = d_out + row_offset(p.d_out, n);
    for (long f = at.first + thread_index; f < at.last; f += threads) {
      const float x = float(g[f * p.gate_stride]), dy = float(d[f * p.d_out_stride]);
      const Gate a = activated(x, p.activation);
      if (p.need_gate) d_gate[n * p.F + f] = T(dy * float(u[f * p.up_stride]) * a.slope);
      if (p.need_up) d_up[n * p.F + f] = T(dy * (x * a.s));
    }
  }
}

#define INSTANTIATE(NAME, T)                                                                                         \
  template [[host_name("swiglu_fwd_" NAME)]] [[kernel]] decltype(swiglu_fwd<T>) swiglu_fwd<T>;                       \
  template [[host_name("swiglu_bwd_" NAME)]] [[kernel]] decltype(swiglu_bwd<T>) swiglu_bwd<T>;

INSTANTIATE("f32", float)
INSTANTIATE("f16", half)
INSTANTIATE("bf16", bfloat)
