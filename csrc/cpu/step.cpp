// One forward of a decoder over a cache for a few rows: what riftco/models/decoder.py computes, without leaving the CPU's
// caches between layers. One parallel region; between two phases that share rows stands a barrier.
#include <omp.h>

#include <atomic>
#include <optional>

#include "attention.h"
#include "product.h"

namespace riftco {

// Matrix, Rows, Layer, Model and Step are filled in by riftco/cpu/step.py, field by field.
struct Layer {
    Matrix q, k, v, o, gate, up, down;
    const float *before_attention, *after_attention, *before_mlp, *after_mlp;  // norms' weights; after_*: null if none
    const float *q_norm, *k_norm;                                              // null if none
    Rows cache;
    int64_t group, rotates, local, left;  // left: how far back a row sees; -1: to the start
};

struct Model {
    int64_t n_layers, C, H, K, D, F, V, half, bf16, gelu;  // half: pairs of a head that rotate
    double eps, scale, softcap, final_softcap;
    const Layer* layers;
    const float* norm;
    Matrix head;
};

struct Step {
    int64_t rows, capacity, parts, threads;  // parts: of the cached positions of a row, and one of the new ones
    const float* x;                          // [rows, C]
    const float *cos[2], *sin[2];            // [rows, half]: everywhere, and of layers that are local
    const int64_t *slot, *start, *begin;     // of each row: where its run's first row is, in the slot and here
    const int64_t* const* at;                // of each group of layers: the physical row of each row; -1: not kept
    int64_t wanted;
    const int64_t* which;  // [wanted]
    float* logits;         // [wanted in whole groups of ROWS, V]
    float* work;
};

inline int64_t lines(int64_t n) { return (n + 15) / 16 * 16; }
inline int64_t ranks(const Matrix& m) { return padded(m.rank); }

// The scratch, in floats. What lies beyond a row's end in it stays zero.
struct Work {
    int64_t rows, Dp, heads, qkv_ld, attn_ld, mid_ld, x_ld, xa_ld, part_ld;
    int64_t qkv, attn, y, mid, xa, parts, own, each, total;
    int64_t x, h, rotated, k, v, s, gate, up;  // from a thread's own part on

    Work(const Model& m, const Step& s) {
        rows = (s.capacity + ROWS - 1) / ROWS * ROWS;
        Dp = lines(m.D), heads = m.H + 2 * m.K;
        qkv_ld = lines(heads * m.D), attn_ld = padded(m.H * m.D), mid_ld = padded(m.F), x_ld = padded(m.C);
        xa_ld = 0;
        for (int64_t i = 0; i < m.n_layers; i++) {
            const Layer& l = m.layers[i];
            xa_ld = std::max({xa_ld, ranks(l.q) + ranks(l.k) + ranks(l.v), ranks(l.o), ranks(l.gate) + ranks(l.up), ranks(l.down)});
        }
        xa_ld = std::max(xa_ld, ranks(m.head));
        part_ld = 16 + Dp;
        int64_t at = 0;
        const auto take = [&](int64_t n) { return at += lines(n), at - lines(n); };
        qkv = take(rows * qkv_ld), attn = take(rows * attn_ld), y = take(rows * x_ld), mid = take(rows * mid_ld);
        xa = take(rows * xa_ld), parts = take(s.capacity * m.H * s.parts * part_ld), own = at;
        at = 0;
        x = take(rows * x_ld), h = take(rows * x_ld), rotated = take(rows * heads * Dp);
        const int64_t most = std::max(CHUNK, s.capacity);
        k = take(most * Dp), v = take(most * Dp), this->s = take(most);
        gate = take(rows * TILE), up = take(rows * TILE);
        each = at, total = own + each * s.threads;
    }
};

struct Share {
    int64_t from, to;
};

// Where threads wait for each other. They watch for about as long as a phase takes, then sleep: OpenMP's own barrier would
// watch for a millisecond, which on a machine that others use is time that the awaited thread does not get.
class Barrier {
  public:
    explicit Barrier(int threads) : threads(threads), missing(threads) {}

    void wait() {
        const uint32_t now = phase.load(std::memory_order_acquire);
        if (missing.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            missing.store(threads, std::memory_order_relaxed);
            phase.store(now + 1, std::memory_order_release);
            phase.notify_all();
            return;
        }
        for (int i = 0; i < WATCHED; i++) {
            if (phase.load(std::memory_order_acquire) != now) return;
            pause();
        }
        while (phase.load(std::memory_order_acquire) == now) phase.wait(now, std::memory_order_acquire);
    }

