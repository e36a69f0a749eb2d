// Gated MLA without positions, always in the absorbed form over the paged rows (normed latent | raw shared key), for
// prompts and for decode alike. Online softmax over tiles of kTile rows at absolute positions, so that a query's
// arithmetic depends on its own prefix alone.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "network.h"
#include "rows.h"

namespace mr {
namespace {

constexpr int kTile = 64;       // cache rows per softmax step
constexpr int kQueryRows = 96;  // (token, head) rows that share a pass over the tiles; divides into kTile tokens
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Adds one register of the products q_r * row_j to each sum.
template <int R, int J, class LoadRow>
MR_INLINE void dot_step(const float* q, ptrdiff_t q_stride, const LoadRow& load_row, V (&sum)[R][J]) {
    V row[J];
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) {
        row[j] = load_row(j);
        pin(row[j]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        V x = load(q + r * q_stride);
        pin(x);
#pragma GCC unroll 8
        for (int j = 0; j < J; ++j) sum[r][j] = fma(x, row[j], sum[r][j]);
    }
}

// scores[r][j] = q_r . row_j over `width` floats for R queries and J rows; q is zero past `width`. Not inlined: the
// register allocator then keeps the sums where they belong.
template <int R, int J>
__attribute__((noinline)) void dots(const float* q, ptrdiff_t q_stride, const float* const* rows, int width,
                                    float* scores) {
    V sum[kRegs][R][J];
#pragma GCC unroll 4
    for (int i = 0; i < kRegs; ++i)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < J; ++j) sum[i][r][j] = zero();
    int c = 0;
    for (; c + 16 <= width; c += 16)
#pragma GCC unroll 4
        for (int i = 0; i < kRegs; ++i)
            dot_step(q + c + i * kLanes, q_stride, [&](int j) { return load(rows[j] + c + i * kLanes); }, sum[i]);
    if (c < width)
#pragma GCC unroll 4
        for (int i = 0; i < kRegs; ++i) {
            const int rest = width - c - i * kLanes;
            if (rest <= 0) break;
            const int n = min_int(rest, kLanes);
            dot_step(q + c + i * kLanes, q_stride, [&](int j) { return load_n(rows[j] + c + i * kLanes, n); }, sum[i]);
        }
    const auto whole = [&](int k) {
        F16 s;
#pragma GCC unroll 4
        for (int i = 0; i < kRegs; ++i) s.r[i] = sum[i][k / J][k % J];
        return s;
    };
    constexpr int kLast = R * J - 1;
    float sums[R * J + 3];
#pragma GCC unroll 4
    for (int k = 0; k < R * J; k += 4)
        sum16x4(whole(k), whole(k + 1 < kLast ? k + 1 : kLast), whole(k + 2 < kLast ? k + 2 : kLast),
                whole(k + 3 < kLast ? k + 3 : kLast), sums + k);
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < J; ++j) scores[r * kTile + j] = sums[r * J + j];
}

// Calls f(std::integral_constant<R>, first) for runs of R = 3, 2 or 1 queries that cover them all.
template <class F>
MR_INLINE void each_run(int queries, const F& f) {
    int r = 0;
    for (; queries - r == 3 || queries - r > 4; r += 3) f(std::integral_constant<int, 3>{}, r);
    for (; queries - r >= 2; r += 2) f(std::integral_constant<int, 2>{}, r);
    if (r < queries) f(std::integral_constant<int, 1>{}, r);
}

void tile_scores(const float* q, ptrdiff_t q_stride, int queries, const float* tile, int width, int count,
                 float* scores) {
    constexpr int kChunk = 16;  // rows that stay in the first-level cache while all queries pass
    for (int first = 0; first < count; first += kChunk)
        each_run(queries, [&](auto run, int r) {
            constexpr int R = run, J = (R == 1 ? 4 : 2) * (kLanes == 16 ? 2 : 1);
            for (int j = first; j < min_int(first + kChunk, count); j += J) {
                const float* rows[J];
                for (int i = 0; i < J; ++i) rows[i] = tile + ptrdiff_t(min_int(j + i, count - 1)) * width;
                dots<R, J>(q + r * q_stride, q_stride, rows, width, scores + r * kTile + j);
            }
        });
}

