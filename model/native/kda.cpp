// KDA: short convolutions, gates and the delta rule, token by token for prompts and for decode alike. On a CPU the
// recurrence costs a few percent of the projections, and one path makes every position, chunking and resume agree
// bit for bit.
#include <algorithm>
#include <type_traits>

#include "network.h"
#include "rows.h"

namespace mr {
namespace {

constexpr int kTile = 16;  // tokens prepared at once, so that a column block of the state is used from the L1 cache

// Columns of a state, keys `stride` apart.
struct StateAt {
    const float* from;
    float* to;
    ptrdiff_t stride;
    bool keep_last;
};

// `N` registers' worth of state columns through all tokens. Sums over keys run in two chains, even and odd keys. While
// a token changes the state, what the next one finds in it is summed up beside.
template <int N>
void columns(const StateAt& at, int keys, int tokens, const float* q, const float* k, const float* alpha,
             const float* alpha_k, const float* beta, const float* v, float* out, ptrdiff_t token_stride,
             float* correction) {
    const float* from = at.from;
    const ptrdiff_t stride = at.stride;
    V found[2][N], u[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) found[0][i] = found[1][i] = zero();
    const auto find = [&](int key, V* sum) {
        const V a = set1(alpha_k[key]);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) sum[i] = fma(a, load(from + key * stride + i * kLanes), sum[i]);
    };
    int c = 0;
    for (; c + 2 <= keys; c += 2) {
        find(c, found[0]);
        find(c + 1, found[1]);
    }
    if (c < keys) find(c, found[0]);
    const auto token = [&](int t, auto last, auto keep) {
        const V b = set1(beta[t]);
        V sum[2][N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            u[i] = mul(b, sub(load(v + t * token_stride + i * kLanes), add(found[0][i], found[1][i])));
            if (correction) store(correction + t * token_stride + i * kLanes, u[i]);
            sum[0][i] = sum[1][i] = found[0][i] = found[1][i] = zero();
        }
        const auto update = [&](int key, V* total, V* next) {
            const V decay = set1(alpha[key]), kk = set1(k[key]), qq = set1(q[key]);
            const V ahead = last ? zero() : set1(alpha_k[keys + key]);
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) {
                const V x = fma(kk, u[i], mul(decay, load(from + key * stride + i * kLanes)));
                if (keep) store(at.to + key * stride + i * kLanes, x);
                total[i] = fma(qq, x, total[i]);
                if (!last) next[i] = fma(ahead, x, next[i]);
            }
        };
        int key = 0;
        for (; key + 2 <= keys; key += 2) {
            update(key, sum[0], found[0]);
            update(key + 1, sum[1], found[1]);
        }
        if (key < keys) update(key, sum[0], found[0]);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) store(out + t * token_stride + i * kLanes, add(sum[0][i], sum[1][i]));
    };
    for (int t = 0; t + 1 < tokens; ++t) {
        token(t, std::false_type{}, std::true_type{});
        from = at.to;
        q += keys, k += keys, alpha += keys, alpha_k += keys;
    }
    if (at.keep_last) token(tokens - 1, std::true_type{}, std::true_type{});
    else token(tokens - 1, std::true_type{}, std::false_type{});
}

// Depthwise causal convolution of one token, then SiLU; taps are [tap][channel], oldest first.
void conv_silu(const float* const* inputs, const float* taps, ptrdiff_t tap_stride, int num_taps, int n, float* out) {
    each16(n, [&](int i, int lanes, int) {
        F16 y = zero16();
        for (int j = 0; j < num_taps; ++j)
            y = fma(load16_n(taps + j * tap_stride + i, lanes), load16_n(inputs[j] + i, lanes), y);
        store16_n(out + i, mul(y, sigmoid(y)), lanes);
    });
}

void scale_row(float* x, int n, float scale) {
    const F16 s = set16(scale);
    each16(n, [&](int i, int lanes, int) { store16_n(x + i, mul(load16_n(x + i, lanes), s), lanes); });
}

