"""Bugs planted in the shaders, by shader: (old, new, case of the room, or "beyond" for what beyond_cases.py launches).
`old` occurs once in the shader with its headers.
"""

NUMBERS = {  # the numbers of the case must be wrong
    "cached_attention_backward": [
        ("min(run.rows, place + p.left + 1)", "min(run.rows, place + p.left)", "window, softcap, sinks"),
        ("max(place, long(0))", "max(place - 1, long(0))", "runs of every length, spare rows of NaN"),
        ("head < (key_head + 1) * G", "head < key_head * G + 1", "runs of every length, spare rows of NaN"),
        ("stored<C>(v_row, vs_row, d)", "stored<C>(k_row, vs_row, d)", "decode, one row a slot"),
    ],
    "cached_attention": [
        ("scale[d / 32]", "scale[0]", "decode, q8_0 pages, a slot that is not there"),
        ("w / p.page_size]", "0]", "chunk over pages"),
        ("max(at - p.left, long(0))", "max(at - p.left - 1, long(0))", "window, softcap, sinks"),
        ("min(min(run.start, at + 1), p.W)", "min(run.start, p.W)", "more query rows than new keys"),
        ("at - run.start + 1) - new_first", "at - run.start) - new_first", "runs of every length, spare rows of NaN"),
        (
            "p.has_sinks && sees.live && piece == 0",
            "p.has_sinks && sees.live && piece == 1",
            "one chunk in pieces, q8_0",
        ),
        ("mine = head + min(long(simdgroup), heads - 1)", "mine = head", "decode, one row a slot"),
        ("piece * p.chunk)", "piece * p.chunk - 1)", "decode, eight rows, several pieces"),
        ("- shift(all.largest));", "- shift(totals[place * 2]));", "decode, eight rows, several pieces"),
        ("total = total * shrink +", "total = total +", "decode, eight rows, several pieces"),
    ],
    "attention_forward": [
        ("place + p.right + 1", "place + p.right", "causal, several tiles"),
        ("place - p.left)", "place - p.left - 1)", "window"),
        ("min(long(documents.cu_k[n + 1]), p.S)", "min(long(documents.cu_k[n + 1]) + 1, p.S)", "packed, more keys"),
        ("if (largest != -INFINITY) shrink =", "if (false) shrink =", "causal, several tiles"),
        ("part += simd_shuffle_xor(part, 2)", "part *= 2", "odd sizes"),
        ("total = largest > -INFINITY ? 1.0f : 0.0f", "total = 0.0f", "sinks"),
        ("row >= there.lo && row < there.hi", "row >= there.lo", "packed, spare rows of NaN"),
        ("d < D && row", "row", "head dim 7"),
    ],
    "attention_backward": [
        ("1.0f - (s / p.softcap) * (s / p.softcap)", "1.0f", "softcap"),
        ("weight * (dp - delta)", "weight * dp", "odd sizes"),
        ("place - p.right)", "place - p.right + 1)", "causal, several tiles"),
        ("head < (key_head + 1) * heads", "head < key_head * heads + 1", "odd sizes"),
        ("row = first - p.kv_grad_start + i", "row = first + i", "gradients of the last keys"),
        (
            "stage<T, BQ, DMAX>(q_tile, queries, p.q, begin, {begin, all.hi}",
            "stage<T, BQ, DMAX>(q_tile, queries, p.q, begin, {begin, 4096}",
            "packed, spare rows of NaN",
        ),
    ],
    "attention_rows": [
        ("live ? sum - (p.has_d_lse ? d_lse[at] : 0.0f) : 0.0f", "live ? sum : 0.0f", "odd sizes"),
        ("if (p.need_v && d < p.Dv)", "if (p.need_v && d < p.D)", "head dims differ"),
        (
            "for (long column = 0; column < p.D; column += threads)",
            "for (long column = 0; column < 1; column += threads)",
            "a row at a time",
        ),
    ],
    "cross_entropy": [
        ("v == y ? exp_m1(log_p) : probability", "v == y ? -exp_m1(log_p) : probability", "odd sizes"),
        ("factor * part.sum;", "part.sum;", "several blocks of V"),
        ("loss[n] = value * w;", "loss[n] = value;", "row weights, none"),
        ("d_loss[n * p.stride_up] * w : 0.0f", "d_loss[0] * w : 0.0f", "odd sizes"),
        ("p.ignore_index && y >= 0 &&", "p.ignore_index &&", "ignore_index 0, int32"),
        ("if (v != y) {", "if (v >= 0) {", "odd sizes"),
        ("factor * (part.energy + by * part.sum)", "factor * part.energy", "metrics, several blocks"),
        ("part.even + by * part.weight", "part.even", "smoothing, none"),
        ("d -= r.each * (p.has_class_weight ? class_weight[v] : 1.0f)", "d -= r.each", "smoothing and class weights"),
        ("d * (1.0f - (u / p.softcap) * (u / p.softcap))", "d * (1.0f - u / p.softcap)", "softcap"),
        ("rest += 2.0f * p.z_loss", "rest += p.z_loss", "z_loss"),
        ("place = simd_min(most == all_most", "place = simd_max(most == all_most", "metrics"),
        ("r.up_lse * probability", "r.up_lse", "lse"),
        ("g[e] = T(float(g[e]) * by)", "g[e] = T(float(g[e]) + by)", "several blocks of V, mean"),
    ],
    "nf4": [
        ("e & 1 ? byte & 15 : byte >> 4", "e & 1 ? byte >> 4 : byte & 15", "blocks across rows"),
        ("absmax[e >> shift]", "absmax[0]", "blocks across rows"),
        ("float total = simd_sum(sum[m])", "float total = sum[m]", "blocks across rows"),
        ("if (m < p.M) sum[m]", "if (m < 1) sum[m]", "blocks across rows"),
        ("simdgroup / 2 * 16", "0", "several tiles"),
        ("out[e] + (p.has_bias", "out[e] + (!p.has_bias", "several tiles"),
        ("x[row_offset(*rows, m) + k * stride]", "x[row_offset(*rows, k) + m * stride]", "several tiles"),
        (
            "product_tile<T>(a, b, m0, k0, p.M, p.K, p.N,",
            "product_tile<T>(a, b, m0, k0, p.M, p.K, p.N - 1,",
            "many rows",
        ),
    ],
    "swiglu": [
        ("x >= 0.0f ? 1.0f : e", "e", "odd sizes"),
        ("1.5957691216057308f * (1.0f + 0.134145f", "(1.0f + 0.134145f", "gelu_tanh"),
        ("g < 0.0f ? tail : 1.0f - tail", "tail", "gelu"),
        ("{s, s + g * precise::exp", "{s, s - g * precise::exp", "gelu"),
        ("unit % stretches(p) * STRETCH", "0", "several stretches of a row"),
        ("T(dy * float(u[f * p.up_stride]) * a.slope)", "T(dy * float(u[f]) * a.s)", "odd sizes"),
    ],
    "rope": [
        ("if (params.transpose) n = -n;", "", "half, grouped heads"),
        ("params.interleaved ? 2 * i + 1 : i + params.half_dim", "i + params.half_dim", "interleaved"),
        ("h = e / rest, d = turned + e % rest", "h = e % s.heads, d = turned", "partial"),
        ("p = params.has_positions ?", "p = params.has_positions > 1 ?", "packed, positions"),
        ("if (params.has_k) turn", "if (!params.has_k) turn", "half, grouped heads"),
    ],
    "adam": [
        ("if (!committed[0]) return;", "", "refused"),
        ("param[e] = P(value - rate * m /", "param[e] = P(value - rate * rate * m /", "first step"),
        ("if (p.decoupled) value *= kept;", "value *= kept;", "not decoupled"),
        ("float(grad[e]) * scale", "float(grad[e]) * scale * scale", "clipped"),
        ("nans > 0.0f ? NAN : most", "most", "refused"),
        ("sum += g * g;", "sum = g * g;", "several chunks"),
        ("last = min(c * CHUNK + CHUNK, p.numel)", "last = min(c * CHUNK + 100, p.numel)", "several chunks"),
    ],
    "rms_norm": [
        (
            "both[c] = T(value + float(other[c * p.stride_residual]));",
            "both[c] = T(float(other[c]));",
            "residual",
        ),
        ("value *= float(weight[c * p.stride_weight]) + p.offset;", "value *= float(weight[c]);", "Gemma offset"),
        ("(g - z * product -", "(g + z * product -", "odd sizes"),
        ("if (p.has_d_total) d +=", "if (!p.has_d_total) d *=", "residual"),
        ("n < min((share + 1) * p.rows_each, p.N)", "n < (share + 1) * p.rows_each - 1", "many short rows"),
        ("sum += part[share * p.C + c]", "sum = part[share * p.C + c]", "many short rows"),
    ],
    "gguf_linear": [
        ("i / run % 2 ? byte >> 4", "i / run % 2 ? byte & 15", "Q4_0, two blocks"),
        ("scale + half_at(b + 2);\n    case Q5_0", "scale;\n    case Q5_0", "Q4_1, two blocks"),
        ("fifth_bit(b + 2, i)) - 16", "fifth_bit(b + 2, i)) - 15", "Q5_0, two blocks"),
        ("case Q5_1: return 24;", "case Q5_1: return 20;", "Q5_1, two blocks"),
        ("as_type<char>(b[2 + i])", "b[2 + i]", "Q8_0, two blocks"),
        ("(b[8 + g] & 15) | (b[g] >> 2 & 48)", "b[8 + g] & 15", "Q4_K, two blocks"),
        ("b[16 + i % 32] >> g", "b[16 + i % 32] >> 0", "Q5_K, two blocks"),
        ("b[192 + i / 16]", "b[192 + i / 32]", "Q6_K, two blocks"),
    ],
    "lora_linear": [
        ("p->has_rows ? rows[n] : n", "n", "rows"),
        ("n = p->reduced ? k : i, c = p->reduced ? i : k", "n = i, c = k", "odd sizes, bias"),
        ("Out(p.scale * sums[e])", "Out(sums[e])", "dropout"),
        ("float(*to) + p.scale * sums[e]", "p.scale * sums[e]", "odd sizes, bias"),
        ("(p.has_rows ? rows[i] : i) * p.out_i", "i * p.out_i", "rows"),
    ],
    "layer_norm": [
        ("product - (CENTRE ? sum : 0.0f)", "product - (CENTRE ? 0.0f : sum)", "odd sizes"),
        ("bias_sum += g;", "bias_sum = g;", "odd sizes"),
    ],
    "embedding": [
        ("sum += float(d_out[order[j]", "sum += float(d_out[j", "odd sizes"),
        ("r == p.padding ? begin : first[r + 1]", "first[r + 1]", "padding"),
        ("from < 0 ? x[", "from <= 0 ? x[", "replaced rows"),
        ("kept = owner[r] < 0", "kept = owner[r] <= 0", "replaced rows"),
        ("&& owner[id] == i", "", "replaced rows"),
    ],
}
OUT_OF_BOUNDS = {  # AddressSanitizer must see it
    "cached_attention_backward": [
        ("e < p.D; e += 32", "e <= p.D; e += 32", "decode, one row a slot"),
    ],
    "cached_attention": [
        ("long from = 0, to = sees.prefix", "long from = 0, to = 1 + sees.prefix", "more query rows than new keys"),
        ("float scores[HEADS * THREADS]", "float scores[3 * THREADS]", "one chunk in pieces, q8_0"),
    ],
    "attention_forward": [
        ("row < there.hi;", "row <= there.hi;", "one row"),
        ("first + my_row < p.T)", "first + my_row <= p.T)", "odd sizes"),
        ("threadgroup T kv_tile[BK * DMAX]", "threadgroup T kv_tile[BK * DMAX - 64]", "odd sizes"),
    ],
    "attention_backward": [
        ("there ? lse[row_values", "true ? lse[row_values", "odd sizes"),
        ("row + i < rows && column", "row + i <= rows && column", "one row"),
    ],
    "attention_rows": [
        ("float(values[(begin + n) * p.v.row", "float(values[(begin + n + 1) * p.v.row", "head dims differ"),
    ],
    "cross_entropy": [
        ("v < p.V; v += threads) {\n      const float x", "v <= p.V; v += threads) {\n      const float x",
         "one row of two classes"),
        ("1.0f : y >= 0 && y < p.V", "1.0f : y < p.V", "class weights, none"),
        ("u_y = y < p.V ?", "u_y = y < p.V + 100000 ?", "beyond"),
        ("shared[6 * 32]", "shared[5 * 32]", "odd sizes"),
    ],
    "gguf_linear": [("case Q5_1: return 24;", "case Q5_1: return 34;", "Q5_1, two blocks")],
    "lora_linear": [
        ("if (i < p.I && j < p.J) out", "if (i < p.I) out", "odd sizes, bias"),
        ("if (i >= p.I || j >= p.J) continue;", "if (i > p.I || j >= p.J) continue;", "odd sizes, bias"),
    ],
    "nf4": [
        ("for (long k = lane; k < p.K; k += lanes)", "for (long k = lane; k <= p.K; k += lanes)", "blocks across rows"),
        ("m0 + i < M && k0 + k < K ? a(", "m0 + i < M && k0 + k <= K ? a(", "many rows"),
        ("n0 + j < N && k0 + k < K ? b(", "k0 + k < K ? b(", "several tiles"),
        ("if (m < p.M && k < p.K) d_x", "if (m < p.M) d_x", "many rows"),
        ("threadgroup T right[TILE * PITCH];\n  threadgroup float out[TILE * TILE];\n  const RowsOperand<T> a = {x",
         "threadgroup T right[TILE * TILE];\n  threadgroup float out[TILE * TILE];\n  const RowsOperand<T> a = {x",
         "several tiles"),
    ],
    "swiglu": [("min(first + STRETCH, p.F)", "first + STRETCH", "odd sizes")],
    "rope": [
        ("e < s.heads * rest;", "e <= s.heads * rest;", "partial"),
        ("bool inside = p >= 0 &&", "bool inside = p >= -1000 ||", "beyond"),
    ],
    "adam": [
        ("e < p.numel; e += long", "e <= p.numel; e += long", "later step, decay"),
        ("last = min(c * CHUNK + CHUNK, p.numel)", "last = c * CHUNK + CHUNK", "clipped"),
    ],
    "rms_norm": [
        ("n < min((share + 1) * p.rows_each, p.N)", "n < (share + 1) * p.rows_each", "many short rows"),
        ("if (c >= p.C) continue;", "if (c > p.C) continue;", "odd sizes"),
    ],
    "embedding": [
        ("inside = id >= 0 && id < p.rows;", "inside = id >= 0;", "beyond"),
        ("end = r == p.padding ? begin : first[r + 1]", "end = first[r + 1] + 1", "odd sizes"),
    ],
}  # fmt: skip
ADDRESS_SPACES = {  # the lint must refuse it
    "cached_attention": [
        ("device const C* row = v_cache;", "threadgroup const C* row = v_cache;"),
    ],
    "attention_forward": [
        ("stage<T, BQ, DMAX>(q_tile, ", "stage<T, BQ, DMAX>(out, "),
    ],
    "nf4": [("device const float* absmax;", "threadgroup const float* absmax;")],
    "rms_norm": [("product = threadgroup_sum(product, products,", "product = threadgroup_sum(product, d_x,")],
    "rope": [("device const T* x, constant Heads& s", "threadgroup const T* x, constant Heads& s")],
}