// The running softmax of one task's queries.
struct Softmax {
    float *scores, *maximum, *sum, *rescale;  // [queries][kTile], then [queries]
    int queries;

    // Turns scores into weights in place and sets what the output so far must be multiplied by. Of query r the first
    // visible(r) rows count.
    template <class Visible>
    void update(float scale, const Visible& visible) {
        const F16 factor = set16(scale);
        for (int r = 0; r < queries; ++r) {
            float* s = scores + r * kTile;
            const int n = visible(r);
            for (int j = n; j < kTile; ++j) s[j] = -kInfinity;
            F16 top = set16(maximum[r]);
            for (int j = 0; j < kTile; j += 16) {
                const F16 x = mul(load16(s + j), factor);
                store16(s + j, x);
                top = max(x, top);
            }
            const float now = max16(top);
            rescale[r] = maximum[r] - now, maximum[r] = now;
        }
        each16(queries, [&](int r, int lanes, int) { store16_n(rescale + r, exp(load16_n(rescale + r, lanes)), lanes); });
        for (int r = 0; r < queries; ++r) {
            float* s = scores + r * kTile;
            const F16 shift = set16(maximum[r]);
            F16 w[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) store16(s + i * 16, w[i] = exp(sub(load16(s + i * 16), shift)));
            sum[r] = sum[r] * rescale[r] + sum16(add(add(w[0], w[1]), add(w[2], w[3])));
        }
    }
};

// out_r = out_r * rescale_r + sum_j weights[r][j] * row_j, rows in ascending order, for N registers of columns.
template <int R, int N>
__attribute__((noinline)) void mix_columns(float* out, ptrdiff_t out_stride, const float* weights, const float* rescale,
                                           const float* tile, ptrdiff_t width, int count) {
    V acc[R][N];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) acc[r][i] = mul(load(out + r * out_stride + i * kLanes), set1(rescale[r]));
    for (int j = 0; j < count; ++j, tile += width) {
        V w[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) w[r] = set1(weights[r * kTile + j]);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            V x = load(tile + i * kLanes);
            pin(x);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) acc[r][i] = fma(w[r], x, acc[r][i]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) store(out + r * out_stride + i * kLanes, acc[r][i]);
}

void mix_tail(float* out, const float* weights, float rescale, const float* tile, ptrdiff_t width, int count, int n) {
    V acc = mul(load_n(out, n), set1(rescale));
    for (int j = 0; j < count; ++j) acc = fma(set1(weights[j]), load_n(tile + j * width, n), acc);
    store_n(out, acc, n);
}

void tile_mix(float* out, ptrdiff_t out_stride, const Softmax& s, const float* tile, ptrdiff_t width, int count,
              int columns) {
    int c = 0;
    const auto run_columns = [&](auto registers) {
        constexpr int N = registers;
        for (; c + N * kLanes <= columns; c += N * kLanes)
            each_run(s.queries, [&](auto run, int r) {
                mix_columns<run, N>(out + r * out_stride + c, out_stride, s.scores + r * kTile, s.rescale + r, tile + c,
                                    width, count);
            });
    };
    run_columns(std::integral_constant<int, 4>{});
    run_columns(std::integral_constant<int, 1>{});
    if (c < columns)
        for (int r = 0; r < s.queries; ++r)
            mix_tail(out + r * out_stride + c, s.scores + r * kTile, s.rescale[r], tile + c, width, count, columns - c);
}