// alpha = exp(g): g = bound * sigmoid(rate*z) for the bounded gate, -rate * softplus(z) for the other.
void decay_row(const float* z, const float* bias, float rate, const Config& c, float* alpha) {
    const F16 a = set16(rate), bound = set16(c.gate_bound), minus = set16(-rate);
    each16(c.key_dim, [&](int i, int lanes, int) {
        const F16 x = add(load16_n(z + i, lanes), load16_n(bias + i, lanes));
        const F16 g = c.bounded_gate ? mul(bound, sigmoid(mul(a, x))) : mul(minus, softplus(x));
        store16_n(alpha + i, exp(g), lanes);
    });
}

// The inputs of one of q, k, v for one head: rows of this pass, before them the slot's history (zero at start 0).
struct Window {
    const float *rows, *history, *zeros;
    ptrdiff_t row_stride, history_stride;
    int history_len;
    const float* at(int t) const {
        if (t >= 0) return rows + t * row_stride;
        return history ? history + (t + history_len) * history_stride : zeros;
    }
};

}  // namespace

void kda_recurrence(const KdaState& state, int keys, int values, int tokens, const float* q, const float* k,
                    const float* alpha, const float* beta, const float* v, float* out, ptrdiff_t stride, float* work,
                    float* correction) {
    float *alpha_k = work, *narrow = work + ptrdiff_t(tokens) * keys;
    each16(tokens * keys, [&](int i, int lanes, int) {
        store16_n(alpha_k + i, mul(load16_n(alpha + i, lanes), load16_n(k + i, lanes)), lanes);
    });
    int c = 0;
    const auto run = [&](auto kernel, int registers) {
        for (; c + registers * kLanes <= values; c += registers * kLanes)
            kernel(StateAt{state.from + c, state.to + c, values, state.keep_last}, keys, tokens, q, k, alpha, alpha_k,
                   beta, v + c, out + c, stride, correction ? correction + c : nullptr);
    };
    if (kLanes == 16) run(columns<4>, 4);  // else there are too few registers
    run(columns<2>, 2);
    run(columns<1>, 1);
    if (c == values) return;
    const int rest = values - c;  // columns that fill no register go through a copy one register wide
    for (int i = 0; i < keys; ++i) store(narrow + i * kLanes, load_n(state.from + ptrdiff_t(i) * values + c, rest));
    columns<1>(StateAt{narrow, narrow, kLanes, true}, keys, tokens, q, k, alpha, alpha_k, beta, v + c, out + c, stride,
               correction ? correction + c : nullptr);
    for (int i = 0; i < keys; ++i) store_n(state.to + ptrdiff_t(i) * values + c, load(narrow + i * kLanes), rest);
}

