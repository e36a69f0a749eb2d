// KDA: short convolutions, gates and the delta rule, token by token for prompts and for decode alike. On a CPU the
// recurrence costs a few percent of the projections, and one path makes every position, chunking and resume agree
// bit for bit.
#include "network.h"
#include "rows.h"

namespace mr {
namespace {

constexpr int kTile = 16;  // tokens prepared at once, so that a column block of the state is used from the L1 cache

// `N` registers' worth of state columns through all tokens. Sums over keys run in two chains, even and odd keys.
template <int N>
void columns(float* state, ptrdiff_t stride, int keys, int tokens, const float* q, const float* k, const float* alpha,
             const float* alpha_k, const float* beta, const float* v, float* out, ptrdiff_t token_stride) {
    for (int t = 0; t < tokens; ++t, q += keys, k += keys, alpha += keys, alpha_k += keys) {
        V even[N], odd[N], u[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) even[i] = odd[i] = zero();
        int c = 0;
        for (; c + 2 <= keys; c += 2) {
            const V a = set1(alpha_k[c]), b = set1(alpha_k[c + 1]);
            const float *s = state + c * stride, *s2 = s + stride;
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) {
                even[i] = fma(a, load(s + i * kLanes), even[i]);
                odd[i] = fma(b, load(s2 + i * kLanes), odd[i]);
            }
        }
        if (c < keys)
            for (int i = 0; i < N; ++i) even[i] = fma(set1(alpha_k[c]), load(state + c * stride + i * kLanes), even[i]);
        const V b = set1(beta[t]);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            u[i] = mul(b, sub(load(v + t * token_stride + i * kLanes), add(even[i], odd[i])));
            even[i] = odd[i] = zero();
        }
        const auto update = [&](int key, V* sum) {
            float* s = state + key * stride;
            const V decay = set1(alpha[key]), kk = set1(k[key]), qq = set1(q[key]);
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) {
                const V x = fma(kk, u[i], mul(decay, load(s + i * kLanes)));
                store(s + i * kLanes, x);
                sum[i] = fma(qq, x, sum[i]);
            }
        };
        for (c = 0; c + 2 <= keys; c += 2) {
            update(c, even);
            update(c + 1, odd);
        }
        if (c < keys) update(c, even);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) store(out + t * token_stride + i * kLanes, add(even[i], odd[i]));
    }
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

void kda_recurrence(float* state, int keys, int values, int tokens, const float* q, const float* k, const float* alpha,
                    const float* beta, const float* v, float* out, ptrdiff_t stride, float* work) {
    float *alpha_k = work, *narrow = work + ptrdiff_t(tokens) * keys;
    each16(tokens * keys, [&](int i, int lanes, int) {
        store16_n(alpha_k + i, mul(load16_n(alpha + i, lanes), load16_n(k + i, lanes)), lanes);
    });
    int c = 0;
    const auto run = [&](auto kernel, int registers) {
        for (; c + registers * kLanes <= values; c += registers * kLanes)
            kernel(state + c, values, keys, tokens, q, k, alpha, alpha_k, beta, v + c, out + c, stride);
    };
    run(columns<4>, 4);
    run(columns<2>, 2);
    run(columns<1>, 1);
    if (c == values) return;
    const int rest = values - c;  // columns that fill no register go through a copy one register wide
    for (int i = 0; i < keys; ++i) store(narrow + i * kLanes, load_n(state + ptrdiff_t(i) * values + c, rest));
    columns<1>(narrow, kLanes, keys, tokens, q, k, alpha, alpha_k, beta, v + c, out + c, stride);
    for (int i = 0; i < keys; ++i) store_n(state + ptrdiff_t(i) * values + c, load(narrow + i * kLanes), rest);
}

