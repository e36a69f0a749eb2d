#include "drafter.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace mr {
namespace {

constexpr int kMaxRows = 512;  // context tokens written at once

[[noreturn]] void misfit(int layer, const char* what, int slot) {
    throw std::runtime_error("drafter layer " + std::to_string(layer) + ": " + what + " slot " + std::to_string(slot) +
                             " is missing or of another shape");
}

}  // namespace

Drafter::Drafter(const DraftConfig& c, int threads)
    : config(c), pool(threads), gemm(pool), layers(size_t(c.layers)), thread_scratch_(size_t(pool.size())) {}

void Drafter::check() {
    const DraftConfig& c = config;
    const auto matrix = [](const DraftLayer& l, int layer, DraftMatrix slot, int n, int k, int count = 1) {
        const auto& m = l.matrices[int(slot)];
        if (int(m.size()) != count) misfit(layer, "matrix", int(slot));
        for (const Matrix& x : m)
            if (x.n != n || x.k != k) misfit(layer, "matrix", int(slot));
    };
    const auto vector = [](const DraftLayer& l, int layer, DraftVector slot, int64_t n) {
        if (int64_t(l.vectors[int(slot)].size()) != n) misfit(layer, "vector", int(slot));
    };
    if (c.exact) {
        matrix(globals, -1, DraftMatrix::kContext, c.hidden, c.taps * c.hidden);
        matrix(globals, -1, DraftMatrix::kHead, c.vocab, c.hidden);
        if (c.markov_rank) matrix(globals, -1, DraftMatrix::kMarkovOut, c.vocab, c.markov_rank);
    } else {
        check_rounded();
    }
    vector(globals, -1, DraftVector::kContextNorm, c.hidden);
    vector(globals, -1, DraftVector::kFinalNorm, c.hidden);
    vector(globals, -1, DraftVector::kFrequency, c.rope / 2);
    if (c.markov_rank) vector(globals, -1, DraftVector::kMarkovIn, int64_t(c.vocab) * c.markov_rank);
    if (c.confidence) {
        vector(globals, -1, DraftVector::kConfidence, c.hidden + (c.confidence_markov ? c.markov_rank : 0));
        vector(globals, -1, DraftVector::kConfidenceBias, 1);
    }
    for (int i = 0; i < c.layers; ++i) {
        const DraftLayer& l = layers[size_t(i)];
        if (c.exact) {
            matrix(l, i, DraftMatrix::kRows, c.row_width(), c.hidden);
            matrix(l, i, DraftMatrix::kQa, c.q_lora, c.hidden);
            matrix(l, i, DraftMatrix::kQb, c.heads * c.head_width(), c.q_lora);
            matrix(l, i, DraftMatrix::kKeyUp, c.kv_lora, c.nope, c.heads);
            matrix(l, i, DraftMatrix::kValueUp, c.v_dim, c.kv_lora, c.heads);
            matrix(l, i, DraftMatrix::kOut, c.hidden, c.heads * c.v_dim);
            matrix(l, i, DraftMatrix::kMlpIn, c.inter, c.hidden);
            matrix(l, i, DraftMatrix::kMlpOut, c.hidden, c.inter);
        }
        vector(l, i, DraftVector::kInNorm, c.hidden);
        vector(l, i, DraftVector::kPostNorm, c.hidden);
        vector(l, i, DraftVector::kQaNorm, c.q_lora);
        vector(l, i, DraftVector::kRowNorm, c.kv_lora);
    }
    if (!embedding) throw std::runtime_error("the drafter's embedding is missing");
}