namespace {

// One head of one segment: where its inputs, state and history lie, and the buffers of the tile in work.
class KdaHead {
public:
    KdaHead(const Config& config, const Layer& layer, const Batch& batch, const Scratch& pass, const Segment& segment,
            int head, int num_kda, std::vector<float>& scratch)
        : c(config), layer(layer), pass(pass), seg(segment), head(head) {
        const int K = c.key_dim, W = c.value_dim, longest = K > W ? K : W, past = c.conv_kernel - 1;
        wide = round16(W);
        gate_at = 2 * c.keys() + c.values();
        const bool recording = segment.record >= 0;
        const size_t own = size_t(kTile) * (4 * K + 2 * wide + 1) + size_t(K) * kLanes + size_t(longest);
        scratch.resize(own + (recording ? size_t(kTile) * wide + size_t(K) * W : 0));
        q = scratch.data(), k = q + kTile * K, alpha = k + kTile * K, v = alpha + kTile * K, out = v + kTile * wide;
        beta = out + kTile * wide, work = beta + kTile;
        float* zeros = work + kTile * K + K * kLanes;
        for (int i = 0; i < longest; ++i) zeros[i] = 0;

        float* slot = batch.pool_state + seg.slot * batch.slot_floats;
        state = slot + (int64_t(layer.index) * c.kda_heads + head) * K * W;
        if (recording) {  // the slot stays as it is
            correction = scratch.data() + own;
            copy = correction + kTile * wide;
            kept = batch.records.head(c, segment.record, layer.index, head);
            inputs_kept = batch.records.conv(c, num_kda, segment.record, layer.index);
        }
        float* history = slot + int64_t(num_kda) * c.kda_heads * K * W + int64_t(layer.index) * past * gate_at;
        streams[0] = {c.keys(), head * K, K, layer.vector(VectorSlot::kConvQ), q, K, nullptr, {}};
        streams[1] = {c.keys(), head * K, K, layer.vector(VectorSlot::kConvK), k, K, nullptr, {}};
        streams[2] = {c.values(), head * W, W, layer.vector(VectorSlot::kConvV), v, wide, nullptr, {}};
        int offset = 0;
        for (Stream& s : streams) {
            s.past = history + int64_t(offset) * past + s.at;
            const float* rows = pass.in.row(seg.row0) + offset + s.at;
            s.window = {rows, seg.start ? s.past : nullptr, zeros, pass.in.stride, s.channels, past};
            offset += s.channels;
        }
    }

    void run() {
        const int K = c.key_dim, W = c.value_dim;
        KdaState at{state, copy ? copy : state, true};
        if (seg.start == 0) {
            std::memset(at.to, 0, size_t(K) * W * 4);
            at.from = at.to;
        }
        for (int first = 0; first < seg.tokens; first += kTile) {
            const int n = min_int(kTile, seg.tokens - first);
            for (int t = 0; t < n; ++t) prepare(first + t, t);
            at.keep_last = !copy || first + n < seg.tokens;
            kda_recurrence(at, K, W, n, q, k, alpha, beta, v, out, wide, work, correction);
            at.from = at.to;
            for (int t = 0; correction && t < n; ++t) keep(first + t, t);
            for (int t = 0; t < n; ++t) finish(seg.row0 + first + t, out + t * wide);
        }
        correction ? keep_inputs() : keep_history();
    }

private:
    struct Stream {  // one of q, k, v
        int channels, at, width;
        const float* taps;
        float* into;
        int into_stride;
        float* past;
        Window window;
    };

    // Token t of the segment into place `i` of the tile: convolutions, norms, decay and beta.
    void prepare(int t, int i) {
        const int K = c.key_dim;
        const float* in = pass.in.row(seg.row0 + t);
        for (const Stream& s : streams) {
            const float* inputs[kMaxTaps];
            for (int j = 0; j < c.conv_kernel; ++j) inputs[j] = s.window.at(t - c.conv_kernel + 1 + j);
            conv_silu(inputs, s.taps + s.at, s.channels, c.conv_kernel, s.width, s.into + i * s.into_stride);
        }
        float *q_row = q + i * K, *k_row = k + i * K;
        scale_row(q_row, K, 1.0f / std::sqrt(sum_squares(q_row, K) + c.l2_eps) / std::sqrt(float(K)));
        scale_row(k_row, K, 1.0f / std::sqrt(sum_squares(k_row, K) + c.l2_eps));
        decay_row(pass.decay.row(seg.row0 + t) + head * K, layer.vector(VectorSlot::kDecayBias) + head * K,
                  layer.vector(VectorSlot::kDecayRate)[head], c, alpha + i * K);
        const int beta_at = gate_at + (c.full_rank_gate ? c.values() : c.gate_rank) + c.gate_rank;
        beta[i] = sigmoid1(in[beta_at + head]);
    }

