// One pass through the layers. Between two attentions a row needs no other, so where weights stay in the caches a
// thread takes its rows through everything that lies between: threads then meet twice a layer, and what they wrote stays
// in their own caches. Several sequences need not meet at all.
#include <algorithm>

#include "network.h"
#include "rows.h"

namespace mr {
namespace {

void move_row(const Buffer& buffer, int from, int to) {
    std::memcpy(buffer.row(to), buffer.row(from), size_t(buffer.stride) * 4);
}

bool all_rows_give_logits(const Batch& batch) {
    for (const Segment& s : batch.segments)
        if (s.num_logits() != s.tokens) return false;
    return true;
}

}  // namespace

void Model::embed(const Batch& batch, const Part& part) {
    const int d = config.hidden;
    for (int row = part.row0; row < part.row0 + part.rows; ++row) {
        float* to = s_.residual[0].row(row);
        const int64_t at = int64_t(batch.ids[row]) * d;
        if (embedding_kind == Kind::kF32) {
            std::memcpy(to, static_cast<const float*>(embedding) + at, size_t(d) * 4);
        } else {
            const uint16_t* from = static_cast<const uint16_t*>(embedding) + at;
            for (int i = 0; i < d; ++i) to[i] = bf16_to_float(from[i]);
        }
    }
}

// x = RMSNorm of the row's AttnRes mix: the sources' raw vectors, weighted by the softmax of
// their normed vectors' scores. Without a mix, RMSNorm of the prefix sum alone.
// All rows take one step after the other together: a row by itself mostly waits for its own sums.
void Model::mix_norm_rows(int row0, int rows, int blocks, const float* mix, const float* norm) {
    const int d = config.hidden;
    constexpr int kScores = kMaxSources + 16;
    alignas(64) float scores[kMixRows][kScores] = {}, scale[kMixRows];
    if (!mix || blocks == 0) {
        for (int r = 0; r < rows; ++r) rms_norm(s_.residual[size_t(blocks)].row(row0 + r), norm, d, config.eps, s_.x.row(row0 + r));
        return;
    }
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i <= blocks; i += 2) {  // two sources at a time, whose four sums end in one tree
            const bool two = i < blocks;
            const float *v = s_.residual[size_t(i)].row(row0 + r), *w = s_.residual[size_t(i + two)].row(row0 + r);
            Sum squares, dot, squares2, dot2;
            each16(d, [&](int c, int lanes, int j) {
                const F16 a = load16_n(v + c, lanes), b = load16_n(w + c, lanes), m = load16_n(mix + c, lanes);
                squares.part[j] = fma(a, a, squares.part[j]);
                dot.part[j] = fma(a, m, dot.part[j]);
                squares2.part[j] = fma(b, b, squares2.part[j]);
                dot2.part[j] = fma(b, m, dot2.part[j]);
            });
            float sums[4];
            sum16x4(squares.whole(), dot.whole(), squares2.whole(), dot2.whole(), sums);
            for (int k = 0; k <= two; ++k) scores[r][i + k] = sums[2 * k + 1] / std::sqrt(sums[2 * k] / float(d) + config.eps);
        }
    for (int r = 0; r < rows; ++r) {
        float* score = scores[r];
        float top = score[0], total = 0;
        for (int i = 1; i <= blocks; ++i) top = top < score[i] ? score[i] : top;
        for (int i = 0; i <= blocks; ++i) score[i] -= top;
        for (int i = 0; i <= blocks; i += 16) store16(score + i, exp(load16(score + i)));
        for (int i = 0; i <= blocks; ++i) total += score[i];
        for (int i = 0; i <= blocks; ++i) score[i] /= total;
    }
    for (int r = 0; r < rows; ++r) {
        const float* source[kMaxSources];
        for (int i = 0; i <= blocks; ++i) source[i] = s_.residual[size_t(i)].row(row0 + r);
        Sum squares;
        each16(d, [&](int c, int lanes, int j) {
            F16 sum = zero16();
            for (int i = 0; i <= blocks; ++i) sum = fma(set16(scores[r][i]), load16_n(source[i] + c, lanes), sum);
            squares.part[j] = fma(sum, sum, squares.part[j]);
            store16_n(s_.x.row(row0 + r) + c, sum, lanes);
        });
        scale[r] = 1.0f / std::sqrt(squares.total() / float(d) + config.eps);
    }
    for (int r = 0; r < rows; ++r) scale_norm(s_.x.row(row0 + r), norm, d, scale[r], s_.x.row(row0 + r));
}