void Drafter::check_rounded() const {
    const DraftConfig& c = config;
    const auto matrix = [](const DraftLayer& l, int layer, DraftMatrix slot, int n, int k) {
        const ByteMatrix& m = l.rounded(slot);
        if (m.n != n || m.k != k) misfit(layer, "rounded matrix", int(slot));
    };
    matrix(globals, -1, DraftMatrix::kContext, c.hidden, c.taps * c.hidden);
    matrix(globals, -1, DraftMatrix::kRows, c.layers * c.row_width(), c.hidden);
    matrix(globals, -1, DraftMatrix::kHead, c.vocab, c.hidden);
    if (c.markov_rank) matrix(globals, -1, DraftMatrix::kMarkovOut, c.vocab, c.markov_rank);
    for (int i = 0; i < c.layers; ++i) {
        const DraftLayer& l = layers[size_t(i)];
        matrix(l, i, DraftMatrix::kQa, c.q_lora + c.row_width(), c.hidden);
        matrix(l, i, DraftMatrix::kQb, c.heads * round16(c.row_width()), c.q_lora);
        matrix(l, i, DraftMatrix::kOut, c.hidden, c.heads * c.kv_lora);
        matrix(l, i, DraftMatrix::kMlpIn, c.inter, c.hidden);
        matrix(l, i, DraftMatrix::kMlpOut, c.hidden, c.inter);
    }
}