    // The output norm and gate.
    void finish(int row, const float* o) {
        const int W = c.value_dim;
        const float* gate = (c.full_rank_gate ? pass.in.row(row) + gate_at : pass.gate.row(row)) + head * W;
        const float* weight = layer.vector(VectorSlot::kOutNorm);
        float* to = pass.mixed.row(row) + head * W;
        const F16 scale = set16(rms_scale(o, W, c.eps));
        each16(W, [&](int i, int lanes, int) {
            const F16 y = mul(mul(load16_n(o + i, lanes), scale), load16_n(weight + i, lanes));
            store16_n(to + i, mul(y, sigmoid(load16_n(gate + i, lanes))), lanes);
        });
    }

    // Token t of the segment, from place `i` of the tile, into the record.
    void keep(int t, int i) {
        const int K = c.key_dim, W = c.value_dim;
        float* to = kept + int64_t(t) * (2 * K + W);
        std::memcpy(to, k + i * K, size_t(K) * 4);
        std::memcpy(to + K, alpha + i * K, size_t(K) * 4);
        std::memcpy(to + 2 * K, correction + ptrdiff_t(i) * wide, size_t(W) * 4);
    }

    void keep_inputs() {
        int offset = 0;
        for (const Stream& s : streams) {
            for (int t = 0; t < seg.tokens; ++t)
                std::memcpy(inputs_kept + int64_t(t) * gate_at + offset + s.at, s.window.at(t), size_t(s.width) * 4);
            offset += s.channels;
        }
    }

    // Ascending order: a history row that only moves up is read before it is overwritten.
    void keep_history() {
        const int past = c.conv_kernel - 1;
        for (const Stream& s : streams)
            for (int j = 0; j < past; ++j)
                std::memmove(s.past + j * s.channels, s.window.at(seg.tokens - past + j), size_t(s.width) * 4);
    }

    const Config& c;
    const Layer& layer;
    const Scratch& pass;
    const Segment& seg;
    const int head;
    int wide, gate_at;
    float *q, *k, *alpha, *v, *out, *beta, *work, *state, *copy = nullptr;
    float *correction = nullptr, *kept = nullptr, *inputs_kept = nullptr;  // of a verified segment
    Stream streams[3];
};

// Two rows of keys of a state through all tokens, `N` registers of columns at a time, which never leave them.
template <int N>
void fold_columns(const float* kept, ptrdiff_t stride, const float* u, int keys, int tokens, float* state, ptrdiff_t width) {
    const auto rows = [&](int key, auto pair) {
        constexpr int R = pair ? 2 : 1;
        float* s = state + key * width;
        V x[R][N];
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) x[r][i] = load(s + r * width + i * kLanes);
        const float *at = kept + key, *add = u;
        for (int t = 0; t < tokens; ++t, at += stride, add += stride) {
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) {
                const V kk = set1(at[r]), decay = set1(at[keys + r]);
#pragma GCC unroll 4
                for (int i = 0; i < N; ++i) x[r][i] = fma(kk, load(add + i * kLanes), mul(decay, x[r][i]));
            }
        }
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) store(s + r * width + i * kLanes, x[r][i]);
    };
    int key = 0;
    for (; key + 2 <= keys; key += 2) rows(key, std::true_type{});
    if (key < keys) rows(key, std::false_type{});
}

// One head's share of a fold: the same multiply-adds, in the same order, that stepping would have done.
void fold_head(const Config& c, const Fold& f, const float* kept, float* state) {
    const int K = c.key_dim, W = c.value_dim, stride = 2 * K + W;
    if (f.start == 0) std::memset(state, 0, size_t(K) * W * 4);
    kept += int64_t(f.first) * stride;
    const float* u = kept + 2 * K;
    int at = 0;
    for (; at + 4 * kLanes <= W; at += 4 * kLanes) fold_columns<4>(kept, stride, u + at, K, f.tokens, state + at, W);
    for (; at + kLanes <= W; at += kLanes) fold_columns<1>(kept, stride, u + at, K, f.tokens, state + at, W);
    const int rest = W - at;
    for (int key = 0; rest && key < K; ++key) {
        float* s = state + ptrdiff_t(key) * W + at;
        V x = load_n(s, rest);
        for (int t = 0; t < f.tokens; ++t) {
            const float* token = kept + int64_t(t) * stride;
            x = fma(set1(token[key]), load_n(token + 2 * K + at, rest), mul(set1(token[K + key]), x));
        }
        store_n(s, x, rest);
    }
}