void Model::mix_norm(const Part& part, int blocks, const float* mix, const float* norm) {
    part.each_run(kMixRows, [&](int row, int rows) { mix_norm_rows(row, rows, blocks, mix, norm); });
}

// The layer's input, its projections, and what its attention needs besides.
void Model::before_attention(int i, const Batch& batch, const Part& part) {
    const Layer& layer = layers[size_t(i)];
    if (i == 0) timed(part.hand, Op::kEmbed, [&] { embed(batch, part); });
    const float* mix = config.res_block ? layer.vector(VectorSlot::kAttnRes) : nullptr;
    timed(part.hand, Op::kMix, [&] { mix_norm(part, blocks_before(i), mix, layer.vector(VectorSlot::kInNorm)); });
    timed(part.hand, Op::kAttnIn, [&] { part.gemm.run(part.job(layer.matrix(MatrixSlot::kAttnIn), s_.x, s_.in)); });
    if (layer.mla) timed(part.hand, Op::kMlaStore, [&] { mla_store(layer, batch, part); });
    else timed(part.hand, Op::kKdaGates, [&] { kda_gates(layer, part); });
}

void Model::after_attention(int i, const Batch& batch, const Part& part) {
    const Layer& layer = layers[size_t(i)];
    const int blocks = blocks_in(i);
    const Buffer& h = s_.residual[size_t(blocks)];
    if (layer.mla) timed(part.hand, Op::kMlaValue, [&] { mla_values(layer, part); });
    GemmJob job = part.job(layer.matrix(MatrixSlot::kAttnOut), s_.mixed, h);
    // At a boundary the raw layer input became a block, and the prefix restarts from the attention output alone.
    if (blocks == blocks_before(i)) job.finish = Finish::kAdd, job.d = job.c, job.ldd = job.ldc;
    timed(part.hand, Op::kAttnOut, [&] { part.gemm.run(job); });
    const float* mix = config.res_block ? layer.vector(VectorSlot::kFfnRes) : nullptr;
    timed(part.hand, Op::kMix, [&] { mix_norm(part, blocks, mix, layer.vector(VectorSlot::kPostNorm)); });
    if (layer.dense) dense(layer, part, h);
    else moe(layer, part, h);
    if (!batch.taps) return;
    for (size_t tap = 0; tap < taps.size(); ++tap)
        for (int row = part.row0; taps[tap] == i && row < part.row0 + part.rows; ++row) {
            float* to = batch.taps + (int64_t(row) * int64_t(taps.size()) + int64_t(tap)) * config.hidden;
            std::memcpy(to, h.row(row), size_t(config.hidden) * 4);
        }
}

void Model::attention(const Layer& layer, const Batch& batch, const Crew& crew) {
    if (layer.mla) timed(crew.hand, Op::kMlaAttend, [&] { mla_attend(layer, batch, crew); });
    else timed(crew.hand, Op::kKda, [&] { kda(layer, batch, crew); });
}

// f(part) for parts that cover the batch's rows.
template <class F>
void Model::stage(const Batch& batch, const Crew& crew, const F& f) {
    const int groups = min_int(crew.groups, batch.rows);
    if (groups <= 1) return f(Part{batch.row0, batch.rows, crew.hand, crew.gemm, crew.pool});
    crew.run(groups, [&](int group, Hand& hand) {
        const int first = batch.rows * group / groups, end = batch.rows * (group + 1) / groups;
        f(Part{batch.row0 + first, end - first, hand, hand.alone, nullptr});
    });
}

void Model::layers_of(Batch batch, const Crew& crew) {
    const int last = config.num_layers - 1;
    // What later tokens need is kept for every row; past that, the last layer only serves rows with logits, unless
    // somebody wants its sums.
    const bool narrows = !all_rows_give_logits(batch), tapped = batch.taps && !taps.empty() && taps.back() == last;
    const bool early = narrows && !tapped;  // inside the last layer
    for (int i = 0; i <= last; ++i) {
        const Layer& layer = layers[size_t(i)];
        const bool cut = early && i == last;
        stage(batch, crew, [&](const Part& part) {
            if (i) after_attention(i - 1, batch, part);
            before_attention(i, batch, part);
            if (layer.mla && !cut) mla_queries(layer, part);
        });
        if (cut && layer.mla) {
            batch = narrow(batch, blocks_in(i), s_.in);
            if (!batch.rows) return;
            stage(batch, crew, [&](const Part& part) { mla_queries(layer, part); });
        }
        attention(layer, batch, crew);
        if (!layer.mla && batch.progress) batch.progress->layer_done();
        if (cut && !layer.mla) batch = narrow(batch, blocks_in(i), s_.mixed);
    }
    if (!batch.rows) return;
    if (tapped && narrows) {
        stage(batch, crew, [&](const Part& part) { after_attention(last, batch, part); });
        batch = narrow(batch, blocks_in(last), s_.x);
        if (!batch.rows) return;
    }
    stage(batch, crew, [&](const Part& part) {
        if (!tapped || !narrows) after_attention(last, batch, part);
        timed(part.hand, Op::kLogits, [&] { logits(batch, part); });
    });
}

