#include "network.h"

#include <sys/eventfd.h>
#include <time.h>

#include <stdexcept>
#include <string>

#include "rows.h"

namespace mr {
namespace {

constexpr int kMaxSources = 64;  // AttnRes vectors one mix may weigh

void move_row(const Buffer& buffer, int from, int to) {
    std::memcpy(buffer.row(to), buffer.row(from), size_t(buffer.stride) * 4);
}

}  // namespace

double now(Clock clock) {
    timespec t;
    clock_gettime(clock == Clock::kCpu ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Counted after the layer's writes, so that whoever sees the count sees them. A full counter only loses a wake-up.
void Progress::layer_done() {
    __atomic_fetch_add(&value, 1, __ATOMIC_RELEASE);
    if (__atomic_load_n(&watchers, __ATOMIC_RELAXED)) eventfd_write(fd, 1);
}

Model::Model(const Config& c, const uint8_t* layer_kinds, int threads)
    : config(c), pool(threads), gemm(pool), layers(size_t(c.num_layers)), thread_scratch_(size_t(pool.size())) {
    int mla = 0, kda = 0;
    for (int i = 0; i < c.num_layers; ++i) {
        Layer& l = layers[size_t(i)];
        l.mla = layer_kinds[i] & 1, l.dense = layer_kinds[i] & 2;
        l.index = l.mla ? mla++ : kda++;
    }
    num_mla = mla, num_kda = kda;
    act_ = {c.situ != 0, c.beta, c.linear_beta};
    if (num_blocks() + 1 > kMaxSources) throw std::runtime_error("more AttnRes blocks than this build can mix");
    if (c.conv_kernel < 1 || c.conv_kernel > kMaxTaps) throw std::runtime_error("convolution kernel is too long");
}

void Model::for_rows(int rows, const std::function<void(int)>& f) {
    constexpr int kRowsPerTask = 16;
    pool.run((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int task, int) {
        const int end = min_int(rows, (task + 1) * kRowsPerTask);
        for (int row = task * kRowsPerTask; row < end; ++row) f(row);
    });
}

void Model::reserve(int rows) {
    if (rows <= reserved_rows_) return;
    const Config& c = config;
    reserved_rows_ = rows;
    const int kda_in = 2 * c.keys() + 2 * c.values() + 2 * c.gate_rank + c.kda_heads;
    const int mla_in = (c.q_lora ? c.q_lora : c.q_width()) + c.row_width() + c.heads * c.v_dim;
    const int listed = rows * c.top_k;
    struct Want { Buffer* buffer; int rows, width; };
    s_.residual.assign(size_t(num_blocks()) + 1, Buffer{});
    std::vector<Want> wants = {
        {&s_.x, rows, c.hidden},
        {&s_.in, rows, kda_in > mla_in ? kda_in : mla_in},
        {&s_.decay, rows, c.keys()},
        {&s_.gate, rows, c.values()},
        {&s_.mixed, rows, c.values() > c.heads * c.v_dim ? c.values() : c.heads * c.v_dim},
        {&s_.q, rows, c.q_width()},
        {&s_.q_latent, rows, c.heads * round16(c.row_width())},
        {&s_.o_latent, rows, c.heads * round16(c.kv_lora)},
        {&s_.ffn, rows, c.experts + c.latent},
        {&s_.joined, rows, c.latent + c.shared_inter},
        {&s_.act, listed, c.expert_inter},
        {&s_.expert, listed, c.expert_size()},
        {&s_.wide, rows, c.dense_inter},
    };
    for (Buffer& b : s_.residual) wants.push_back({&b, rows, c.hidden});
    size_t total = 16;
    for (Want& w : wants) w.buffer->stride = round16(w.width), total += size_t(w.rows) * size_t(w.buffer->stride);
    memory_ = std::vector<float>();  // freed first, so that growing never holds two
    memory_.resize(total);
    float* at = memory_.data();
    at += (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64 / 4;
    for (Want& w : wants) w.buffer->data = at, at += ptrdiff_t(w.rows) * w.buffer->stride;
    s_.chosen.resize(size_t(listed));
    s_.order.resize(size_t(listed));
    s_.place.resize(size_t(listed));
    s_.weight.resize(size_t(listed));
}

void Model::embed(const Batch& batch) {
    const int d = config.hidden;
    for (int row = 0; row < batch.rows; ++row) {
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
void Model::mix_norm_row(int row, int blocks, const float* mix, const float* norm) {
    const int d = config.hidden;
    float* x = s_.x.row(row);
    if (!mix || blocks == 0) return rms_norm(s_.residual[size_t(blocks)].row(row), norm, d, config.eps, x);
    float score[kMaxSources];
    float top = 0;
    for (int i = 0; i <= blocks; ++i) {
        const float* v = s_.residual[size_t(i)].row(row);
        Sum squares, dot;
        each16(d, [&](int c, int lanes, int j) {
            const F16 a = load16_n(v + c, lanes);
            squares.part[j] = fma(a, a, squares.part[j]);
            dot.part[j] = fma(a, load16_n(mix + c, lanes), dot.part[j]);
        });
        score[i] = dot.total() / std::sqrt(squares.total() / float(d) + config.eps);
        top = i == 0 || top < score[i] ? score[i] : top;
    }
    float total = 0;
    for (int i = 0; i <= blocks; ++i) total += score[i] = exp1(score[i] - top);
    for (int i = 0; i <= blocks; ++i) score[i] /= total;
    each16(d, [&](int c, int lanes, int) {
        F16 sum = zero16();
        for (int i = 0; i <= blocks; ++i)
            sum = fma(set16(score[i]), load16_n(s_.residual[size_t(i)].row(row) + c, lanes), sum);
        store16_n(x + c, sum, lanes);
    });
    rms_norm(x, norm, d, config.eps, x);
}

void Model::mix_norm(int rows, int blocks, const float* mix, const float* norm) {
    timed(Op::kMix, [&] { for_rows(rows, [&](int row) { mix_norm_row(row, blocks, mix, norm); }); });
}

void Model::forward(Batch batch) {
    const Config& c = config;
    const double few = int(batch.segments.size()) <= kFewSequences ? kFewShare : 1.0;
    pool.alone(double(batch.rows) * row_macs_ < few * share_macs);
    reserve(batch.rows);
    timed(Op::kEmbed, [&] { embed(batch); });
    int blocks = 0;  // residual[blocks] is the prefix sum h
    size_t next_tap = 0;
    for (int i = 0; i < c.num_layers; ++i) {
        const Layer& layer = layers[size_t(i)];
        const auto mix = [&](VectorSlot s) { return c.res_block ? layer.vector(s) : nullptr; };
        mix_norm(batch.rows, blocks, mix(VectorSlot::kAttnRes), layer.vector(VectorSlot::kInNorm));
        // At a boundary the raw layer input becomes a block, and the prefix restarts from the attention output alone.
        const bool boundary = c.res_block && i % c.res_block == 0;
        if (boundary) ++blocks;
        float* h = s_.residual[size_t(blocks)].data;
        GemmJob job;
        job.w = &layer.matrix(MatrixSlot::kAttnIn);
        job.a = s_.x.data, job.lda = s_.x.stride, job.m = batch.rows, job.c = s_.in.data, job.ldc = s_.in.stride;
        timed(Op::kAttnIn, [&] { gemm.run(job); });
        // What later tokens need is kept for every row; past that, the last layer only serves rows with logits.
        const bool tapped = batch.taps && next_tap < taps.size() && taps[next_tap] == i;
        const bool last = i + 1 == c.num_layers && !tapped;
        if (layer.mla) {
            timed(Op::kMlaStore, [&] { mla_store(layer, batch); });
            if (last) batch = narrow(batch, blocks, s_.in);
            mla(layer, batch);
        } else {
            kda(layer, batch);
            if (batch.progress) batch.progress->layer_done();
            if (last) batch = narrow(batch, blocks, s_.mixed);
        }
        if (!batch.rows) return;
        job.m = batch.rows;
        job.w = &layer.matrix(MatrixSlot::kAttnOut);
        job.a = s_.mixed.data, job.lda = s_.mixed.stride, job.c = h, job.ldc = s_.x.stride;
        if (!boundary) job.finish = Finish::kAdd, job.d = h, job.ldd = s_.x.stride;
        timed(Op::kAttnOut, [&] { gemm.run(job); });
        mix_norm(batch.rows, blocks, mix(VectorSlot::kFfnRes), layer.vector(VectorSlot::kPostNorm));
        if (layer.dense) dense(layer, batch.rows, h);
        else moe(layer, batch.rows, h);
        if (!tapped) continue;
        for (int row = 0; row < batch.rows; ++row) {
            float* to = batch.taps + (int64_t(row) * int64_t(taps.size()) + int64_t(next_tap)) * c.hidden;
            std::memcpy(to, s_.residual[size_t(blocks)].row(row), size_t(c.hidden) * 4);
        }
        ++next_tap;
        if (i + 1 == c.num_layers) batch = narrow(batch, blocks, s_.x);
    }
    if (!batch.rows) return;
    timed(Op::kLogits, [&] { logits(batch, blocks); });
}

// The rows that want logits, moved together: in the residual stream and in `attention`, the buffer in use.
Batch Model::narrow(const Batch& batch, int blocks, const Buffer& attention) {
    Batch kept = batch;
    kept.segments.clear();
    kept.rows = 0;
    for (Segment s : batch.segments) {
        const int n = s.num_logits(), from = s.row0 + s.tokens - n;
        if (!n) continue;
        s.row0 = kept.rows, s.start += s.tokens - n, s.tokens = n;
        kept.segments.push_back(s);
        for (int row = from; row < from + n; ++row, ++kept.rows) {  // ascending: rows only ever move up
            if (row == kept.rows) continue;
            for (int i = 0; i <= blocks; ++i) move_row(s_.residual[size_t(i)], row, kept.rows);
            move_row(attention, row, kept.rows);
        }
    }
    return kept;
}

void Model::logits(const Batch& batch, int blocks) {
    const float* mix = config.res_block ? globals.vector(VectorSlot::kFinalRes) : nullptr;
    for_rows(batch.rows, [&](int row) { mix_norm_row(row, blocks, mix, globals.vector(VectorSlot::kFinalNorm)); });
    GemmJob job;
    job.w = &globals.matrix(MatrixSlot::kHead);
    job.a = s_.x.data, job.lda = s_.x.stride, job.m = batch.rows;
    job.c = batch.logits, job.ldc = config.vocab;
    gemm.run(job);
}

namespace {

[[noreturn]] void misfit(int layer, const char* what, int slot, int n, int k) {
    throw std::runtime_error("layer " + std::to_string(layer) + ": " + what + " slot " + std::to_string(slot) +
                             " is missing or not " + std::to_string(n) + " by " + std::to_string(k));
}

void expect(const Layer& l, int layer, MatrixSlot slot, int count, int n, int k) {
    const auto& m = l.matrices[int(slot)];
    if (int(m.size()) != count) misfit(layer, "matrix", int(slot), n, k);
    for (const Matrix& x : m)
        if (!x.data || x.n != n || x.k != k) misfit(layer, "matrix", int(slot), n, k);
}

void expect(const Layer& l, int layer, VectorSlot slot, int n) {
    if (int(l.vectors[int(slot)].size()) != n) misfit(layer, "vector", int(slot), n, 1);
}

}  // namespace

bool Model::widens_experts() const {
    const Config& c = config;
    double values = 0;
    for (const Layer& l : layers)
        if (!l.dense) values += 3.0 * c.experts * c.expert_inter * c.expert_size();
    return 2 * values <= widen_bytes;
}

void Model::check() {
    const Config& c = config;
    row_macs_ = 0;
    for (const Layer& l : layers)
        for (int slot = 0; slot < int(MatrixSlot::kCount); ++slot)
            for (const Matrix& m : l.matrices[slot]) {
                const bool routed = slot == int(MatrixSlot::kExpertIn) || slot == int(MatrixSlot::kExpertOut);
                row_macs_ += double(m.n) * m.k * (m.glu ? 2 : 1) * (routed ? double(c.top_k) / c.experts : 1.0);
            }
    for (int i = 0; i < c.num_layers; ++i) {
        const Layer& l = layers[size_t(i)];
        const auto matrix = [&](MatrixSlot s, int n, int k, int count = 1) { expect(l, i, s, count, n, k); };
        const auto vector = [&](VectorSlot s, int n) { expect(l, i, s, n); };
        if (l.mla) {
            const int q = c.q_lora ? c.q_lora : c.q_width(), gate = c.mla_gate ? c.heads * c.v_dim : 0;
            matrix(MatrixSlot::kAttnIn, q + c.row_width() + gate, c.hidden);
            if (c.q_lora) matrix(MatrixSlot::kQb, c.q_width(), c.q_lora), vector(VectorSlot::kQaNorm, c.q_lora);
            matrix(MatrixSlot::kKeyUp, c.kv_lora, c.nope, c.heads);
            matrix(MatrixSlot::kValueUp, c.v_dim, c.kv_lora, c.heads);
            vector(VectorSlot::kKvNorm, c.kv_lora);
            matrix(MatrixSlot::kAttnOut, c.hidden, c.heads * c.v_dim);
        } else {
            const int gate = c.full_rank_gate ? c.values() : c.gate_rank;
            matrix(MatrixSlot::kAttnIn, 2 * c.keys() + c.values() + gate + c.gate_rank + c.kda_heads, c.hidden);
            matrix(MatrixSlot::kDecay, c.keys(), c.gate_rank);
            if (!c.full_rank_gate) matrix(MatrixSlot::kGateB, c.values(), c.gate_rank);
            vector(VectorSlot::kConvQ, c.conv_kernel * c.keys());
            vector(VectorSlot::kConvK, c.conv_kernel * c.keys());
            vector(VectorSlot::kConvV, c.conv_kernel * c.values());
            vector(VectorSlot::kDecayRate, c.kda_heads);
            vector(VectorSlot::kDecayBias, c.keys());
            vector(VectorSlot::kOutNorm, c.value_dim);
            matrix(MatrixSlot::kAttnOut, c.hidden, c.values());
        }
        vector(VectorSlot::kInNorm, c.hidden);
        vector(VectorSlot::kPostNorm, c.hidden);
        if (c.res_block) vector(VectorSlot::kAttnRes, c.hidden), vector(VectorSlot::kFfnRes, c.hidden);
        if (l.dense) {
            matrix(MatrixSlot::kDenseIn, c.dense_inter, c.hidden);
            matrix(MatrixSlot::kDenseOut, c.hidden, c.dense_inter);
            continue;
        }
        matrix(MatrixSlot::kFfnIn, c.experts + c.latent, c.hidden);
        vector(VectorSlot::kRouterBias, c.experts);
        matrix(MatrixSlot::kExpertIn, c.expert_inter, c.expert_size(), c.experts);
        matrix(MatrixSlot::kExpertOut, c.expert_size(), c.expert_inter, c.experts);
        matrix(MatrixSlot::kSharedIn, c.shared_inter, c.hidden);
        matrix(MatrixSlot::kFfnOut, c.hidden, c.latent + c.shared_inter);
        if (c.latent) vector(VectorSlot::kRoutedNorm, c.latent);
    }
    expect(globals, -1, MatrixSlot::kHead, 1, c.vocab, c.hidden);
    expect(globals, -1, VectorSlot::kFinalNorm, c.hidden);
    if (c.res_block) expect(globals, -1, VectorSlot::kFinalRes, c.hidden);
    if (!embedding) throw std::runtime_error("the embedding is missing");
}

}  // namespace mr