// One layer's convolution history: the last inputs, of before and of the fold.
void fold_history(const Config& c, const Fold& f, const float* inputs, float* history) {
    const int past = c.conv_kernel - 1, total = 2 * c.keys() + c.values();
    int offset = 0;
    for (const int channels : {c.keys(), c.keys(), c.values()}) {
        float* rows = history + int64_t(offset) * past;
        for (int j = 0; j < past; ++j) {  // ascending: rows only move up
            const int t = f.tokens - past + j;
            float* to = rows + int64_t(j) * channels;
            if (t >= 0) std::memcpy(to, inputs + int64_t(f.first + t) * total + offset, size_t(channels) * 4);
            else if (f.start) std::memmove(to, rows + int64_t(t + past) * channels, size_t(channels) * 4);
            else std::memset(to, 0, size_t(channels) * 4);
        }
        offset += channels;
    }
}

}  // namespace

int64_t Model::record_floats(int tokens) const {
    Records r;
    r.tokens = tokens;
    return num_kda * (config.kda_heads * r.head_floats(config) + r.conv_floats(config));
}

void Model::fold(const std::vector<Fold>& folds, const Records& records, float* pool_state, int64_t slot_floats) {
    const Config& c = config;
    const int heads = c.kda_heads, each = num_kda * heads, past = c.conv_kernel - 1;
    const int64_t head_floats = int64_t(c.key_dim) * c.value_dim, channels = 2 * c.keys() + c.values();
    pool.run(int(folds.size()) * each, [&](int task, int) {
        const Fold& f = folds[size_t(task / each)];
        if (!f.tokens) return;
        const int layer = task % each / heads, head = task % heads;
        float* slot = pool_state + f.slot * slot_floats;
        fold_head(c, f, records.head(c, f.record, layer, head), slot + (int64_t(layer) * heads + head) * head_floats);
        if (head) return;
        float* history = slot + int64_t(each) * head_floats + int64_t(layer) * past * channels;
        fold_history(c, f, records.conv(c, num_kda, f.record, layer), history);
    });
}

void Model::kda_gates(const Layer& layer, const Part& part) {
    const Config& c = config;
    const int gate_at = 2 * c.keys() + c.values();
    GemmJob jobs[2] = {part.job(layer.matrix(MatrixSlot::kDecay), s_.in, s_.decay)};
    jobs[0].a += gate_at + (c.full_rank_gate ? c.values() : c.gate_rank);
    if (!c.full_rank_gate) {
        jobs[1] = part.job(layer.matrix(MatrixSlot::kGateB), s_.in, s_.gate);
        jobs[1].a += gate_at;
    }
    part.gemm.run(jobs, c.full_rank_gate ? 1 : 2);
}

void Model::kda(const Layer& layer, const Batch& batch, const Crew& crew) {
    std::vector<const Segment*> longest_first;
    for (const Segment& s : batch.segments) longest_first.push_back(&s);
    std::stable_sort(longest_first.begin(), longest_first.end(),
                     [](const Segment* x, const Segment* y) { return x->tokens > y->tokens; });
    const int heads = config.kda_heads;
    crew.run(int(longest_first.size()) * heads, [&](int task, Hand& hand) {
        const Segment& segment = *longest_first[size_t(task / heads)];
        KdaHead(config, layer, batch, s_, segment, task % heads, num_kda, hand.scratch).run();
    });
}

}  // namespace mr
