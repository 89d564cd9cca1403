// Sixteen floats and sixteen bytes, whatever registers hold them: AVX-512, AVX2, or loops for the compiler to vectorise.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define RIFTCO_X86 1
#else
#define RIFTCO_X86 0
#endif
#if RIFTCO_X86 && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define RIFTCO_WIDE 1
#else
#define RIFTCO_WIDE 0
#endif

namespace riftco {

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float from_bf16(uint16_t h) { return bits<float>(uint32_t(h) << 16); }

inline uint16_t to_bf16(float f) {
    if (std::isnan(f)) return 0x7fc0;
    const uint32_t u = bits<uint32_t>(f);
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// What a thread does that waits for another.
inline void pause() {
#if RIFTCO_X86
    _mm_pause();
#endif
}

#if RIFTCO_X86
inline float from_f16(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t to_f16(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }
#else
inline float from_f16(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return bits<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    return bits<float>(sign | bits<uint32_t>(bits<float>(rest << 13) * 0x1p112f));  // subnormals too, exactly
}
inline uint16_t to_f16(float f) {
    const uint32_t u = bits<uint32_t>(f), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (rest < 0x38800000) {  // subnormal: the addition rounds to its last bit
        const float near = bits<float>(rest) + 0.5f;
        return uint16_t(sign | (bits<uint32_t>(near) - 0x3f000000));
    }
    return uint16_t(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13));
}
#endif

#if RIFTCO_X86
using Bytes = __m128i;
inline Bytes bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline Bytes low(Bytes b, int mask = 15) { return _mm_and_si128(b, _mm_set1_epi8(char(mask))); }
inline Bytes shifted(Bytes b, int n, int mask) { return low(_mm_srli_epi16(b, n), mask); }  // right, then masked
inline Bytes raised(Bytes b, int n) { return _mm_slli_epi16(b, n); }  // left; what leaves a byte must be 0
inline Bytes either(Bytes a, Bytes b) { return _mm_or_si128(a, b); }
#else
struct Bytes {
    uint8_t v[16];
};
inline Bytes bytes(const void* p) {
    Bytes b;
    std::memcpy(b.v, p, 16);
    return b;
}
inline Bytes low(Bytes b, int mask = 15) {
    for (auto& x : b.v) x &= mask;
    return b;
}
inline Bytes shifted(Bytes b, int n, int mask) {
    for (auto& x : b.v) x = (x >> n) & mask;
    return b;
}
inline Bytes raised(Bytes b, int n) {
    for (auto& x : b.v) x = uint8_t(x << n);
    return b;
}
inline Bytes either(Bytes a, Bytes b) {
    for (int i = 0; i < 16; i++) a.v[i] |= b.v[i];
    return a;
}
#endif

// Bit i of `mask` becomes byte i: 0 or 16.
inline Bytes sixteens(uint32_t mask) {
#if RIFTCO_WIDE
    return _mm_maskz_set1_epi8(__mmask16(mask), 16);
#else
    uint8_t b[16];
    for (int i = 0; i < 16; i++) b[i] = uint8_t((mask >> i & 1) << 4);
    return bytes(b);
#endif
}

#if RIFTCO_WIDE
struct Floats {
    __m512 v;
};
inline Floats zero() { return {_mm512_setzero_ps()}; }
inline Floats all(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline float sum(Floats a) { return _mm512_reduce_add_ps(a.v); }
inline Floats unsigned_floats(Bytes b) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(b))}; }
inline Floats signed_floats(Bytes b) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b))}; }
inline Floats load_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Floats load_bf16(const uint16_t* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline Floats rounded_bf16(Floats a) {
    const __m512i u = _mm512_castps_si512(a.v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return {_mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(int(0xffff0000))))};
}
#elif RIFTCO_X86
struct Floats {
    __m256 a, b;
};
inline Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline Floats fma(Floats x, Floats y, Floats z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline float sum(Floats x) {
    const __m256 s = _mm256_add_ps(x.a, x.b);
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
inline Floats unsigned_floats(Bytes b) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(b, 8)))};
}
inline Floats signed_floats(Bytes b) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(b, 8)))};
}
inline Floats load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(bytes(p)), _mm256_cvtph_ps(bytes(p + 8))}; }
inline Floats load_bf16(const uint16_t* p) {
    const __m256i a = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bytes(p)), 16);
    const __m256i b = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bytes(p + 8)), 16);
    return {_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)};
}
inline __m256 rounded_bf16(__m256 a) {
    const __m256i u = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(int(0xffff0000))));
}
inline Floats rounded_bf16(Floats x) { return {rounded_bf16(x.a), rounded_bf16(x.b)}; }
#else
struct Floats {
    float v[16];
};
template <class Of>
inline Floats each(Of of) {
    Floats r;
    for (int i = 0; i < 16; i++) r.v[i] = of(i);
    return r;
}
inline Floats all(float x) {
    return each([&](int) { return x; });
}
inline Floats zero() { return all(0); }
inline Floats load(const float* p) {
    return each([&](int i) { return p[i]; });
}
inline void store(float* p, Floats a) { std::memcpy(p, a.v, sizeof a.v); }
inline Floats fma(Floats a, Floats b, Floats c) {
    return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
inline Floats operator+(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Floats operator*(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline float sum(Floats a) {
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) a.v[i] += a.v[i + n];
    return a.v[0];
}
inline Floats unsigned_floats(Bytes b) {
    return each([&](int i) { return float(b.v[i]); });
}
inline Floats signed_floats(Bytes b) {
    return each([&](int i) { return float(int8_t(b.v[i])); });
}
inline Floats load_f16(const uint16_t* p) {
    return each([&](int i) { return from_f16(p[i]); });
}
inline Floats load_bf16(const uint16_t* p) {
    return each([&](int i) { return from_bf16(p[i]); });
}
inline Floats rounded_bf16(Floats a) {
    return each([&](int i) { return from_bf16(to_bf16(a.v[i])); });
}
#endif

// Sixteen values of four bits q as q * scale + offset; the product is exact, so each is rounded once.
inline void nibbles(Bytes b, float scale, float offset, Floats& lower, Floats& upper) {
#if RIFTCO_WIDE
    const __m512 count = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 table = _mm512_fmadd_ps(count, _mm512_set1_ps(scale), _mm512_set1_ps(offset));
    const __m512i at = _mm512_cvtepu8_epi32(b);  // of an index the look-up reads four bits
    lower = {_mm512_permutexvar_ps(at, table)};
    upper = {_mm512_permutexvar_ps(_mm512_srli_epi32(at, 4), table)};
#else
    lower = fma(unsigned_floats(low(b)), all(scale), all(offset));
    upper = fma(unsigned_floats(shifted(b, 4, 15)), all(scale), all(offset));
#endif
}

// e^x to about one unit in the last place, for x from -87 to 88.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float n = std::floor(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const float e = p * r * r + r + 1.0f;
    return e * bits<float>((int32_t(n) + 127) << 23);
}

}  // namespace riftco
