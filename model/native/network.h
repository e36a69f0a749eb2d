// The whole text network over a ragged batch: what is loaded once (Model), what one pass works on (Batch, Scratch),
// and the parts that pass through them. model/batch.py describes the pools.
#pragma once

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
    int row0 = 0, rows = 0;  // `ids` and `taps` are indexed by row, `logits` from row0 on
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
constexpr int kMaxSources = 64;  // AttnRes vectors one mix may weigh
constexpr int kMixRows = 8;      // rows mixed at once

struct Buffer {
    float* data = nullptr;
    ptrdiff_t stride = 0;
    float* row(int64_t r) const { return data + r * stride; }
};

// Where a model's weights stay in the caches, every thread may read them all, and rows are shared out between threads
// instead of weights. At most this many bytes of weights, and rows that a thread works on together.
constexpr double kCached = 24 << 20;
constexpr int kMostRowsTogether = 64;
constexpr double kUneven = 1.2;  // by how much one thread's share may exceed the average where sequences are shared out

struct Scratch {
    std::vector<Buffer> residual;  // AttnRes blocks, then the running prefix sum
    Buffer x, in, decay, gate, mixed, q, q_latent, o_latent, ffn, joined, act, expert, wide;
    std::vector<int32_t> chosen, place, order;  // routing, top_k for each row: see moe.cpp
    std::vector<float> weight;
};

// What a thread has for itself.
struct Hand {
    bool leads = false;  // the thread that calls `forward`; operations are timed there
    Gemm alone;          // products on this thread
    std::vector<GemmJob> jobs;
    std::vector<int32_t> first, cursor;  // routing
    std::vector<float> scratch;
};

// Successive rows of a pass, and who works on them: one thread alone, or with a pool all together.
struct Part {
    int row0, rows;
    Hand& hand;
    Gemm& gemm;
    Pool* pool;

    GemmJob job(const Matrix& w, const Buffer& a, const Buffer& c) const {
        GemmJob job;
        job.w = &w, job.a = a.row(row0), job.lda = a.stride, job.m = rows, job.c = c.row(row0), job.ldc = c.stride;
        return job;
    }
    template <class F>
    void each_run(int longest, const F& f) const {  // f(row, rows) for successive runs of rows
        const int threads = pool ? pool->threads() : 1, share = (rows + threads - 1) / threads;
        const int most = share < 2 ? 2 : share < longest ? share : longest;
        const auto task = [&](int t, int) { f(row0 + t * most, min_int(rows - t * most, most)); };
        const int tasks = (rows + most - 1) / most;
        if (pool) return pool->run(tasks, task);
        for (int t = 0; t < tasks; ++t) task(t, 0);
    }
    template <class F>
    void each_row(const F& f) const {
        each_run(16, [&](int row, int n) {
            for (int i = 0; i < n; ++i) f(row + i);
        });
    }
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

// Who runs a batch through the layers: `hand` alone, or with a pool all threads.
struct Crew {
    Hand& hand;
    Gemm& gemm;
    Pool* pool = nullptr;
    Hand* hands = nullptr;  // of the pool's threads
    int groups = 1;  // of rows, each worked on by one thread between two attentions; 1: all rows together
    int threads() const { return pool ? pool->threads() : 1; }

    template <class F>
    void run(int tasks, const F& f) const {  // f(task, hand)
        if (pool) return pool->run(tasks, [&](int task, int thread) { f(task, hands[thread]); });
        for (int i = 0; i < tasks; ++i) f(i, hand);
    }
};

class Model {
public:
    Model(const Config& config, const uint8_t* layer_kinds, int threads);

    void forward(const Batch& batch);  // at most kMaxRows rows
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
    double cached_bytes = kCached;
    double share_macs = kWorthSharing;  // of a tile; below it stays on one thread
    std::vector<int32_t> taps;  // layers, ascending
    Clock profiling = Clock::kOff;
    double seconds[int(Op::kCount)] = {};

private:
    void reserve(int rows);
    int num_blocks() const { return config.res_block ? (config.num_layers + config.res_block - 1) / config.res_block : 0; }
    // AttnRes blocks that exist when a layer begins; residual[of the next] is the prefix sum after its boundary.
    int blocks_before(int layer) const { return config.res_block ? (layer + config.res_block - 1) / config.res_block : 0; }
    int blocks_in(int layer) const { return config.res_block ? layer / config.res_block + 1 : 0; }

    template <class F>
    void stage(const Batch& batch, const Crew& crew, const F& f);
    std::vector<Batch> apart(const Batch& batch, int threads) const;
    void layers_of(Batch batch, const Crew& crew);
    Batch narrow(const Batch& batch, int blocks, const Buffer& attention);
    void before_attention(int i, const Batch& batch, const Part& part);
    void attention(const Layer& layer, const Batch& batch, const Crew& crew);
    void after_attention(int i, const Batch& batch, const Part& part);
    void embed(const Batch& batch, const Part& part);
    void mix_norm_rows(int row0, int rows, int blocks, const float* mix, const float* norm);  // at most kMixRows
    void mix_norm(const Part& part, int blocks, const float* mix, const float* norm);
    void kda_gates(const Layer& layer, const Part& part);
    void kda(const Layer& layer, const Batch& batch, const Crew& crew);
    void mla_store(const Layer& layer, const Batch& batch, const Part& part);
    void mla_queries(const Layer& layer, const Part& part);
    void mla_attend(const Layer& layer, const Batch& batch, const Crew& crew);
    void mla_attend_work(const Layer& layer, const Batch& batch, const MlaWork& work, std::vector<float>& scratch);
    void mla_values(const Layer& layer, const Part& part);
    void dense(const Layer& layer, const Part& part, const Buffer& h);
    void moe(const Layer& layer, const Part& part, const Buffer& h);
    void route(const Layer& layer, const Part& part);
    void logits(const Batch& batch, const Part& part);

    template <class F>
    void timed(const Hand& hand, Op op, const F& f) {
        if (profiling == Clock::kOff || !hand.leads) return f();
        const double begin = now(profiling);
        f();
        seconds[int(op)] += now(profiling) - begin;
    }

    Activation act_;
    Scratch s_;
    std::vector<float> memory_;
    std::vector<Hand> hands_;  // one a thread
    int reserved_rows_ = 0;
    double row_macs_ = 0;  // of one row through all layers
};

// One head's state, [keys][values]: read at `from` before the first token, and from then on kept at `to`, which may be
// the same; with `keep_last` off, what the last token leaves is not written.
struct KdaState {
    const float* from;
    float* to;
    bool keep_last;
};

// KDA's recurrence for one head over `tokens` tokens. q (scaled), k and alpha = exp(g) are [tokens][keys]; v and out
// [tokens][stride], stride a multiple of 16, columns past `values` undefined. `work` holds tokens*keys + keys*kLanes
// floats. `correction`, where given, is [tokens][stride] like out: what each token adds to the state along k.
void kda_recurrence(const KdaState& state, int keys, int values, int tokens, const float* q, const float* k,
                    const float* alpha, const float* beta, const float* v, float* out, ptrdiff_t stride, float* work,
                    float* correction = nullptr);

}  // namespace mr
