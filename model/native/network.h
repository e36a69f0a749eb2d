// The whole text network over a ragged batch: what is loaded once (Model), what one pass works on (Batch, Scratch),
// and the parts that pass through them. model/batch.py describes the pools.
#pragma once

#include <functional>
#include <vector>

#include "gemm.h"
#include "matrix.h"
#include "pool.h"

namespace mr {

// Mirrored by ffi.py, field by field. Zero means absent where a part is optional.
struct Config {
    int32_t vocab, hidden, num_layers;
    int32_t heads, q_lora, kv_lora, nope, rope, v_dim, mla_gate;
    int32_t kda_heads, key_dim, value_dim, conv_kernel, gate_rank, full_rank_gate, bounded_gate;
    int32_t dense_inter, experts, top_k, shared_inter, expert_inter, latent, renormalize;
    int32_t res_block, situ;
    float eps, lora_eps, l2_eps, gate_bound, beta, linear_beta, routed_scale;

    int row_width() const { return kv_lora + rope; }
    int q_width() const { return heads * (nope + rope); }
    int keys() const { return kda_heads * key_dim; }
    int values() const { return kda_heads * value_dim; }
    int expert_size() const { return latent ? latent : hidden; }
};

enum class MatrixSlot : int {  // mirrored by ffi.py
    kAttnIn,     // KDA: q k v, g or g_a, f_a, b; MLA: q_a or q, kv_a, g
    kDecay,      // f_b
    kGateB,      // g_b
    kAttnOut,    // o
    kQb,         // q_b
    kKeyUp,      // per MLA head: latent from q_nope
    kValueUp,    // per MLA head: v from latent
    kDenseIn,    // gate, up
    kDenseOut,   // down
    kFfnIn,      // router, latent down
    kSharedIn,   // gate, up
    kFfnOut,     // latent up beside shared down; without a latent, shared down
    kExpertIn,   // per expert: w1, w3
    kExpertOut,  // per expert: w2
    kHead,       // lm_head
    kCount,
};

enum class VectorSlot : int {  // mirrored by ffi.py
    kInNorm, kPostNorm, kAttnRes, kFfnRes, kConvQ, kConvK, kConvV, kDecayRate, kDecayBias, kOutNorm, kQaNorm, kKvNorm,
    kRouterBias, kRoutedNorm, kFinalNorm, kFinalRes, kCount,
};

struct Layer {
    bool mla = false, dense = false;
    int index = 0;  // among the layers of its kind, as the pools count them
    std::vector<Matrix> matrices[int(MatrixSlot::kCount)];
    std::vector<float> vectors[int(VectorSlot::kCount)];

    const Matrix& matrix(MatrixSlot s, int i = 0) const { return matrices[int(s)][size_t(i)]; }
    const float* vector(VectorSlot s) const { return vectors[int(s)].data(); }
};

enum LogitsMode : int32_t { kNoLogits, kLastLogits, kAllLogits };  // mirrored by ffi.py

struct Segment {
    int row0, tokens;  // rows of this pass
    int64_t start;     // tokens already consumed
    int32_t slot, logits;
    int32_t record;    // in the batch's records, or -1: advance the slot
    const int32_t* blocks;
    int num_logits() const { return logits == kAllLogits ? tokens : logits == kLastLogits; }
};

// Mirrored by model/progress.py: KDA layers whose state is final, and whom to wake.
struct Progress {
    int64_t value;
    int32_t watchers, fd;
    void layer_done();
};

// Some successive queries of a segment and some of their heads: one task's share of attention.
struct MlaWork {
    const Segment* segment;
    int token0, tokens, head0, heads;
    double cost;
};

// What a verified segment leaves behind instead of an advanced slot: per token what the delta rule would add to the
// state, and the convolutions' raw inputs. One record is [kda_layer][head][token][k | alpha | correction], then
// [kda_layer][token][q | k | v channels].
struct Records {
    float* data = nullptr;
    int64_t floats = 0;  // of one record
    int tokens = 0;      // the most that one holds

