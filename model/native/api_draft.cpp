// The drafter's share of the C interface: every index is checked against the pool before memory is touched.
#include <cmath>
#include <string>

#include "api.h"
#include "drafter.h"

using namespace mr;

namespace {

std::string pool_fault(const Drafter& d, const DraftPool& p) {
    if (p.block_tokens < 1 || p.block_floats != p.block_tokens * d.config.token_floats())
        return "rows: " + std::to_string(p.block_floats) + " floats a block do not fit this drafter";
    return "";
}

// Blocks [begin, end) of a table, each in the pool.
std::string table_fault(const DraftPool& p, const int32_t* blocks, int64_t num_blocks, int64_t begin, int64_t end) {
    if (end > num_blocks) return std::to_string(end) + " blocks are needed, " + std::to_string(num_blocks) + " are there";
    for (int64_t i = begin; i < end; ++i)
        if (blocks[i] < 0 || blocks[i] >= p.num_blocks)
            return "block " + std::to_string(blocks[i]) + " is outside the pool of " + std::to_string(p.num_blocks);
    return "";
}

std::string rows_fault(const Drafter& d, const DraftRows& w) {
    std::string wrong = pool_fault(d, w.pool);
    const int32_t* blocks = w.blocks;
    for (int s = 0; s < w.num_segments && wrong.empty(); blocks += w.num_blocks[s], ++s) {
        if (w.tokens[s] < 1 || w.start[s] < 0) return "segment " + std::to_string(s) + ": no tokens, or none before it";
        const int64_t end = w.start[s] + w.tokens[s] - 1;
        wrong = table_fault(w.pool, blocks, w.num_blocks[s], w.start[s] / w.pool.block_tokens, end / w.pool.block_tokens + 1);
    }
    return wrong;
}

std::string pass_fault(const Drafter& d, const DraftPass& w, int32_t block_len) {
    std::string wrong = pool_fault(d, w.pool);
    const int32_t* blocks = w.blocks;
    int slot = 0;
    for (int i = 0; i < w.num_requests && wrong.empty(); blocks += w.num_blocks[i], ++i) {
        const std::string at = "request " + std::to_string(i) + ": ";
        if (w.anchor[i] < 0 || w.anchor[i] >= d.config.vocab) return at + "the anchor is outside the vocabulary";
        if (w.length[i] < 1 || w.length[i] > block_len) return at + "expected a draft of 1 to " + std::to_string(block_len);
        if (w.first[i] < 0 || w.first[i] > w.position[i]) return at + "its rows begin behind its position";
        if (!std::isfinite(w.temperature[i]) || w.temperature[i] < 0) return at + "temperature";
        for (int s = 0; w.guess && s < w.length[i]; ++s, ++slot)
            if (w.guess[slot] >= d.config.vocab || !std::isfinite(w.more[slot])) return at + "guess " + std::to_string(s);
        const int64_t size = w.pool.block_tokens;
        wrong = table_fault(w.pool, blocks, w.num_blocks[i], w.first[i] / size, (w.position[i] + size - 1) / size);
    }
    return wrong;
}

template <class Fault, class Work>
int checked(const Fault& fault, const Work& work) {
    std::string wrong;
    if (guarded([&] { wrong = fault(); })) return 1;
    if (!wrong.empty()) return last_error() = wrong, 2;
    return guarded(work);
}

DraftLayer& layer_of(Drafter* d, int32_t layer) { return layer < 0 ? d->globals : d->layers.at(size_t(layer)); }

}  // namespace

MR_API Drafter* mr_draft_create(const DraftConfig* config, int32_t threads) {
    Drafter* drafter = nullptr;
    guarded([&] { drafter = new Drafter(*config, threads); });
    return drafter;
}

MR_API void mr_draft_destroy(Drafter* drafter) { delete drafter; }

// Layer -1 holds what belongs to no layer. Per-head matrices are appended in order.
MR_API int mr_draft_pack(Drafter* d, int32_t layer, int32_t slot, const Source* parts, int32_t num_parts, int32_t join) {
    return guarded([&] { layer_of(d, layer).matrices[slot].push_back(pack(d->arena, parts, num_parts, Join(join))); });
}

MR_API int mr_draft_round(Drafter* d, int32_t layer, int32_t slot, const Source* parts, int32_t num_parts, int32_t join) {
    return guarded([&] { layer_of(d, layer).bytes[slot] = pack_bytes(d->arena, parts, num_parts, Join(join)); });
}

MR_API int mr_draft_vector(Drafter* d, int32_t layer, int32_t slot, const float* data, int64_t n) {
    return guarded([&] { layer_of(d, layer).vectors[slot].assign(data, data + n); });
}

// The table is read in place, so its memory must outlive the drafter.
MR_API void mr_draft_embedding(Drafter* d, const void* table, int32_t kind) {
    d->embedding = table, d->embedding_kind = Kind(kind);
}

MR_API int mr_draft_check(Drafter* d) { return guarded([&] { d->check(); }); }

// Both: 0 done; 1 it failed midway (no memory); 2 the work is wrong and nothing was touched.
MR_API int mr_draft_write(Drafter* d, const DraftRows* work) {
    return checked([&] { return rows_fault(*d, *work); }, [&] { d->write(*work); });
}

MR_API int mr_draft_propose(Drafter* d, const DraftPass* work, int32_t block_len) {
    return checked([&] { return pass_fault(*d, *work, block_len); }, [&] {
        if (work->num_requests) d->propose(*work);
    });
}
