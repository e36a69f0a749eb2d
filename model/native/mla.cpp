// Gated MLA without positions, always in the absorbed form over the paged rows (normed latent | raw shared key), for
// prompts and for decode alike. Online softmax over tiles of kTile rows at absolute positions, so that a query's
// arithmetic depends on its own prefix alone.
#include <limits>

#include "network.h"
#include "rows.h"

namespace mr {
namespace {

constexpr int kTile = 64;       // cache rows per softmax step
constexpr int kQueryRows = 96;  // (token, head) rows that share a pass over the tiles; divides into kTile tokens
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// scores[r][j] = q_r . row_j over `width` floats for R queries and J rows; q is zero past `width`.
template <int R, int J>
MR_INLINE void dots(const float* q, ptrdiff_t q_stride, const float* const* rows, int width, float* scores) {
    F16 acc[R * J];
#pragma GCC unroll 8
    for (int i = 0; i < R * J; ++i) acc[i] = zero16();
    const auto piece = [&](int c, auto load_row) {
        F16 row[J];
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) row[j] = load_row(rows[j] + c);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const F16 x = load16(q + r * q_stride + c);
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j) acc[r * J + j] = fma(x, row[j], acc[r * J + j]);
        }
    };
    int c = 0;
    for (; c + 16 <= width; c += 16) piece(c, [](const float* p) { return load16(p); });
    if (c < width) piece(c, [&](const float* p) { return load16_n(p, width - c); });
    float sums[R * J + 3];
    for (int i = 0; i < R * J; i += 4) {
        const auto pick = [&](int k) { return acc[i + k < R * J ? i + k : R * J - 1]; };
        sum16x4(pick(0), pick(1), pick(2), pick(3), sums + i);
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < J; ++j) scores[r * kTile + j] = sums[r * J + j];
}

template <int R, int J>
MR_INLINE void score_strip(const float* q, ptrdiff_t q_stride, const float* tile, int width, int count, float* scores) {
    for (int j = 0; j < count; j += J) {
        const float* rows[J];
        for (int i = 0; i < J; ++i) rows[i] = tile + ptrdiff_t(min_int(j + i, count - 1)) * width;
        dots<R, J>(q, q_stride, rows, width, scores + j);
    }
}

void tile_scores(const float* q, ptrdiff_t q_stride, int queries, const float* tile, int width, int count,
                 float* scores) {
    constexpr int many = kLanes == 16 ? 4 : 2;
    int r = 0;
    for (; r + many <= queries; r += many)
        score_strip<many, many>(q + r * q_stride, q_stride, tile, width, count, scores + r * kTile);
    for (; r < queries; ++r) score_strip<1, 4>(q + r * q_stride, q_stride, tile, width, count, scores + r * kTile);
}

// Turns a query's scores into weights in place; keeps the running maximum and sum; returns what the sum and output
// so far must be multiplied by. Rows from `visible` on are masked.
float soften(float* scores, int visible, float scale, float* maximum, float* sum) {
    F16 s[4], top = set16(-kInfinity);
    const F16 factor = set16(scale);
    for (int j = visible; j < kTile; ++j) scores[j] = -kInfinity;
    for (int i = 0; i < 4; ++i) {
        s[i] = load16(scores + i * 16);
        if (i * 16 < visible) s[i] = mul(s[i], factor);
        top = max(s[i], top);
    }
    const float before = *maximum, tile_top = max16(top);
    *maximum = before < tile_top ? tile_top : before;
    const F16 shift = set16(*maximum);
    for (int i = 0; i < 4; ++i) {
        s[i] = exp(sub(s[i], shift));
        store16(scores + i * 16, s[i]);
    }
    const float rescale = exp1(before - *maximum);
    *sum = *sum * rescale + sum16(add(add(s[0], s[1]), add(s[2], s[3])));
    return rescale;
}

// out_r = out_r * rescale_r + sum_j weights[r][j] * row_j, rows in ascending order, for N registers of columns.
template <int R, int N>
MR_INLINE void mix_columns(float* out, ptrdiff_t out_stride, const float* weights, const float* rescale,
                           const float* tile, ptrdiff_t width, int count) {
    V acc[R][N];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) acc[r][i] = mul(load(out + r * out_stride + i * kLanes), set1(rescale[r]));
    for (int j = 0; j < count; ++j, tile += width)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const V w = set1(weights[r * kTile + j]);
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) acc[r][i] = fma(w, load(tile + i * kLanes), acc[r][i]);
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

template <int R>
void mix_strip(float* out, ptrdiff_t out_stride, const float* weights, const float* rescale, const float* tile,
               ptrdiff_t width, int count, int columns) {
    int c = 0;
    for (; c + 4 * kLanes <= columns; c += 4 * kLanes)
        mix_columns<R, 4>(out + c, out_stride, weights, rescale, tile + c, width, count);
    for (; c + kLanes <= columns; c += kLanes)
        mix_columns<R, 1>(out + c, out_stride, weights, rescale, tile + c, width, count);
    if (c < columns)
        for (int r = 0; r < R; ++r)
            mix_tail(out + r * out_stride + c, weights + r * kTile, rescale[r], tile + c, width, count, columns - c);
}

