// Weights as they are stored, 32 at a time as floats: dense ones, and GGUF's blocks (riftco/kernels/gguf_linear/formats.py).
#pragma once

#include "simd.h"

namespace riftco {

inline uint16_t half_at(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return h;
}
inline float float_at(const uint8_t* p) { return from_f16(half_at(p)); }
inline uint32_t word_at(const uint8_t* p) {
    uint32_t w;
    std::memcpy(&w, p, 4);
    return w;
}

// read(block, group, a, b): elements 32 * group to 32 * group + 31 of a block of BLOCK elements in BYTES bytes.
struct F32 {
    static constexpr int BLOCK = 32, BYTES = 128;
    static void read(const uint8_t* p, int, Floats& a, Floats& b) {
        const float* f = reinterpret_cast<const float*>(p);
        a = load(f), b = load(f + 16);
    }
};

struct BF16 {
    static constexpr int BLOCK = 32, BYTES = 64;
    static void read(const uint8_t* p, int, Floats& a, Floats& b) {
        const uint16_t* h = reinterpret_cast<const uint16_t*>(p);
        a = load_bf16(h), b = load_bf16(h + 16);
    }
};

struct Q4_0 {
    static constexpr int BLOCK = 32, BYTES = 18;
    static void read(const uint8_t* p, int, Floats& a, Floats& b) {
        const float d = float_at(p);
        nibbles(bytes(p + 2), d, -8 * d, a, b);  // (q - 8) d and q d - 8 d are both exact
    }
};

struct Q4_1 {
    static constexpr int BLOCK = 32, BYTES = 20;
    static void read(const uint8_t* p, int, Floats& a, Floats& b) {
        nibbles(bytes(p + 4), float_at(p), float_at(p + 2), a, b);
    }
};

struct Q5_0 {
    static constexpr int BLOCK = 32, BYTES = 22;
    static void read(const uint8_t* p, int, Floats& a, Floats& b) {
        const float d = float_at(p);
        const uint32_t fifth = word_at(p + 2);
        const Bytes q = bytes(p + 6);
        a = fma(unsigned_floats(either(low(q), sixteens(fifth & 0xffff))), all(d), all(-16 * d));
        b = fma(unsigned_floats(either(shifted(q, 4, 15), sixteens(fifth >> 16))), all(d), all(-16 * d));
    }
};

struct Q5_1 {
    static constexpr int BLOCK = 32, BYTES = 24;
    static void read(const uint8_t* p, int, Floats& a, Floats& b) {
        const Floats d = all(float_at(p)), m = all(float_at(p + 2));
        const uint32_t fifth = word_at(p + 4);
        const Bytes q = bytes(p + 8);
        a = fma(unsigned_floats(either(low(q), sixteens(fifth & 0xffff))), d, m);
        b = fma(unsigned_floats(either(shifted(q, 4, 15), sixteens(fifth >> 16))), d, m);
    }
};

struct Q8_0 {
    static constexpr int BLOCK = 32, BYTES = 34;
    static void read(const uint8_t* p, int, Floats& a, Floats& b) {
        const Floats d = all(float_at(p));
        a = signed_floats(bytes(p + 2)) * d, b = signed_floats(bytes(p + 18)) * d;
    }
};

// Scale and offset of group g of a Q4_K or Q5_K block: 6-bit factors in bytes 4 to 15.
inline void k_scale(const uint8_t* p, int g, float& scale, float& offset) {
    const uint8_t* s = p + 4;
    const int sc = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 2 & 48);
    const int m = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 2 & 48);
    scale = float_at(p) * float(sc), offset = -(float_at(p + 2) * float(m));
}

struct Q4_K {
    static constexpr int BLOCK = 256, BYTES = 144;
    static void read(const uint8_t* p, int g, Floats& a, Floats& b) {
        float d, m;
        k_scale(p, g, d, m);
        const uint8_t* q = p + 16 + g / 2 * 32;
        const int shift = g % 2 * 4;
        a = fma(unsigned_floats(shifted(bytes(q), shift, 15)), all(d), all(m));
        b = fma(unsigned_floats(shifted(bytes(q + 16), shift, 15)), all(d), all(m));
    }
};

struct Q5_K {
    static constexpr int BLOCK = 256, BYTES = 176;
    static void read(const uint8_t* p, int g, Floats& a, Floats& b) {
        float d, m;
        k_scale(p, g, d, m);
        const uint8_t* q = p + 48 + g / 2 * 32;
        const int shift = g % 2 * 4;
        a = fma(unsigned_floats(joined(q, p + 16, shift, g)), all(d), all(m));
        b = fma(unsigned_floats(joined(q + 16, p + 32, shift, g)), all(d), all(m));
    }
    static Bytes joined(const uint8_t* q, const uint8_t* high, int shift, int g) {
        return either(shifted(bytes(q), shift, 15), raised(shifted(bytes(high), g, 1), 4));
    }
};

struct Q6_K {
    static constexpr int BLOCK = 256, BYTES = 210;
    static void read(const uint8_t* p, int g, Floats& a, Floats& b) {
        const float d = float_at(p + 208);
        const int8_t* s = reinterpret_cast<const int8_t*>(p + 192) + 2 * g;
        const int half = g / 4, part = g % 4;  // 128 elements share 64 low and 32 high bytes
        const uint8_t *q = p + half * 64 + part % 2 * 32, *high = p + 128 + half * 32;
        a = of(joined(q, high, part), d * float(s[0])), b = of(joined(q + 16, high + 16, part), d * float(s[1]));
    }
    static Bytes joined(const uint8_t* q, const uint8_t* high, int part) {
        return either(shifted(bytes(q), part / 2 * 4, 15), raised(shifted(bytes(high), part * 2, 3), 4));
    }
    static Floats of(Bytes q, float scale) { return fma(unsigned_floats(q), all(scale), all(-32 * scale)); }
};

}  // namespace riftco