void Drafter::reserve(int rows) {
    if (rows <= reserved_rows_) return;
    reserved_rows_ = rows;
    const DraftConfig& c = config;
    struct Want { Buffer* buffer; int width; };
    const Want wants[] = {
        {&h_, c.hidden},
        {&x_, c.hidden},
        {&q_, std::max(c.q_lora + c.row_width(), c.layers * c.row_width())},
        {&query_, c.heads * std::max(c.head_width(), c.v_dim)},
        {&latent_, c.heads * round16(c.row_width())},
        {&mixed_, c.heads * c.kv_lora},
        {&wide_, c.inter},
        {&turn_, c.rope},
    };
    size_t total = 16;
    for (const Want& w : wants) w.buffer->stride = round16(w.width), total += size_t(rows) * size_t(w.buffer->stride);
    memory_ = std::vector<float>();  // freed first, so that growing never holds two
    memory_.resize(total);
    float* at = memory_.data();
    at += (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64 / 4;
    for (const Want& w : wants) w.buffer->data = at, at += ptrdiff_t(rows) * w.buffer->stride;
    own_ = {q_.data + c.q_lora, q_.stride};
}

// For the slots of the pass, as stored or rounded. kAdd adds to c.
void Drafter::product(const DraftLayer& layer, DraftMatrix slot, const Buffer& a, const Buffer& c, Finish finish) {
    if (config.exact) {
        GemmJob job;
        job.w = &layer.matrix(slot), job.a = a.data, job.lda = a.stride, job.m = rows_;
        job.finish = finish, job.c = c.data, job.ldc = c.stride;
        if (finish == Finish::kAdd) job.d = c.data, job.ldd = c.stride;
        share(double(rows_) * job.w->n * job.w->k / kFloatMacs);
        return gemm.run(job);
    }
    multiply(layer.rounded(slot), a.data, a.stride, rows_, c, finish);
}

void Drafter::multiply(const ByteMatrix& w, const float* a, ptrdiff_t lda, int rows, const Buffer& c, Finish finish) {
    bytes_.round(a, lda, nullptr, rows, w.k);
    const ByteJob job{&w, &bytes_, rows, c.data, c.stride, finish, {}};
    share(double(rows) * w.panels * kBytePanel * w.k / kByteMacs);
    const int tasks = pool.threads() == 1 ? 1 : min_int(w.panels, 2 * pool.threads());
    pool.run(tasks, [&](int task, int) { multiply_panels(job, w.panels * task / tasks, w.panels * (task + 1) / tasks); });
}

// One product a head, from a and c that many floats apart.
void Drafter::heads(const DraftLayer& layer, DraftMatrix slot, const float* a, ptrdiff_t a_step, ptrdiff_t lda, float* c,
                    ptrdiff_t c_step, ptrdiff_t ldc) {
    jobs_.assign(size_t(config.heads), GemmJob{});
    for (int h = 0; h < config.heads; ++h) {
        GemmJob& job = jobs_[size_t(h)];
        job.w = &layer.matrix(slot, h), job.m = rows_;
        job.a = a + h * a_step, job.lda = lda, job.c = c + h * c_step, job.ldc = ldc;
    }
    gemm.run(jobs_.data(), config.heads);
}

// Cosines, then sines, of a row's position.
void Drafter::turns(int row, int64_t position) {
    const float* frequency = globals.vector(DraftVector::kFrequency);
    float* to = turn_.row(row);
    const int half = config.rope / 2;
    for (int i = 0; i < half; ++i) {
        const float angle = float(position) * frequency[i];
        to[i] = std::cos(angle) * config.amplitude, to[half + i] = std::sin(angle) * config.amplitude;
    }
}

// A pair is two neighbours.
void Drafter::rotate(float* x, int row) const {
    const int half = config.rope / 2;
    const float *cosine = turn_.row(row), *sine = cosine + half;
    for (int i = 0; i < half; ++i) {
        const float even = x[2 * i], odd = x[2 * i + 1];
        x[2 * i] = even * cosine[i] - odd * sine[i], x[2 * i + 1] = odd * cosine[i] + even * sine[i];
    }
}

// x_ = what the target's taps of some tokens say, before its norm.
void Drafter::features(const float* taps, int rows) {
    const ptrdiff_t tapped = ptrdiff_t(config.taps) * config.hidden;
    if (!config.exact) return multiply(globals.rounded(DraftMatrix::kContext), taps, tapped, rows, x_);
    GemmJob job;
    job.w = &globals.matrix(DraftMatrix::kContext), job.a = taps, job.lda = tapped, job.m = rows;
    job.c = x_.data, job.ldc = x_.stride;
    share(double(rows) * job.w->n * job.w->k / kFloatMacs);
    gemm.run(job);
}

// Rows of all segments together: a row needs no other, and few at a time would stream the weights anew for each few.
void Drafter::write(const DraftRows& work) {
    const DraftConfig& c = config;
    const int width = c.row_width();
    places_.clear();
    const int32_t* blocks = work.blocks;
    for (int s = 0; s < work.num_segments; blocks += work.num_blocks[s], ++s)
        for (int t = 0; t < work.tokens[s]; ++t) places_.push_back({blocks, work.start[s] + t});
    const int total = int(places_.size());
    for (int first = 0, n; first < total; first += n) {
        n = min_int(kMaxRows, total - first);
        const Place* place = places_.data() + first;
        reserve(n);
        features(work.taps + ptrdiff_t(first) * c.taps * c.hidden, n);
        for (int i = 0; i < n; ++i) {
            rms_norm(x_.row(i), globals.vector(DraftVector::kContextNorm), c.hidden, c.eps, x_.row(i));
            turns(i, place[i].position);
        }
        if (c.exact) {
            jobs_.assign(size_t(c.layers), GemmJob{});
            for (int l = 0; l < c.layers; ++l) {
                GemmJob& job = jobs_[size_t(l)];
                job.w = &layers[size_t(l)].matrix(DraftMatrix::kRows);
                job.a = x_.data, job.lda = x_.stride, job.m = n, job.c = q_.data + l * width, job.ldc = q_.stride;
            }
            gemm.run(jobs_.data(), c.layers);
        } else {
            multiply(globals.rounded(DraftMatrix::kRows), x_.data, x_.stride, n, q_);
        }
        for (int i = 0; i < n; ++i)
            for (int l = 0; l < c.layers; ++l) {
                const float* from = q_.row(i) + l * width;
                float* to = work.pool.row(c, place[i].blocks, l, place[i].position);
                rms_norm(from, layers[size_t(l)].vector(DraftVector::kRowNorm), c.kv_lora, c.eps, to);
                std::memcpy(to + c.kv_lora, from + c.kv_lora, size_t(c.rope) * 4);
                rotate(to + c.kv_lora, i);
            }
    }
}

// The requests, longest first, so that those that still draft are always the first ones.
void Drafter::list(const DraftPass& work) {
    requests_.clear();
    const int32_t* blocks = work.blocks;
    float* law = work.laws;
    int at = 0;
    for (int i = 0; i < work.num_requests; blocks += work.num_blocks[i], at += work.length[i], ++i) {
        const float temperature = work.temperature[i];
        requests_.push_back({i, 0, work.length[i], at, work.position[i], work.first[i], blocks, temperature,
                             temperature > 0 ? law : nullptr, work.anchor[i], 0, work.guess != nullptr});
        if (temperature > 0) law += int64_t(work.length[i]) * config.vocab;
    }
    std::stable_sort(requests_.begin(), requests_.end(),
                     [](const Request& x, const Request& y) { return x.length > y.length; });
    rows_ = 0;
    for (Request& r : requests_) r.row0 = rows_, rows_ += r.length;
}

void Drafter::embed() {
    const DraftConfig& c = config;
    for (const Request& r : requests_)
        for (int slot = 0; slot < r.length; ++slot) {
            float* to = h_.row(r.row0 + slot);
            const int64_t at = int64_t(slot ? c.mask_id : r.token) * c.hidden;
            for (int i = 0; i < c.hidden; ++i)
                to[i] = c.embedding_scale * (embedding_kind == Kind::kF32
                                                 ? static_cast<const float*>(embedding)[at + i]
                                                 : bf16_to_float(static_cast<const uint16_t*>(embedding)[at + i]));
            turns(r.row0 + slot, r.position + slot);
        }
}

// Some queries (slot by slot, head by head) of one request over its context and over its slots, both ways.
void Drafter::attend_some(int layer, const DraftPool& rows, const Request& request, int query, int queries,
                          std::vector<float>& scratch) {
    const DraftConfig& c = config;
    const int width = c.row_width(), wide = round16(width), out_wide = round16(c.kv_lora);
    scratch.resize(size_t(queries) * (out_wide + kTile + 3) + size_t(kTile) * width);
    float *out = scratch.data(), *scores = out + queries * out_wide, *maximum = scores + queries * kTile;
    float* gathered = maximum + 3 * queries;
    Softmax softmax{scores, maximum, maximum + queries, maximum + 2 * queries, queries};
    for (int r = 0; r < queries; ++r) softmax.maximum[r] = -kInfinity, softmax.sum[r] = 0;
    std::memset(out, 0, size_t(queries) * out_wide * 4);
    const float* q = latent_.row(request.row0) + query * wide;  // latent_ has no gaps
    const auto pass = [&](const float* tile, ptrdiff_t stride, int count) {
        tile_scores(q, wide, queries, tile, stride, width, count, scores);
        softmax.update(c.score_scale, [&](int) { return count; });
        tile_mix(out, out_wide, softmax, tile, stride, count, c.kv_lora);
    };
    for (int64_t at = request.first; at < request.position;) {
        const int64_t end = std::min(request.position, (at / kTile + 1) * kTile);
        const int count = int(end - at);
        const float* tile = rows.row(c, request.blocks, layer, at);
        if (at % rows.block_tokens + count > rows.block_tokens) {  // the tile spans blocks: bring it together
            for (int j = 0; j < count; ++j)
                std::memcpy(gathered + j * width, rows.row(c, request.blocks, layer, at + j), size_t(width) * 4);
            tile = gathered;
        }
        pass(tile, width, count);
        at = end;
    }
    for (int slot = 0; slot < request.length; slot += kTile)
        pass(own_.row(request.row0 + slot), own_.stride, min_int(kTile, request.length - slot));
    for (int r = 0; r < queries; ++r) {
        float* to = mixed_.row(request.row0 + (query + r) / c.heads) + (query + r) % c.heads * c.kv_lora;
        const F16 inverse = set16(1.0f / softmax.sum[r]);
        each16(c.kv_lora, [&](int i, int lanes, int) {
            store16_n(to + i, mul(load16_n(out + r * out_wide + i, lanes), inverse), lanes);
        });
    }
}

// h += attention of its normed rows.
void Drafter::attend(const DraftLayer& layer, int index, const DraftPool& rows) {
    const DraftConfig& c = config;
    const int width = c.row_width(), wide = round16(width), head = c.head_width();
    for (int i = 0; i < rows_; ++i) rms_norm(h_.row(i), layer.vector(DraftVector::kInNorm), c.hidden, c.eps, x_.row(i));
    product(layer, DraftMatrix::kQa, x_, q_);
    if (c.exact) product(layer, DraftMatrix::kRows, x_, own_);
    for (int i = 0; i < rows_; ++i) {
        rms_norm(q_.row(i), layer.vector(DraftVector::kQaNorm), c.q_lora, c.eps, q_.row(i));
        rms_norm(own_.row(i), layer.vector(DraftVector::kRowNorm), c.kv_lora, c.eps, own_.row(i));
        rotate(own_.row(i) + c.kv_lora, i);
    }
    product(layer, DraftMatrix::kQb, q_, c.exact ? query_ : latent_);
    if (c.exact) {
        heads(layer, DraftMatrix::kKeyUp, query_.data, head, query_.stride, latent_.data, wide, latent_.stride);
        for (int i = 0; i < rows_ * c.heads; ++i) {
            float* to = latent_.row(i / c.heads) + i % c.heads * wide + c.kv_lora;
            std::memcpy(to, query_.row(i / c.heads) + i % c.heads * head + c.nope, size_t(c.rope) * 4);
            for (int j = width; j < wide; ++j) to[j - c.kv_lora] = 0;
        }
    }
    for (int i = 0; i < rows_ * c.heads; ++i)
        rotate(latent_.row(i / c.heads) + i % c.heads * wide + c.kv_lora, i / c.heads);
    double macs = 0;
    for (const Request& r : requests_)
        macs += double(r.length) * c.heads * double(r.position - r.first + r.length) * (width + c.kv_lora);
    share(macs / kFloatMacs);
    const int count = int(requests_.size()), parts = (pool.threads() + count - 1) / count;
    pool.run(count * parts, [&](int task, int thread) {
        const Request& request = requests_[size_t(task / parts)];
        const int all = request.length * c.heads, from = all * (task % parts) / parts;
        attend_some(index, rows, request, from, all * (task % parts + 1) / parts - from, thread_scratch_[size_t(thread)]);
    });
    if (c.exact)
        heads(layer, DraftMatrix::kValueUp, mixed_.data, c.kv_lora, mixed_.stride, query_.data, c.v_dim, query_.stride);
    product(layer, DraftMatrix::kOut, c.exact ? query_ : mixed_, h_, Finish::kAdd);
}

// h += MLP of its normed rows.
void Drafter::mlp(const DraftLayer& layer) {
    const DraftConfig& c = config;
    for (int i = 0; i < rows_; ++i)
        rms_norm(h_.row(i), layer.vector(DraftVector::kPostNorm), c.hidden, c.eps, x_.row(i));
    product(layer, DraftMatrix::kMlpIn, x_, wide_, Finish::kGlu);
    product(layer, DraftMatrix::kMlpOut, wide_, h_, Finish::kAdd);
}

void Drafter::propose(const DraftPass& work) {
    list(work);
    reserve(rows_);
    embed();
    for (int l = 0; l < config.layers; ++l) {
        attend(layers[size_t(l)], l, work.pool);
        mlp(layers[size_t(l)]);
    }
    for (int i = 0; i < rows_; ++i)
        rms_norm(h_.row(i), globals.vector(DraftVector::kFinalNorm), config.hidden, config.eps, x_.row(i));
    chain(work);
}

}  // namespace mr
