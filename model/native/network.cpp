#include "network.h"

#include <sys/eventfd.h>
#include <time.h>

#include <stdexcept>
#include <string>

#include "rows.h"

namespace mr {
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
    : config(c), pool(threads), gemm(pool), layers(size_t(c.num_layers)), hands_(size_t(pool.size())) {
    hands_[0].leads = true;
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