    int64_t head_floats(const Config& c) const { return int64_t(tokens) * (2 * c.key_dim + c.value_dim); }
    int64_t conv_floats(const Config& c) const { return int64_t(tokens) * (2 * c.keys() + c.values()); }
    float* head(const Config& c, int record, int layer, int head) const {
        return data + record * floats + (int64_t(layer) * c.kda_heads + head) * head_floats(c);
    }
    float* conv(const Config& c, int num_kda, int record, int layer) const {
        return data + record * floats + int64_t(num_kda) * c.kda_heads * head_floats(c) + layer * conv_floats(c);
    }
};

// A verified segment's tokens [first, first + tokens) become part of its slot.
struct Fold {
    int32_t record, slot, first, tokens;
    int64_t start;  // tokens that the slot has consumed before; at 0 it is zero whatever it holds
};

struct Batch {
    std::vector<Segment> segments;
    const int32_t* ids = nullptr;
    int rows = 0;
    float* pool_rows = nullptr;
    int64_t block_floats = 0;
    int block_tokens = 0;
    float* pool_state = nullptr;
    int64_t slot_floats = 0;
    float* logits = nullptr;
    Progress* progress = nullptr;  // set in a pass's last tile, if anybody wants it
    Records records;
    float* taps = nullptr;  // [row][tap][hidden]: the running sum after each of the model's tap layers

    float* row(const Segment& s, const Config& c, int mla_index, int64_t position) const {
        return pool_rows + s.blocks[position / block_tokens] * block_floats +
               (int64_t(mla_index) * block_tokens + position % block_tokens) * c.row_width();
    }
};

// Buffers of one pass, all [rows][stride] with strides of whole 16 floats. They grow to the largest pass seen, which
// `kMaxRows` bounds: longer batches run in tiles, which changes no bit.
constexpr int kMaxRows = 512;
constexpr int kMaxTaps = 8;  // of the short convolutions

struct Buffer {
    float* data = nullptr;
    ptrdiff_t stride = 0;
    float* row(int64_t r) const { return data + r * stride; }
};

struct Scratch {
    std::vector<Buffer> residual;  // AttnRes blocks, then the running prefix sum
    Buffer x, in, decay, gate, mixed, q, q_latent, o_latent, ffn, joined, act, expert, wide;
    std::vector<int32_t> chosen, place, order, first, cursor;  // routing: see moe.cpp
    std::vector<float> weight;
};

enum class Op : int {  // mirrored by ffi.py
    kEmbed, kMix, kAttnIn, kKdaGates, kKda, kMlaStore, kMlaQuery, kMlaAttend, kMlaValue, kAttnOut, kFfnIn, kRoute,
    kExpertIn, kExpertOut, kCombine, kFfnOut, kLogits, kCount,
};

// Which clock times the operations. The calling thread's CPU time is the honest one on a shared machine, for one
// thread.
enum class Clock : int { kOff, kWall, kCpu };  // mirrored by ffi.py

double now(Clock clock);

// Who uses which slot and writes which block in the pass at hand. Marks carry the pass's number, so that nothing is
// cleared between passes.
class Claims {
public:
    void begin(int64_t slots, int64_t blocks) {
        ++pass_;
        if (int64_t(slots_.size()) < slots) slots_.resize(size_t(slots));
        if (int64_t(blocks_.size()) < blocks) blocks_.resize(size_t(blocks));
    }
    bool slot(int32_t s) {
        const bool fresh = slots_[size_t(s)] != pass_;
        slots_[size_t(s)] = pass_;
        return fresh;
    }
    bool write(int32_t block, int segment, int64_t index) {
        Writer& w = blocks_[size_t(block)];
        const bool fresh = w.pass != pass_;
        w = {pass_, index, segment};
        return fresh;
    }
    bool read(int32_t block, int segment, int64_t index) const {
        const Writer& w = blocks_[size_t(block)];
        return w.pass != pass_ || (w.segment == segment && w.index == index);
    }

private:
    struct Writer {
        uint64_t pass = 0;
        int64_t index = 0;
        int segment = 0;
    };
    uint64_t pass_ = 0;
    std::vector<uint64_t> slots_;
    std::vector<Writer> blocks_;
};

// Experts this small as bf16 are kept so, at four times their stored size: a few rows of each then cost a quarter less,
// since no code is decoded on the way. Large models, which are experts for the most part, never come near.
constexpr double kWidenBytes = 16 << 20;

class Model {
public:
    Model(const Config& config, const uint8_t* layer_kinds, int threads);

