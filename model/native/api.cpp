// The C interface that ffi.py binds. Nothing throws across it; a forward pass checks every index against the pools
// before it touches memory.
#include "api.h"

#include <algorithm>
#include <vector>

#include "network.h"

namespace mr {

std::string& last_error() {
    thread_local std::string text;
    return text;
}

}  // namespace mr

namespace {

using namespace mr;

// What Python says of a segment or of a fold; all of it is checked before it is believed.
struct SegmentFacts {
    int64_t tokens, start, slot, logits, record, blocks;  // record -1: none
};
struct FoldFacts {
    int64_t record, slot, first, tokens, start;
};

// One pass, or one call's folds, as Python hands it over; mirrored by ffi.py.
struct Pass {
    int32_t num_segments;    // or folds
    const void* facts;
    const int32_t* numbers;  // all segments' tokens, then all their block tables
    float* rows;
    int64_t pool_blocks, block_floats;
    float* state;
    int64_t pool_slots, slot_floats;
    int32_t block_tokens;
    float* out;
    Progress* progress;  // or null
    float* records;
    int64_t num_records, record_floats;
    int32_t record_tokens;
    float* taps;  // or null

    const SegmentFacts* segments() const { return static_cast<const SegmentFacts*>(facts); }
    const FoldFacts* folds() const { return static_cast<const FoldFacts*>(facts); }
    const int32_t* tables() const {
        const int32_t* at = numbers;
        for (int s = 0; s < num_segments; ++s) at += segments()[s].tokens;
        return at;
    }
};

std::string at(int segment) { return "segment " + std::to_string(segment) + ": "; }

// What is wrong with one segment by itself, or an empty string.
std::string segment_fault(const Model& m, const Pass& p, const SegmentFacts& s, const int32_t* ids, const int32_t* blocks) {
    const int vocab = m.config.vocab;
    if (s.tokens < 1) return "no tokens";
    for (int64_t i = 0; i < s.tokens; ++i)
        if (ids[i] < 0 || ids[i] >= vocab)
            return "token id " + std::to_string(ids[i]) + " is outside the vocabulary of " + std::to_string(vocab);
    if (s.slot < 0 || s.slot >= p.pool_slots)
        return "slot " + std::to_string(s.slot) + " is outside the pool of " + std::to_string(p.pool_slots);
    if (s.start < 0) return "start " + std::to_string(s.start) + " is negative";
    if (s.logits < 0 || s.logits > kAllLogits) return "unknown logits mode";
    const int64_t end = s.start + s.tokens;
    if (end > s.blocks * p.block_tokens)
        return std::to_string(end) + " tokens do not fit into " + std::to_string(s.blocks) + " blocks";
    if (s.record < -1 || s.record >= p.num_records)
        return "record " + std::to_string(s.record) + " is outside the " + std::to_string(p.num_records);
    if (s.record >= 0 && s.tokens > p.record_tokens)
        return std::to_string(s.tokens) + " tokens do not fit into a record of " + std::to_string(p.record_tokens);
    for (int64_t i = 0; i <= (end - 1) / p.block_tokens; ++i)
        if (blocks[i] < 0 || blocks[i] >= p.pool_blocks)
            return "block " + std::to_string(blocks[i]) + " is outside the pool of " + std::to_string(p.pool_blocks);
    return "";
}

// What is wrong with a pass, or an empty string: every index in range, a slot in one segment only, and a block that is
// written held by no other segment and at no other place.
std::string fault(Model& m, const Pass& p) {
    m.claims.begin(p.pool_slots, p.pool_blocks);
    if (p.num_records && (p.record_tokens < 1 || p.record_tokens > kMaxRows || p.record_floats != m.record_floats(p.record_tokens)))
        return "records: expected " + std::to_string(m.record_floats(p.record_tokens)) + " floats for " +
               std::to_string(p.record_tokens) + " tokens, found " + std::to_string(p.record_floats);
    std::vector<bool> recorded((size_t)p.num_records);
    const int32_t *ids = p.numbers, *blocks = p.tables();
    const SegmentFacts *begin = p.segments(), *end = begin + p.num_segments;
    for (const SegmentFacts* s = begin; s < end; ids += s->tokens, blocks += s->blocks, ++s) {
        const int i = int(s - begin);
        const std::string wrong = segment_fault(m, p, *s, ids, blocks);
        if (!wrong.empty()) return at(i) + wrong;
        if (s->record >= 0) {
            if (recorded[size_t(s->record)]) return at(i) + "record " + std::to_string(s->record) + " is in another segment too";
            recorded[size_t(s->record)] = true;
        }
        if (!m.claims.slot(int32_t(s->slot))) return at(i) + "slot " + std::to_string(s->slot) + " is in another segment too";
        for (int64_t b = s->start / p.block_tokens; b <= (s->start + s->tokens - 1) / p.block_tokens; ++b)
            if (!m.claims.write(blocks[b], i, b)) return at(i) + "block " + std::to_string(blocks[b]) + " is written twice";
    }
    blocks = p.tables();
    for (const SegmentFacts* s = begin; s < end; blocks += s->blocks, ++s)
        for (int64_t b = 0; b <= (s->start + s->tokens - 1) / p.block_tokens; ++b)
            if (!m.claims.read(blocks[b], int(s - begin), b))
                return at(int(s - begin)) + "block " + std::to_string(blocks[b]) + " is written elsewhere in the same pass";
    return "";
}

// Runs the pass in tiles of at most kMaxRows tokens, cutting segments where a tile is full; a verified one stays
// whole, since its second part would not find what the first one did to the slot.
void run(Model& m, const Pass& p) {
    Batch b;
    b.pool_rows = p.rows, b.block_floats = p.block_floats, b.block_tokens = p.block_tokens;
    b.pool_state = p.state, b.slot_floats = p.slot_floats;
    int64_t left = 0;
    const SegmentFacts *begin = p.segments(), *end = begin + p.num_segments;
    for (const SegmentFacts* s = begin; s < end; ++s) left += s->tokens;
    b.ids = p.numbers, b.logits = p.out, b.taps = p.taps;
    b.records = {p.records, p.record_floats, p.record_tokens};
    const auto flush = [&] {
        if (!b.rows) return;
        left -= b.rows;
        b.progress = left ? nullptr : p.progress;
        m.forward(b);
        for (const Segment& s : b.segments) b.logits += int64_t(s.num_logits()) * m.config.vocab;
        if (b.taps) b.taps += int64_t(b.rows) * int64_t(m.taps.size()) * m.config.hidden;
        b.ids += b.rows, b.rows = 0;
        b.segments.clear();
    };
    const int32_t* blocks = p.tables();
    for (const SegmentFacts* s = begin; s < end; blocks += s->blocks, ++s)
        for (int done = 0; done < s->tokens;) {
            if (s->record >= 0 && s->tokens > kMaxRows - b.rows) flush();
            const int n = int(std::min<int64_t>(s->tokens - done, kMaxRows - b.rows));
            const bool ends = done + n == s->tokens;
            const auto logits = int32_t(s->logits == kLastLogits && !ends ? int64_t(kNoLogits) : s->logits);
            b.segments.push_back({b.rows, n, s->start + done, int32_t(s->slot), logits, int32_t(s->record), blocks});
            b.rows += n, done += n;
            if (b.rows == kMaxRows) flush();
        }
    flush();
}

}  // namespace