void tile_mix(float* out, ptrdiff_t out_stride, int queries, const float* weights, const float* rescale,
              const float* tile, ptrdiff_t width, int count, int columns) {
    int r = 0;
    for (; r + 3 <= queries; r += 3)
        mix_strip<3>(out + r * out_stride, out_stride, weights + r * kTile, rescale + r, tile, width, count, columns);
    for (; r < queries; ++r)
        mix_strip<1>(out + r * out_stride, out_stride, weights + r * kTile, rescale + r, tile, width, count, columns);
}

// Some successive queries of a segment, and some of their heads: one task's share.
struct Work {
    const Segment* segment;
    int token0, tokens, head0, heads;
};

// Query blocks begin at multiples of their size in absolute position: all queries of one see the same tiles.
std::vector<Work> share_out(const std::vector<Segment>& segments, int heads, int threads) {
    std::vector<Work> work;
    int block = kTile;
    while (block > 1 && block * heads > kQueryRows) block /= 2;
    int blocks = 0;
    for (const Segment& s : segments) blocks += int((s.start + s.tokens - 1) / block - s.start / block) + 1;
    const int parts = blocks >= 2 * threads ? 1 : min_int(threads, heads);
    for (const Segment& s : segments)
        for (int t = 0; t < s.tokens;) {
            const int n = min_int(block - int((s.start + t) % block), s.tokens - t);
            for (int p = 0; p < parts; ++p) {
                const int head0 = heads * p / parts, head1 = heads * (p + 1) / parts;
                work.push_back({&s, t, n, head0, head1 - head0});
            }
            t += n;
        }
    return work;
}

}  // namespace

void Model::mla_prepare(const Layer& layer, const Batch& batch) {
    const Config& c = config;
    const int kv_at = c.q_lora ? c.q_lora : c.q_width();
    const auto one = [&](int segment, int t) {
        const Segment& seg = batch.segments[size_t(segment)];
        float* in = s_.in.row(seg.row0 + t);
        if (c.q_lora) rms_norm(in, layer.vector(VectorSlot::kQaNorm), c.q_lora, c.lora_eps, in);
        float* row = batch.row(seg, c, layer.index, seg.start + t);
        rms_norm(in + kv_at, layer.vector(VectorSlot::kKvNorm), c.kv_lora, c.lora_eps, row);
        for (int i = 0; i < c.rope; ++i) row[c.kv_lora + i] = in[kv_at + c.kv_lora + i];
    };
    for (int s = 0; s < int(batch.segments.size()); ++s)
        for (int t = 0; t < batch.segments[size_t(s)].tokens; ++t) one(s, t);
}

// q_latent[row][head] = (W_UK,h^T q_nope | q_rope), zero-padded to whole 16 floats.
void Model::mla_queries(const Layer& layer, int rows) {
    const Config& c = config;
    const int head_width = c.nope + c.rope, wide = round16(c.row_width());
    const Buffer q = c.q_lora ? s_.q : s_.in;
    if (c.q_lora) {
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

void Model::mla_attend(const Layer& layer, const Batch& batch) {
    const Config& c = config;
    const int width = c.row_width(), wide = round16(width), latent = c.kv_lora, out_wide = round16(latent);
    const float scale = 1.0f / std::sqrt(float(c.nope + c.rope));
    const std::vector<Work> work = share_out(batch.segments, c.heads, pool.threads());
    pool.run(int(work.size()), [&](int task, int thread) {
        const Work& w = work[size_t(task)];
        const Segment& seg = *w.segment;
        const int queries = w.tokens * w.heads;
        auto& scratch = thread_scratch_[size_t(thread)];
        scratch.resize(size_t(queries) * (size_t(wide) + out_wide + kTile + 3) + size_t(kTile) * width + 64);
        float* q = scratch.data();
        float *out = q + queries * wide, *scores = out + queries * out_wide, *maximum = scores + queries * kTile;
        float *sum = maximum + queries, *rescale = sum + queries, *gathered = rescale + queries;
        for (int r = 0; r < queries; ++r) {
            const float* from = s_.q_latent.row(seg.row0 + w.token0 + r / w.heads) + (w.head0 + r % w.heads) * wide;
            std::memcpy(q + r * wide, from, size_t(wide) * 4);
            maximum[r] = -kInfinity, sum[r] = 0;
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
            for (int r = 0; r < queries; ++r) {
                const int64_t visible = first + r / w.heads - at + 1;
                rescale[r] = soften(scores + r * kTile, visible < count ? int(visible) : count, scale, maximum + r, sum + r);
            }
            tile_mix(out, out_wide, queries, scores, rescale, tile, width, count, latent);
        }
        for (int r = 0; r < queries; ++r) {
            float* to = s_.o_latent.row(seg.row0 + w.token0 + r / w.heads) + (w.head0 + r % w.heads) * out_wide;
            const F16 inverse = set16(1.0f / sum[r]);
            each16(latent, [&](int i, int lanes, int) {
                store16_n(to + i, mul(load16_n(out + r * out_wide + i, lanes), inverse), lanes);
            });
        }
    });
}

void Model::mla(const Layer& layer, const Batch& batch) {
    const Config& c = config;
    timed(Op::kMlaPrepare, [&] { mla_prepare(layer, batch); });
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