  private:
    static constexpr int WATCHED = 2000;
    const int threads;
    std::atomic<int> missing;
    std::atomic<uint32_t> phase{0};
};

class Thread {
  public:
    Thread(const Model& m, const Step& s, Barrier& others, int t, int threads)
        : m(m), s(s), w(m, s), others(others), t(t), threads(threads), bf16(m.bf16), shared(s.work),
          own(s.work + w.own + t * w.each) {}

    void run() {
        for (int64_t r = 0; r < s.rows; r++) std::memcpy(own + w.x + r * w.x_ld, s.x + r * m.C, m.C * 4);
        for (int64_t i = 0; i < m.n_layers; i++) {
            attend(m.layers[i]);
            feed(m.layers[i]);
        }
        head();
    }

  private:
    const Model& m;
    const Step& s;
    const Work w;
    Barrier& others;
    const int t, threads;
    const bool bf16;
    float *const shared, *const own;

    void barrier() { others.wait(); }

    // This thread's part of n, in multiples of `unit`.
    Share share(int64_t n, int64_t unit) const {
        const int64_t units = (n + unit - 1) / unit;
        return {std::min(n, units * t / threads * unit), std::min(n, units * (t + 1) / threads * unit)};
    }

    void norm(const float* x, const float* weight, int64_t n, float* y) const {
        Floats squares = zero();
        int64_t i = 0;
        for (; i + 16 <= n; i += 16) squares = fma(load(x + i), load(x + i), squares);
        float total = sum(squares);
        for (; i < n; i++) total += x[i] * x[i];
        const float r = 1.0f / std::sqrt(total / float(n) + float(m.eps));
        for (i = 0; i < n; i++) y[i] = x[i] * r * weight[i];
        if (bf16)
            for (i = 0; i < n; i++) y[i] = rounded(y[i], true);
    }

    // x += y, which is normed first where it has a norm of its own; then h = norm(x). Every thread does it for itself.
    void join(const float* own_norm, const float* next_norm) {
        for (int64_t r = 0; r < s.rows; r++) {
            float *x = own + w.x + r * w.x_ld, *h = own + w.h + r * w.x_ld;
            const float* y = shared + w.y + r * w.x_ld;
            if (own_norm) norm(y, own_norm, m.C, h), y = h;
            for (int64_t i = 0; i < m.C; i++) x[i] = rounded(x[i] + y[i], bf16);
            if (next_norm) norm(x, next_norm, m.C, h);
        }
    }

    // x A^T of layers that read the same x, side by side in the scratch; where one of them has an adapter.
    void down_ranks(std::initializer_list<const Matrix*> layers, const float* x, int64_t ldx) {
        int64_t at = 0;
        for (const Matrix* l : layers) {
            if (!l->rank) continue;
            const Matrix a{reinterpret_cast<const uint8_t*>(l->a), nullptr, nullptr, nullptr, 0, l->rank, l->k, l->k * 4, 0, 1};
            const auto [from, to] = share(l->rank, 4);
            float* xa = shared + w.xa + at;
            if (from < to) product<F32, false>(a, x, ldx, s.rows, from, to - from, xa + from, w.xa_ld);
            if (t == threads - 1)
                for (int64_t r = 0; r < s.rows; r++) std::fill(xa + r * w.xa_ld + l->rank, xa + r * w.xa_ld + ranks(*l), 0.0f);
            at += ranks(*l);
        }
        if (at) barrier();
    }

    // This thread's share of a layer's outputs, into y [rows, ldy].
    void outputs(const Matrix& l, const float* x, int64_t ldx, int64_t xa, float* y, int64_t ldy) {
        const auto [from, to] = share(l.n, 4);
        if (from < to) linear(l, bf16, x, ldx, shared + w.xa + xa, w.xa_ld, s.rows, from, to, y + from, ldy);
    }