MR_API const char* mr_error() { return last_error().c_str(); }
MR_API const char* mr_isa() { return kIsa; }

MR_API Model* mr_create(const Config* config, const uint8_t* layer_kinds, int32_t threads) {
    Model* model = nullptr;
    guarded([&] { model = new Model(*config, layer_kinds, threads); });
    return model;
}

MR_API void mr_destroy(Model* model) { delete model; }

// Layer -1 holds what belongs to no layer. Per-head and per-expert matrices are appended in order.
MR_API int mr_pack(Model* m, int32_t layer, int32_t slot, const Source* parts, int32_t num_parts, int32_t join) {
    return guarded([&] {
        Layer& l = layer < 0 ? m->globals : m->layers.at(size_t(layer));
        const bool routed = slot == int(MatrixSlot::kExpertIn) || slot == int(MatrixSlot::kExpertOut);
        l.matrices[slot].push_back(pack(m->arena, parts, num_parts, Join(join), routed && m->widens_experts()));
    });
}

MR_API int mr_vector(Model* m, int32_t layer, int32_t slot, const float* data, int64_t n) {
    return guarded([&] { (layer < 0 ? m->globals : m->layers.at(size_t(layer))).vectors[slot].assign(data, data + n); });
}

// The table is read in place, so its memory must outlive the model.
MR_API void mr_embedding(Model* m, const void* table, int32_t kind) { m->embedding = table, m->embedding_kind = Kind(kind); }

