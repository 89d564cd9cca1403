// y = x W^T + bias + scale * (x A^T) B^T for a few rows of x: each weight is read once and decoded in registers.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "weights.h"

namespace riftco {

// What riftco/cpu/step.py fills in; the order of fields is the contract between the two.
struct Matrix {
    const uint8_t* data;
    const float* bias;  // or null
    const float *a, *b;  // [rank, k], [n, rank]; rank 0: no adapter
    int64_t format, n, k, row_bytes, rank;
    double scale;
};

constexpr int ROWS = 8;      // of x that are multiplied together
constexpr int TILE = 64;     // outputs made before the bias and the adapter are added
constexpr int GROUP = 32;    // weights decoded at once
constexpr int AHEAD = 8192;  // bytes: several rows of W are read at once, which processors do not foresee

inline int64_t padded(int64_t k) { return (k + GROUP - 1) / GROUP * GROUP; }

// The dtype of activations: results are held as floats and rounded to it where it has fewer bits.
inline float rounded(float x, bool bf16) { return bf16 ? from_bf16(to_bf16(x)) : x; }

// y[r * ldy + i] = x_r . w_i for W rows n0 + i, i < count. A sum's order depends on k alone: a row's result does not
// depend on how many rows come with it, nor on how rows of W are shared out. x [ROWS, ldx] is zero from k to padded(k).
template <class Format, int R, int N, bool BF16>
inline void dots(const Matrix& m, const float* x, int64_t ldx, int64_t row, float* y, int64_t ldy) {
    Floats even[N][R], odd[N][R];
    for (int n = 0; n < N; n++)
        for (int r = 0; r < R; r++) even[n][r] = odd[n][r] = zero();
    const uint8_t* w[N];
    for (int n = 0; n < N; n++) w[n] = m.data + (row + n) * m.row_bytes;
    constexpr int GROUPS = Format::BLOCK / GROUP;
    const auto add = [&](int n, int64_t at, Floats a, Floats b) {
        if constexpr (BF16) a = rounded_bf16(a), b = rounded_bf16(b);
        for (int r = 0; r < R; r++) {
            even[n][r] = fma(a, load(x + r * ldx + at), even[n][r]);
            odd[n][r] = fma(b, load(x + r * ldx + at + 16), odd[n][r]);
        }
    };
    const int64_t whole = m.k / Format::BLOCK;
    for (int64_t block = 0; block < whole; block++)
        for (int g = 0; g < GROUPS; g++)
            for (int n = 0; n < N; n++) {
                Floats a, b;
                const uint8_t* at = w[n] + block * Format::BYTES;
                __builtin_prefetch(at + g * (Format::BYTES / GROUPS) + AHEAD);
                Format::read(at, g, a, b);
                add(n, block * Format::BLOCK + g * GROUP, a, b);
            }
    if (const int64_t rest = m.k - whole * Format::BLOCK) {  // of dense weights alone: blocks end with their row
        for (int n = 0; n < N; n++) {
            uint8_t tail[Format::BYTES] = {};
            std::memcpy(tail, w[n] + whole * Format::BYTES, rest * Format::BYTES / Format::BLOCK);
            Floats a, b;
            Format::read(tail, 0, a, b);
            add(n, whole * GROUP, a, b);
        }
    }
    for (int n = 0; n < N; n++)
        for (int r = 0; r < R; r++) y[r * ldy + n] = sum(even[n][r] + odd[n][r]);
}

template <class Format, int R, int N, bool BF16>
inline void stretch(const Matrix& m, const float* x, int64_t ldx, int64_t n0, int64_t count, float* y, int64_t ldy) {
    int64_t i = 0;
    for (; i + N <= count; i += N) dots<Format, R, N, BF16>(m, x, ldx, n0 + i, y + i, ldy);
    for (; i < count; i++) dots<Format, R, 1, BF16>(m, x, ldx, n0 + i, y + i, ldy);
}

constexpr int AT_ONCE = RIFTCO_WIDE ? 4 : 2;  // W rows whose sums registers hold beside one row of x

template <class Format, bool BF16>
void product(const Matrix& m, const float* x, int64_t ldx, int64_t rows, int64_t n0, int64_t count, float* y, int64_t ldy) {
    for (int64_t r = 0; r < rows; r += ROWS) {
        const float* of = x + r * ldx;
        float* to = y + r * ldy;
        const int64_t left = rows - r;  // buffers have whole groups of ROWS rows: what is beyond is nobody's
        if (left == 1)
            stretch<Format, 1, AT_ONCE, BF16>(m, of, ldx, n0, count, to, ldy);
        else if (left == 2)
            stretch<Format, 2, AT_ONCE / 2, BF16>(m, of, ldx, n0, count, to, ldy);
        else if (left <= 4)
            stretch<Format, 4, AT_ONCE / 2, BF16>(m, of, ldx, n0, count, to, ldy);
        else
            stretch<Format, 8, 1, BF16>(m, of, ldx, n0, count, to, ldy);
    }
}

using Product = void (*)(const Matrix&, const float*, int64_t, int64_t, int64_t, int64_t, float*, int64_t);

// By GGML's numbers of formats; null where there is none.
inline Product product_of(int64_t format, bool bf16) {
    switch (format) {
        case 0: return product<F32, false>;
        case 30: return product<BF16, false>;
        case 2: return bf16 ? product<Q4_0, true> : product<Q4_0, false>;
        case 3: return bf16 ? product<Q4_1, true> : product<Q4_1, false>;
        case 6: return bf16 ? product<Q5_0, true> : product<Q5_0, false>;
        case 7: return bf16 ? product<Q5_1, true> : product<Q5_1, false>;
        case 8: return bf16 ? product<Q8_0, true> : product<Q8_0, false>;
        case 12: return bf16 ? product<Q4_K, true> : product<Q4_K, false>;
        case 13: return bf16 ? product<Q5_K, true> : product<Q5_K, false>;
        case 14: return bf16 ? product<Q6_K, true> : product<Q6_K, false>;
        default: return nullptr;
    }
}

// Outputs n0 to n1 of every row, at y[r * ldy + n - n0]. xa [rows, ldxa] is x A^T where there is an adapter.
inline void linear(const Matrix& m, bool bf16, const float* x, int64_t ldx, const float* xa, int64_t ldxa, int64_t rows,
                   int64_t n0, int64_t n1, float* y, int64_t ldy) {
    const Product base = product_of(m.format, bf16);
    float delta[ROWS * TILE];
    for (int64_t n = n0; n < n1; n += TILE) {
        const int64_t count = std::min<int64_t>(TILE, n1 - n);
        float* to = y + n - n0;
        base(m, x, ldx, rows, n, count, to, ldy);
        for (int64_t r = 0; r < rows && (m.bias || bf16); r++)
            for (int64_t i = 0; i < count; i++)
                to[r * ldy + i] = rounded(to[r * ldy + i] + (m.bias ? m.bias[n + i] : 0.0f), bf16);
        if (!m.rank) continue;
        const Matrix up{reinterpret_cast<const uint8_t*>(m.b), nullptr, nullptr, nullptr, 0, m.n, m.rank, m.rank * 4, 0, 1};
        for (int64_t r = 0; r < rows; r += ROWS) {
            const int64_t some = std::min<int64_t>(ROWS, rows - r);
            product<F32, false>(up, xa + r * ldxa, ldxa, some, n, count, delta, TILE);
            for (int64_t i = 0; i < some; i++)
                for (int64_t j = 0; j < count; j++) {
                    float& out = to[(r + i) * ldy + j];
                    out = rounded(out + float(m.scale) * delta[i * TILE + j], bf16);
                }
        }
    }
}

}  // namespace riftco