    void attend(const Layer& l) {
        const float* h = own + w.h;
        if (&l == m.layers)
            for (int64_t r = 0; r < s.rows; r++) norm(own + w.x + r * w.x_ld, l.before_attention, m.C, own + w.h + r * w.x_ld);
        down_ranks({&l.q, &l.k, &l.v}, h, w.x_ld);
        float* qkv = shared + w.qkv;
        outputs(l.q, h, w.x_ld, 0, qkv, w.qkv_ld);
        outputs(l.k, h, w.x_ld, ranks(l.q), qkv + m.H * m.D, w.qkv_ld);
        outputs(l.v, h, w.x_ld, ranks(l.q) + ranks(l.k), qkv + (m.H + m.K) * m.D, w.qkv_ld);
        barrier();
        rotate(l);
        for (int64_t part = 0, unit = 0; part < s.parts; part++)
            for (int64_t r = 0; r < s.rows; r++)
                for (int64_t kh = 0; kh < m.K; kh++, unit++)
                    if (unit % threads == t) attend_part(l, r, kh, part);
        barrier();
        for (int64_t r = 0, unit = 0; r < s.rows; r++)
            for (int64_t kh = 0; kh < m.K; kh++, unit++)
                if (unit % threads == t) finish_head(l, r, kh);
        barrier();
        const float* attn = shared + w.attn;
        down_ranks({&l.o}, attn, w.attn_ld);
        outputs(l.o, attn, w.attn_ld, 0, shared + w.y, w.x_ld);
        barrier();
        join(l.after_attention, l.before_mlp);
    }

    // Heads of q, k and v, each [Dp], normed and rotated where the layer does so. Every thread does it for itself.
    void rotate(const Layer& l) {
        const float *cos = s.cos[l.local], *sin = s.sin[l.local];
        for (int64_t r = 0; r < s.rows; r++)
            for (int64_t head = 0; head < w.heads; head++) {
                const float* from = shared + w.qkv + r * w.qkv_ld + head * m.D;
                float* to = rotated(r, head);
                const float* weight = head < m.H ? l.q_norm : head < m.H + m.K ? l.k_norm : nullptr;
                if (weight)
                    norm(from, weight, m.D, to);
                else
                    std::memcpy(to, from, m.D * 4);
                if (!l.rotates || head >= m.H + m.K) continue;
                const float *c = cos + r * m.half, *si = sin + r * m.half;
                for (int64_t i = 0; i < m.half; i++) {
                    const float a = to[i], b = to[i + m.half];
                    to[i] = rounded(a * c[i] - b * si[i], bf16);
                    to[i + m.half] = rounded(b * c[i] + a * si[i], bf16);
                }
            }
    }

    float* rotated(int64_t r, int64_t head) const { return own + w.rotated + (r * w.heads + head) * w.Dp; }

    // The cached positions that row r sees.
    Share seen(const Layer& l, int64_t r) const {
        const int64_t position = s.start[r] + r - s.begin[r];
        return {l.left < 0 ? 0 : std::max<int64_t>(0, position - l.left), s.start[r]};
    }

    int64_t parts_of(const Share& cached) const { return (std::max<int64_t>(0, cached.to - cached.from) + CHUNK - 1) / CHUNK; }

    Part part(int64_t r, int64_t head, int64_t p) const {
        float* at = shared + w.parts + ((r * m.H + head) * s.parts + p) * w.part_ld;
        return {at, at + 1, at + 16};
    }

    // Part p of what row r sees under key head kh; the last one is the new rows of its run.
    void attend_part(const Layer& l, int64_t r, int64_t kh, int64_t p) {
        const Share cached = seen(l, r);
        const int64_t count = parts_of(cached), G = m.H / m.K;
        if (p > count) return;
        float *k = own + w.k, *v = own + w.v;
        int64_t n = 0;
        if (p < count) {
            const int64_t first = cached.from + p * CHUNK, last = std::min(first + CHUNK, cached.to);
            for (int64_t j = first; j < last; j++, n++) {
                const int64_t at = row_of(l.cache, s.slot[r], j) * m.K + kh;
                soon(l.cache, row_of(l.cache, s.slot[r], std::min(j + SOON, cached.to - 1)) * m.K + kh, m.D);
                fetch(l.cache, l.cache.k, l.cache.k_scale, at, m.D, k + n * w.Dp);
                fetch(l.cache, l.cache.v, l.cache.v_scale, at, m.D, v + n * w.Dp);
            }
        } else {
            const int64_t first = l.left < 0 ? s.begin[r] : std::max(s.begin[r], r - l.left);
            for (int64_t j = first; j <= r; j++, n++) {
                std::memcpy(k + n * w.Dp, rotated(j, m.H + kh), m.D * 4);
                std::memcpy(v + n * w.Dp, rotated(j, m.H + m.K + kh), m.D * 4);
            }
        }
        for (int64_t g = 0; g < G; g++)
            part_of(k, v, n, rotated(r, kh * G + g), w.Dp, float(m.scale), float(m.softcap), own + w.s, part(r, kh * G + g, p));
    }