    void forward(Batch batch);      // at most kMaxRows rows
    void fold(const std::vector<Fold>& folds, const Records& records, float* pool_state, int64_t slot_floats);
    int64_t record_floats(int tokens) const;
    bool widens_experts() const;
    void check();                      // throws std::runtime_error naming a missing or misshapen weight

    const Config config;
    Arena arena;
    Pool pool;
    Gemm gemm;
    std::vector<Layer> layers;
    int num_mla = 0, num_kda = 0;
    Layer globals;
    const void* embedding = nullptr;
    Kind embedding_kind = Kind::kF32;
    Claims claims;
    double widen_bytes = kWidenBytes;
    double share_macs = kWorthSharing;  // of a tile; below it stays on one thread
    std::vector<int32_t> taps;  // layers, ascending
    Clock profiling = Clock::kOff;
    double seconds[int(Op::kCount)] = {};

private:
    void reserve(int rows);
    void for_rows(int rows, const std::function<void(int)>& f);
    int num_blocks() const { return config.res_block ? (config.num_layers + config.res_block - 1) / config.res_block : 0; }
    void embed(const Batch& batch);
    void mix_norm_row(int row, int blocks, const float* mix, const float* norm);
    void mix_norm(int rows, int blocks, const float* mix, const float* norm);
    void kda(const Layer& layer, const Batch& batch);
    void mla_store(const Layer& layer, const Batch& batch);
    void mla(const Layer& layer, const Batch& batch);
    void mla_queries(const Layer& layer, int rows);
    void mla_attend(const Layer& layer, const Batch& batch);
    void mla_attend_work(const Layer& layer, const Batch& batch, const MlaWork& work, std::vector<float>& scratch);
    void dense(const Layer& layer, int rows, float* h);
    void moe(const Layer& layer, int rows, float* h);
    void route(const Layer& layer, int rows);
    Batch narrow(const Batch& batch, int blocks, const Buffer& attention);
    void logits(const Batch& batch, int blocks);

    template <class F>
    void timed(Op op, const F& f) {
        if (profiling == Clock::kOff) return f();
        const double begin = now(profiling);
        f();
        seconds[int(op)] += now(profiling) - begin;
    }

    Activation act_;
    Scratch s_;
    std::vector<float> memory_;
    std::vector<std::vector<float>> thread_scratch_;
    std::vector<GemmJob> jobs_;
    int reserved_rows_ = 0;
    double row_macs_ = 0;  // of one row through all layers
};

// KDA's recurrence for one head over `tokens` tokens; the state [keys][values] is updated in place. q (scaled), k and
// alpha = exp(g) are [tokens][keys]; v and out [tokens][stride], stride a multiple of 16, columns past `values`
// undefined. `work` holds tokens*keys + keys*kLanes floats. `correction`, where given, is [tokens][stride] like out:
// what each token adds to the state along k.
void kda_recurrence(float* state, int keys, int values, int tokens, const float* q, const float* k, const float* alpha,
                    const float* beta, const float* v, float* out, ptrdiff_t stride, float* work,
                    float* correction = nullptr);

}  // namespace mr