// Query blocks begin at multiples of their size in absolute position: all queries of one see the same tiles. Work is
// cut by heads where one block weighs more than a thread's fair share, and the heaviest comes first.
std::vector<MlaWork> share_out(const std::vector<Segment>& segments, int heads, int threads) {
    int block = kTile;
    while (block > 1 && block * heads > kQueryRows) block /= 2;
    const auto each_block = [&](const auto& f) {
        for (const Segment& s : segments)
            for (int t = 0, n; t < s.tokens; t += n) {
                n = min_int(block - int((s.start + t) % block), s.tokens - t);
                f(s, t, n, double(n) * double(s.start + t + n));
            }
    };
    double total = 0;
    each_block([&](const Segment&, int, int, double cost) { total += cost; });
    const double share = total / (4 * threads);
    std::vector<MlaWork> work;
    each_block([&](const Segment& s, int t, int n, double cost) {
        const int parts = threads == 1 ? 1 : min_int(heads, 1 + int(cost / share));
        for (int p = 0; p < parts; ++p) {
            const int head0 = heads * p / parts, head1 = heads * (p + 1) / parts;
            work.push_back({&s, t, n, head0, head1 - head0, cost * (head1 - head0)});
        }
    });
    std::stable_sort(work.begin(), work.end(), [](const MlaWork& x, const MlaWork& y) { return x.cost > y.cost; });
    return work;
}

}  // namespace

// Appends the pass's rows to the pool.
void Model::mla_store(const Layer& layer, const Batch& batch) {
    const Config& c = config;
    const int kv_at = c.q_lora ? c.q_lora : c.q_width();
    for (const Segment& seg : batch.segments)
        for (int t = 0; t < seg.tokens; ++t) {
            const float* in = s_.in.row(seg.row0 + t) + kv_at;
            float* row = batch.row(seg, c, layer.index, seg.start + t);
            rms_norm(in, layer.vector(VectorSlot::kKvNorm), c.kv_lora, c.lora_eps, row);
            std::memcpy(row + c.kv_lora, in + c.kv_lora, size_t(c.rope) * 4);
        }
}

// q_latent[row][head] = (W_UK,h^T q_nope | q_rope), zero-padded to whole 16 floats.
void Model::mla_queries(const Layer& layer, int rows) {
    const Config& c = config;
    const int head_width = c.nope + c.rope, wide = round16(c.row_width());
    const Buffer q = c.q_lora ? s_.q : s_.in;
    if (c.q_lora) {
        for_rows(rows, [&](int row) {
            rms_norm(s_.in.row(row), layer.vector(VectorSlot::kQaNorm), c.q_lora, c.lora_eps, s_.in.row(row));
        });
        GemmJob job;
        job.w = &layer.matrix(MatrixSlot::kQb);
        job.a = s_.in.data, job.lda = s_.in.stride, job.m = rows, job.c = q.data, job.ldc = q.stride;
        gemm.run(job);
    }
    jobs_.assign(size_t(c.heads), GemmJob{});
    for (int h = 0; h < c.heads; ++h) {
        GemmJob& job = jobs_[size_t(h)];
        job.w = &layer.matrix(MatrixSlot::kKeyUp, h);
        job.a = q.data + h * head_width, job.lda = q.stride, job.m = rows;
        job.c = s_.q_latent.data + h * wide, job.ldc = s_.q_latent.stride;
    }
    gemm.run(jobs_.data(), c.heads);
    for (int row = 0; row < rows; ++row)
        for (int h = 0; h < c.heads; ++h) {
            float* to = s_.q_latent.row(row) + h * wide + c.kv_lora;
            const float* from = q.row(row) + h * head_width + c.nope;
            for (int i = 0; i < wide - c.kv_lora; ++i) to[i] = i < c.rope ? from[i] : 0.0f;
        }
}