    // The parts of one key head's queries become one; then its new key and value go into the cache.
    void finish_head(const Layer& l, int64_t r, int64_t kh) {
        const int64_t count = parts_of(seen(l, r)) + 1, G = m.H / m.K;
        for (int64_t head = kh * G; head < (kh + 1) * G; head++) {
            float* out = shared + w.attn + r * w.attn_ld + head * m.D;
            float most = -INFINITY, total = 0;
            for (int64_t p = 0; p < count; p++) most = std::max(most, *part(r, head, p).most);
            for (int64_t i = 0; i < m.D; i++) out[i] = 0;
            for (int64_t p = 0; p < count; p++) {
                const Part of = part(r, head, p);
                const float weight = exponential(*of.most - most);
                total += weight * *of.total;
                for (int64_t i = 0; i < m.D; i++) out[i] += weight * of.acc[i];
            }
            for (int64_t i = 0; i < m.D; i++) out[i] = rounded(out[i] / total, bf16);
        }
        const int64_t row = s.at[l.group][r];
        if (row < 0) return;
        keep(l.cache, l.cache.k, l.cache.k_scale, row * m.K + kh, m.D, rotated(r, m.H + kh));
        keep(l.cache, l.cache.v, l.cache.v_scale, row * m.K + kh, m.D, rotated(r, m.H + m.K + kh));
    }

    void feed(const Layer& l) {
        const float* h = own + w.h;
        down_ranks({&l.gate, &l.up}, h, w.x_ld);
        float *gate = own + w.gate, *up = own + w.up, *mid = shared + w.mid;
        const auto [from, to] = share(m.F, 4);
        for (int64_t n = from; n < to; n += TILE) {
            const int64_t end = std::min(n + TILE, to);
            linear(l.gate, bf16, h, w.x_ld, shared + w.xa, w.xa_ld, s.rows, n, end, gate, TILE);
            linear(l.up, bf16, h, w.x_ld, shared + w.xa + ranks(l.gate), w.xa_ld, s.rows, n, end, up, TILE);
            for (int64_t r = 0; r < s.rows; r++)
                for (int64_t i = 0; i < end - n; i++)
                    mid[r * w.mid_ld + n + i] = rounded(activated(gate[r * TILE + i]) * up[r * TILE + i], bf16);
        }
        barrier();
        down_ranks({&l.down}, mid, w.mid_ld);
        outputs(l.down, mid, w.mid_ld, 0, shared + w.y, w.x_ld);
        barrier();
        const bool last = &l == m.layers + m.n_layers - 1;
        join(l.after_mlp, last ? m.norm : (&l)[1].before_attention);
    }

    float activated(float g) const {
        if (!m.gelu) return g / (1.0f + exponential(-g));
        return 0.5f * g * (1.0f + std::tanh(0.79788456f * (g + 0.044715f * g * g * g)));
    }

    // Logits of the wanted rows, which move to the front.
    void head() {
        float* h = own + w.h;
        for (int64_t i = 0; i < s.wanted; i++) std::memmove(h + i * w.x_ld, h + s.which[i] * w.x_ld, m.C * 4);
        if (!s.wanted) return;
        down_ranks({&m.head}, h, w.x_ld);
        const auto [from, to] = share(m.V, 16);
        if (from >= to) return;
        linear(m.head, bf16, h, w.x_ld, shared + w.xa, w.xa_ld, s.wanted, from, to, s.logits + from, m.V);
        const float cap = float(m.final_softcap);
        for (int64_t i = 0; i < s.wanted && cap > 0; i++)
            for (int64_t n = from; n < to; n++) {
                float& z = s.logits[i * m.V + n];
                z = rounded(cap * rounded(std::tanh(rounded(z / cap, bf16)), bf16), bf16);
            }
    }
};

}  // namespace riftco

extern "C" {

// How many floats of scratch a step needs. They must be zero when a scratch is first used.
int64_t riftco_work(const riftco::Model* m, const riftco::Step* s) { return riftco::Work(*m, *s).total; }

void riftco_step(const riftco::Model* m, const riftco::Step* s) {
    std::optional<riftco::Barrier> barrier;
#pragma omp parallel num_threads(int(s->threads))
    {
#pragma omp single
        barrier.emplace(omp_get_num_threads());
        riftco::Thread(*m, *s, *barrier, omp_get_thread_num(), omp_get_num_threads()).run();
    }
}

int64_t riftco_cached_positions() { return riftco::CHUNK; }
}