void Model::kda_head(const Layer& layer, const Batch& batch, const Segment& seg, int head, std::vector<float>& scratch) {
    const Config& c = config;
    const int K = c.key_dim, W = c.value_dim, wide = round16(W), taps = c.conv_kernel, past = taps - 1;
    const int gate_at = 2 * c.keys() + c.values();
    const int beta_at = gate_at + (c.full_rank_gate ? c.values() : c.gate_rank) + c.gate_rank;
    scratch.resize(size_t(kTile) * (4 * K + 2 * wide + 1) + size_t(K) * kLanes + size_t(K > W ? K : W) + 64);
    float* q = scratch.data();
    float *k = q + kTile * K, *alpha = k + kTile * K, *v = alpha + kTile * K, *out = v + kTile * wide;
    float *beta = out + kTile * wide, *work = beta + kTile, *zeros = work + kTile * K + K * kLanes;
    for (int i = 0; i < (K > W ? K : W); ++i) zeros[i] = 0;

    float* slot = batch.pool_state + seg.slot * batch.slot_floats;
    float* state = slot + (int64_t(layer.index) * c.kda_heads + head) * K * W;
    float* history = slot + int64_t(num_kda) * c.kda_heads * K * W + int64_t(layer.index) * past * gate_at;
    if (seg.start == 0)
        for (int64_t i = 0; i < int64_t(K) * W; ++i) state[i] = 0;

    struct Stream { int channels, at, width; VectorSlot taps; float* into; int into_stride; };
    const Stream streams[3] = {{c.keys(), head * K, K, VectorSlot::kConvQ, q, K},
                               {c.keys(), head * K, K, VectorSlot::kConvK, k, K},
                               {c.values(), head * W, W, VectorSlot::kConvV, v, wide}};
    float* past_at[3];
    Window windows[3];
    for (int i = 0, offset = 0; i < 3; offset += streams[i++].channels) {
        past_at[i] = history + int64_t(offset) * past + streams[i].at;
        windows[i] = {s_.in.row(seg.row0) + offset + streams[i].at, seg.start ? past_at[i] : nullptr, zeros,
                      s_.in.stride, streams[i].channels, past};
    }
    for (int t0 = 0; t0 < seg.tokens; t0 += kTile) {
        const int n = min_int(kTile, seg.tokens - t0);
        for (int t = 0; t < n; ++t) {
            const int row = seg.row0 + t0 + t;
            for (int i = 0; i < 3; ++i) {
                const Stream& st = streams[i];
                const float* inputs[kMaxTaps];
                for (int j = 0; j < taps; ++j) inputs[j] = windows[i].at(t0 + t - past + j);
                conv_silu(inputs, layer.vector(st.taps) + st.at, st.channels, taps, st.width, st.into + t * st.into_stride);
            }
            scale_row(q + t * K, K, 1.0f / std::sqrt(sum_squares(q + t * K, K) + c.l2_eps) / std::sqrt(float(K)));
            scale_row(k + t * K, K, 1.0f / std::sqrt(sum_squares(k + t * K, K) + c.l2_eps));
            decay_row(s_.decay.row(row) + head * K, layer.vector(VectorSlot::kDecayBias) + head * K,
                      layer.vector(VectorSlot::kDecayRate)[head], c, alpha + t * K);
            beta[t] = sigmoid1(s_.in.row(row)[beta_at + head]);
        }
        kda_recurrence(state, K, W, n, q, k, alpha, beta, v, out, wide, work);
        for (int t = 0; t < n; ++t) {
            const int row = seg.row0 + t0 + t;
            const float* gate = (c.full_rank_gate ? s_.in.row(row) + gate_at : s_.gate.row(row)) + head * W;
            const float* weight = layer.vector(VectorSlot::kOutNorm);
            float *o = out + t * wide, *to = s_.mixed.row(row) + head * W;
            const F16 scale = set16(rms_scale(o, W, c.eps));
            each16(W, [&](int i, int lanes, int) {
                const F16 y = mul(mul(load16_n(o + i, lanes), scale), load16_n(weight + i, lanes));
                store16_n(to + i, mul(y, sigmoid(load16_n(gate + i, lanes))), lanes);
            });
        }
    }
    // Ascending order: a history row that only moves up is read before it is overwritten.
    for (int i = 0; i < 3; ++i)
        for (int j = 0; j < past; ++j) {
            const float* from = windows[i].at(seg.tokens - past + j);
            float* to = past_at[i] + j * streams[i].channels;
            for (int x = 0; x < streams[i].width; ++x) to[x] = from[x];
        }
}

void Model::kda(const Layer& layer, const Batch& batch) {
    const Config& c = config;
    const int gate_at = 2 * c.keys() + c.values();
    const int fa_at = gate_at + (c.full_rank_gate ? c.values() : c.gate_rank);
    timed(Op::kKdaGates, [&] {
        GemmJob jobs[2];
        jobs[0].w = &layer.matrix(MatrixSlot::kDecay);
        jobs[0].a = s_.in.data + fa_at, jobs[0].c = s_.decay.data, jobs[0].ldc = s_.decay.stride;
        if (!c.full_rank_gate) {
            jobs[1].w = &layer.matrix(MatrixSlot::kGateB);
            jobs[1].a = s_.in.data + gate_at, jobs[1].c = s_.gate.data, jobs[1].ldc = s_.gate.stride;
        }
        for (GemmJob& job : jobs) job.lda = s_.in.stride, job.m = batch.rows;
        gemm.run(jobs, c.full_rank_gate ? 1 : 2);
    });
    timed(Op::kKda, [&] {
        pool.run(int(batch.segments.size()) * c.kda_heads, [&](int task, int thread) {
            kda_head(layer, batch, batch.segments[size_t(task / c.kda_heads)], task % c.kda_heads,
                     thread_scratch_[size_t(thread)]);
        });
    });
}

}  // namespace mr