// One task: its queries pass over all tiles of their prefix.
void Model::mla_attend_work(const Layer& layer, const Batch& batch, const MlaWork& w, std::vector<float>& scratch) {
    const Config& c = config;
    const int width = c.row_width(), wide = round16(width), latent = c.kv_lora, out_wide = round16(latent);
    const float scale = 1.0f / std::sqrt(float(c.nope + c.rope));
    const Segment& seg = *w.segment;
    const int queries = w.tokens * w.heads;
    scratch.resize(size_t(queries) * (size_t(wide) + out_wide + kTile + 3) + size_t(kTile) * width + 64);
    float *q = scratch.data(), *out = q + queries * wide, *scores = out + queries * out_wide;
    float *maximum = scores + queries * kTile, *gathered = maximum + 3 * queries;
    Softmax softmax{scores, maximum, maximum + queries, maximum + 2 * queries, queries};
    for (int r = 0; r < queries; ++r) {
        const float* from = s_.q_latent.row(seg.row0 + w.token0 + r / w.heads) + (w.head0 + r % w.heads) * wide;
        std::memcpy(q + r * wide, from, size_t(wide) * 4);
        softmax.maximum[r] = -kInfinity, softmax.sum[r] = 0;
    }
    std::memset(out, 0, size_t(queries) * out_wide * 4);
    const int64_t first = seg.start + w.token0, last = first + w.tokens - 1;
    for (int64_t at = 0; at <= last; at += kTile) {
        const int count = last - at + 1 < kTile ? int(last - at + 1) : kTile;
        const float* tile = batch.row(seg, c, layer.index, at);
        if (at % batch.block_tokens + count > batch.block_tokens) {  // the tile spans blocks: bring it together
            for (int j = 0; j < count; ++j)
                std::memcpy(gathered + j * width, batch.row(seg, c, layer.index, at + j), size_t(width) * 4);
            tile = gathered;
        }
        tile_scores(q, wide, queries, tile, width, count, scores);
        softmax.update(scale, [&](int r) {
            const int64_t visible = first + r / w.heads - at + 1;
            return visible < count ? int(visible) : count;
        });
        tile_mix(out, out_wide, softmax, tile, width, count, latent);
    }
    for (int r = 0; r < queries; ++r) {
        float* to = s_.o_latent.row(seg.row0 + w.token0 + r / w.heads) + (w.head0 + r % w.heads) * out_wide;
        const F16 inverse = set16(1.0f / softmax.sum[r]);
        each16(latent, [&](int i, int lanes, int) {
            store16_n(to + i, mul(load16_n(out + r * out_wide + i, lanes), inverse), lanes);
        });
    }
}

void Model::mla_attend(const Layer& layer, const Batch& batch) {
    const std::vector<MlaWork> work = share_out(batch.segments, config.heads, pool.threads());
    pool.run(int(work.size()), [&](int task, int thread) {
        mla_attend_work(layer, batch, work[size_t(task)], thread_scratch_[size_t(thread)]);
    });
}

void Model::mla(const Layer& layer, const Batch& batch) {
    const Config& c = config;
    timed(Op::kMlaQuery, [&] { mla_queries(layer, batch.rows); });
    timed(Op::kMlaAttend, [&] { mla_attend(layer, batch); });
    timed(Op::kMlaValue, [&] {
        const int gate_at = (c.q_lora ? c.q_lora : c.q_width()) + c.row_width(), out_wide = round16(c.kv_lora);
        jobs_.assign(size_t(c.heads), GemmJob{});
        for (int h = 0; h < c.heads; ++h) {
            GemmJob& job = jobs_[size_t(h)];
            job.w = &layer.matrix(MatrixSlot::kValueUp, h);
            job.a = s_.o_latent.data + h * out_wide, job.lda = s_.o_latent.stride, job.m = batch.rows;
            job.c = s_.mixed.data + h * c.v_dim, job.ldc = s_.mixed.stride;
            if (c.mla_gate) job.finish = Finish::kGate, job.d = s_.in.data + gate_at + h * c.v_dim, job.ldd = s_.in.stride;
        }
        gemm.run(jobs_.data(), c.heads);
    });
}

}  // namespace mr