// The rows that want logits, moved together: in the residual stream and in `attention`, the buffer in use.
Batch Model::narrow(const Batch& batch, int blocks, const Buffer& attention) {
    Batch kept = batch;
    kept.segments.clear();
    kept.rows = 0;
    for (Segment s : batch.segments) {
        const int n = s.num_logits(), from = s.row0 + s.tokens - n;
        if (!n) continue;
        const int to = s.row0 = batch.row0 + kept.rows;
        s.start += s.tokens - n, s.tokens = n;
        kept.segments.push_back(s);
        kept.rows += n;
        for (int row = 0; row < n && from != to; ++row) {  // ascending: rows only ever move up
            for (int i = 0; i <= blocks; ++i) move_row(s_.residual[size_t(i)], from + row, to + row);
            move_row(attention, from + row, to + row);
        }
    }
    return kept;
}

void Model::logits(const Batch& batch, const Part& part) {
    const float* mix = config.res_block ? globals.vector(VectorSlot::kFinalRes) : nullptr;
    const float* norm = globals.vector(VectorSlot::kFinalNorm);
    mix_norm(part, num_blocks(), mix, norm);
    GemmJob job = part.job(globals.matrix(MatrixSlot::kHead), s_.x, s_.x);
    job.c = batch.logits + int64_t(part.row0 - batch.row0) * config.vocab, job.ldc = config.vocab;
    part.gemm.run(job);
}

// Parts of a batch that are about equally much work and share no sequence, one a thread; empty where there are none.
std::vector<Batch> Model::apart(const Batch& batch, int threads) const {
    std::vector<Batch> parts;
    if (batch.progress || int(batch.segments.size()) < threads) return parts;
    const auto cost = [&](const Segment& s) {
        const double row = double(config.heads) * num_mla * (2 * config.kv_lora + config.rope);
        return double(s.tokens) * (row_macs_ + row * double(s.start + s.tokens));
    };
    double total = 0, done = 0, most = 0;
    for (const Segment& s : batch.segments) total += cost(s);
    Batch part = batch;
    part.segments.clear(), part.rows = 0;
    for (const Segment& s : batch.segments) {
        const double share = total / threads, before = done, edge = share * double(parts.size() + 1);
        done += cost(s);
        if (part.rows && done - edge > edge - before) {  // closer to an equal share without this one
            const Batch next = part;
            parts.push_back(next);
            part.row0 += part.rows;
            for (const Segment& ended : part.segments) part.logits += int64_t(ended.num_logits()) * config.vocab;
            part.segments.clear(), part.rows = 0;
        }
        part.segments.push_back(s), part.rows += s.tokens;
    }
    parts.push_back(part);
    for (const Batch& p : parts) {
        double sum = 0;
        for (const Segment& s : p.segments) sum += cost(s);
        most = std::max(most, sum);
    }
    if (int(parts.size()) != threads || most > kUneven * total / threads) parts.clear();
    return parts;
}

void Model::forward(const Batch& batch) {
    const int sequences = int(batch.segments.size());
    const double few = sequences > kFewSequences ? 1.0 : batch.rows > sequences ? kFewDrafted : kFewShare;
    pool.alone(double(batch.rows) * row_macs_ < few * share_macs);
    reserve(batch.rows);
    const int threads = pool.threads();
    Crew crew{hands_[0], gemm, &pool, hands_.data(), 1};
    if (threads == 1 || double(arena.bytes()) > cached_bytes) return layers_of(batch, crew);
    if (batch.rows <= threads * kMostRowsTogether) {
        const std::vector<Batch> parts = apart(batch, threads);
        if (!parts.empty())
            return pool.run(threads, [&](int part, int thread) {
                Hand& hand = hands_[size_t(thread)];
                layers_of(parts[size_t(part)], Crew{hand, hand.alone, nullptr, nullptr, 1});
            });
    }
    // So few rows, or a few that do not come out even, are worked on together, product by product.
    const bool few_rows = batch.rows < 2 * threads || (batch.rows < 3 * threads && batch.rows % threads);
    if (!few_rows) crew.groups = threads * std::max(1, batch.rows / (threads * kMostRowsTogether));
    layers_of(batch, crew);
}

}  // namespace mr
