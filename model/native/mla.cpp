// Gated MLA without positions, always in the absorbed form over the paged rows (normed latent | raw shared key), for
// prompts and for decode alike. Online softmax over tiles of kTile rows at absolute positions, so that a query's
// arithmetic depends on its own prefix alone.
#include <algorithm>

#include "attend.h"
#include "network.h"

namespace mr {
namespace {

constexpr int kQueryRows = 96;  // (token, head) rows that share a pass over the tiles; divides into kTile tokens

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
void Model::mla_store(const Layer& layer, const Batch& batch, const Part& part) {
    const Config& c = config;
    const int kv_at = c.q_lora ? c.q_lora : c.q_width();
    for (const Segment& seg : batch.segments)
        for (int t = std::max(0, part.row0 - seg.row0); t < min_int(seg.tokens, part.row0 + part.rows - seg.row0); ++t) {
            const float* in = s_.in.row(seg.row0 + t) + kv_at;
            float* row = batch.row(seg, c, layer.index, seg.start + t);
            rms_norm(in, layer.vector(VectorSlot::kKvNorm), c.kv_lora, c.lora_eps, row);
            std::memcpy(row + c.kv_lora, in + c.kv_lora, size_t(c.rope) * 4);
        }
}

// q_latent[row][head] = (W_UK,h^T q_nope | q_rope), zero-padded to whole 16 floats.
void Model::mla_queries(const Layer& layer, const Part& part) {
    const Config& c = config;
    const int head_width = c.nope + c.rope, wide = round16(c.row_width());
    const Buffer q = c.q_lora ? s_.q : s_.in;
    timed(part.hand, Op::kMlaQuery, [&] {
        if (c.q_lora) {
            part.each_row([&](int row) {
                rms_norm(s_.in.row(row), layer.vector(VectorSlot::kQaNorm), c.q_lora, c.lora_eps, s_.in.row(row));
            });
            part.gemm.run(part.job(layer.matrix(MatrixSlot::kQb), s_.in, q));
        }
        std::vector<GemmJob>& jobs = part.hand.jobs;
        jobs.clear();
        for (int h = 0; h < c.heads; ++h) {
            jobs.push_back(part.job(layer.matrix(MatrixSlot::kKeyUp, h), q, s_.q_latent));
            jobs.back().a += h * head_width, jobs.back().c += h * wide;
        }
        part.gemm.run(jobs.data(), c.heads);
        for (int row = part.row0; row < part.row0 + part.rows; ++row)
            for (int h = 0; h < c.heads; ++h) {
                float* to = s_.q_latent.row(row) + h * wide + c.kv_lora;
                const float* from = q.row(row) + h * head_width + c.nope;
                for (int i = 0; i < wide - c.kv_lora; ++i) to[i] = i < c.rope ? from[i] : 0.0f;
            }
    });
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
        tile_scores(q, wide, queries, tile, width, width, count, scores);
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

void Model::mla_attend(const Layer& layer, const Batch& batch, const Crew& crew) {
    const std::vector<MlaWork> work = share_out(batch.segments, config.heads, crew.threads());
    crew.run(int(work.size()),
             [&](int task, Hand& hand) { mla_attend_work(layer, batch, work[size_t(task)], hand.scratch); });
}

void Model::mla_values(const Layer& layer, const Part& part) {
    const Config& c = config;
    const int gate_at = (c.q_lora ? c.q_lora : c.q_width()) + c.row_width(), out_wide = round16(c.kv_lora);
    std::vector<GemmJob>& jobs = part.hand.jobs;
    jobs.clear();
    for (int h = 0; h < c.heads; ++h) {
        GemmJob job = part.job(layer.matrix(MatrixSlot::kValueUp, h), s_.o_latent, s_.mixed);
        job.a += h * out_wide, job.c += h * c.v_dim;
        if (c.mla_gate) job.finish = Finish::kGate, job.d = s_.in.row(part.row0) + gate_at + h * c.v_dim, job.ldd = s_.in.stride;
        jobs.push_back(job);
    }
    part.gemm.run(jobs.data(), c.heads);
}

}  // namespace mr