MR_API int mr_check(Model* m) { return guarded([&] { m->check(); }); }

// 0: done; 1: it failed midway (no memory); 2: the pass is wrong and nothing was touched.
MR_API int mr_forward(Model* m, const Pass* pass) {
    std::string wrong;
    if (guarded([&] { wrong = fault(*m, *pass); })) return 1;
    if (!wrong.empty()) return last_error() = wrong, 2;
    return guarded([&] { run(*m, *pass); });
}

// The layers after which `Pass.taps` keeps the running sum; ascending.
MR_API int mr_taps(Model* m, const int32_t* layers, int32_t n) {
    return guarded([&] {
        for (int i = 0; i < n; ++i)
            if (layers[i] < 0 || layers[i] >= m->config.num_layers || (i && layers[i] <= layers[i - 1]))
                throw std::runtime_error("taps: expected ascending layers below " + std::to_string(m->config.num_layers));
        m->taps.assign(layers, layers + n);
    });
}

// Before packing: MXFP4 experts that all together take no more than this as bf16 are widened once.
MR_API void mr_widen_up_to(Model* m, double bytes) { m->widen_bytes = bytes; }

// Weights of more bytes than this are shared out between threads, rows where they are fewer.
MR_API void mr_cached_up_to(Model* m, double bytes) { m->cached_bytes = bytes; }

// Tiles of fewer multiply-adds than this stay on one thread.
MR_API void mr_rouse(Model* m) { m->pool.rouse(); }

MR_API void mr_share_from(Model* m, double macs) { m->share_macs = macs; }

MR_API int64_t mr_record_floats(const Model* m, int32_t tokens) { return m->record_floats(tokens); }

// 2: refused, nothing was touched. Every slot and record at most once.
MR_API int mr_fold(Model* m, const Pass* pass) {
    const Pass& p = *pass;
    std::string wrong;
    std::vector<Fold> folds;
    if (guarded([&] {
            std::vector<bool> slots((size_t)p.pool_slots), used((size_t)p.num_records);
            if (p.record_floats != m->record_floats(p.record_tokens)) wrong = "records: not of this model and length";
            for (int i = 0; i < p.num_segments && wrong.empty(); ++i) {
                const FoldFacts& f = p.folds()[i];
                const bool fits = f.record >= 0 && f.record < p.num_records && f.slot >= 0 && f.slot < p.pool_slots &&
                                  f.first >= 0 && f.tokens >= 0 && f.tokens <= p.record_tokens - f.first && f.start >= 0;
                if (!fits || slots[size_t(f.slot)] || used[size_t(f.record)])
                    wrong = "fold " + std::to_string(i) + ": expected a record, a slot and a count in range, each once";
                else
                    slots[size_t(f.slot)] = used[size_t(f.record)] = true;
                folds.push_back({int32_t(f.record), int32_t(f.slot), int32_t(f.first), int32_t(f.tokens), f.start});
            }
        }))
        return 1;
    if (!wrong.empty()) return last_error() = wrong, 2;
    return guarded([&] {
        m->fold(folds, Records{p.records, p.record_floats, p.record_tokens}, p.state, p.slot_floats);
    });
}

MR_API void mr_profile(Model* m, int32_t clock, double* seconds) {
    m->profiling = Clock(clock);
    for (int i = 0; i < int(Op::kCount); ++i) seconds[i] = m->seconds[i], m->seconds[i] = 0;
}

MR_API int64_t mr_weight_bytes(const Model* m) { return int64_t(m->arena.bytes()); }
