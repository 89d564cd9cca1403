// Attention of a few new rows over a slot's cache and each other, and writing their keys and values into it.
#pragma once

#include <algorithm>

#include "simd.h"

namespace riftco {

constexpr int64_t CHUNK = 64;  // cached positions that a thread takes at once: their floats stay in its first cache

constexpr int64_t SOON = 32;   // how many of them a row is asked for before it is used

// A layer's part of the cache: [pages, page, K, D] contiguous; a slot is a page where there is no block table.
struct Rows {
    uint8_t *k, *v;
    uint16_t *k_scale, *v_scale;  // of q8_0, [pages, page, K, D / 32]
    const int32_t* table;         // [slots, table_stride] or null
    int64_t kind, page, table_stride;
};

enum Kind { FLOAT32, FLOAT16, BFLOAT16, INT8 };

inline int64_t row_of(const Rows& c, int64_t slot, int64_t position) {
    if (!c.table) return slot * c.page + position;
    return int64_t(c.table[slot * c.table_stride + position / c.page]) * c.page + position % c.page;
}

// Row [D] of one head as floats.
inline void fetch(const Rows& c, const uint8_t* of, const uint16_t* scale, int64_t at, int64_t D, float* out) {
    int64_t i = 0;
    if (c.kind == FLOAT32) {
        std::memcpy(out, reinterpret_cast<const float*>(of) + at * D, D * 4);
    } else if (c.kind == INT8) {  // D is a multiple of 32
        for (; i < D; i += 16)
            store(out + i, signed_floats(bytes(of + at * D + i)) * all(from_f16(scale[at * (D / 32) + i / 32])));
    } else {
        const uint16_t* h = reinterpret_cast<const uint16_t*>(of) + at * D;
        for (; i + 16 <= D; i += 16) store(out + i, c.kind == FLOAT16 ? load_f16(h + i) : load_bf16(h + i));
        for (; i < D; i++) out[i] = c.kind == FLOAT16 ? from_f16(h[i]) : from_bf16(h[i]);
    }
}

// GGUF's Q8_0, as riftco/kernels/cached_attention/write.py has it, bit for bit.
inline void quantize(const float* x, int8_t* codes, uint16_t* scale) {
    float most = 0;
    bool nan = false;
    for (int i = 0; i < 32; i++) most = std::max(most, std::fabs(x[i])), nan |= std::isnan(x[i]);
    const float s = nan ? NAN : most / 127.0f;
    const bool usable = s >= 0x1p-126f && s < INFINITY;
    const float inverse = usable ? 1.0f / s : 0.0f;
    for (int i = 0; i < 32; i++) {
        const float ratio = usable ? x[i] * inverse : 0.0f, size = std::fabs(ratio), whole = std::floor(size);
        const float code = std::min(whole + std::floor((size - whole) * 2), 127.0f);
        codes[i] = int8_t(ratio < 0 ? -code : code);
    }
    *scale = to_f16(s);
}

// Have a row of one head brought near.
inline void soon(const Rows& c, int64_t at, int64_t D) {
    const int64_t bytes = D * (c.kind == FLOAT32 ? 4 : c.kind == INT8 ? 1 : 2);
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(c.k + at * bytes + i);
        __builtin_prefetch(c.v + at * bytes + i);
    }
}

inline void keep(const Rows& c, uint8_t* to, uint16_t* scale, int64_t at, int64_t D, const float* x) {
    if (c.kind == FLOAT32) {
        std::memcpy(reinterpret_cast<float*>(to) + at * D, x, D * 4);
    } else if (c.kind == INT8) {
        for (int64_t i = 0; i < D; i += 32)
            quantize(x + i, reinterpret_cast<int8_t*>(to) + at * D + i, scale + (at * D + i) / 32);
    } else {
        uint16_t* h = reinterpret_cast<uint16_t*>(to) + at * D;
        for (int64_t i = 0; i < D; i++) h[i] = c.kind == FLOAT16 ? to_f16(x[i]) : to_bf16(x[i]);
    }
}

// A partial result of one query head: the largest score, the sum of exp(score - most), and the weighted values.
struct Part {
    float *most, *total, *acc;  // acc [Dp]
};

// The weighted sum of 16 N columns of v [count, Dp].
template <int N>
inline void weigh(const float* v, int64_t count, int64_t Dp, const float* weights, float* out) {
    Floats acc[N];
    for (int n = 0; n < N; n++) acc[n] = zero();
    for (int64_t j = 0; j < count; j++)
        for (int n = 0; n < N; n++) acc[n] = fma(all(weights[j]), load(v + j * Dp + 16 * n), acc[n]);
    for (int n = 0; n < N; n++) store(out + 16 * n, acc[n]);
}

// One query head [Dp] against `count` keys and values [count, Dp]; s has room for as many scores, in whole sixteens.
inline void part_of(const float* k, const float* v, int64_t count, const float* q, int64_t Dp, float scale, float softcap,
                    float* s, const Part& out) {
    float most = -INFINITY;
    for (int64_t j = 0; j < count; j++) {
        Floats dot = zero();
        for (int64_t i = 0; i < Dp; i += 16) dot = fma(load(q + i), load(k + j * Dp + i), dot);
        s[j] = sum(dot) * scale;
        if (softcap > 0) s[j] = std::tanh(s[j] / softcap) * softcap;
        most = std::max(most, s[j]);
    }
    for (int64_t j = 0; j < count; j++) s[j] = exponential(s[j] - most);
    Floats sums = zero();
    std::fill(s + count, s + (count + 15) / 16 * 16, 0.0f);
    for (int64_t j = 0; j < count; j += 16) sums = sums + load(s + j);
    *out.most = most, *out.total = sum(sums);
    int64_t i = 0;
    for (; i + 64 <= Dp; i += 64) weigh<4>(v + i, count, Dp, s, out.acc + i);
    for (; i < Dp; i += 16) weigh<1>(v + i, count, Dp, s, out.acc + i);
}

}  // namespace riftco
