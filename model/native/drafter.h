// The draft network (DSpark's form) over a ragged batch of requests. model/drafter/network.py is its slow twin, and
// model/batch.py says where its rows lie. Nothing here decides an answer: the target judges every draft.
#pragma once

#include <functional>
#include <vector>

#include "attend.h"
#include "bytes.h"
#include "gemm.h"
#include "matrix.h"
#include "pool.h"

namespace mr {

// Mirrored by ffi.py, field by field. Zero means absent where a part is optional.
struct DraftConfig {
    int32_t vocab, hidden, inter, layers, heads, taps, q_lora, kv_lora, nope, rope, v_dim, markov_rank, confidence,
        confidence_markov, mask_id, exact;
    float eps, embedding_scale, score_scale, amplitude;
    int64_t mla_width;  // floats that a token of the target has in a block, in front of the drafter's

    int row_width() const { return kv_lora + rope; }
    int head_width() const { return nope + rope; }
    int64_t token_floats() const { return mla_width + int64_t(layers) * row_width(); }
};

// Rounded, a draft takes fewer and other products: kQa also gives the slots' own rows, kQb gives every head's query
// over rows (kKeyUp is in it) and kOut takes what every head read of them (kValueUp is in it).
enum class DraftMatrix : int {  // mirrored by ffi.py
    kContext,    // hidden from all taps
    kHead,       // the target's lm_head
    kMarkovOut,  // vocabulary from the Markov rank
    kQa, kQb,
    kRows,       // latent and shared key; rounded, for the rows that are written, of all layers in one
    kKeyUp,      // per head: latent from q_nope
    kValueUp,    // per head: v from latent
    kOut,
    kMlpIn,      // gate, up
    kMlpOut,
    kCount,
};

enum class DraftVector : int {  // mirrored by ffi.py
    kContextNorm, kFinalNorm, kMarkovIn, kConfidence, kConfidenceBias, kFrequency, kInNorm, kPostNorm, kQaNorm,
    kRowNorm, kCount,
};

struct DraftLayer {
    std::vector<Matrix> matrices[int(DraftMatrix::kCount)];
    ByteMatrix bytes[int(DraftMatrix::kCount)];  // unless the config says `exact`
    std::vector<float> vectors[int(DraftVector::kCount)];

    const Matrix& matrix(DraftMatrix s, int i = 0) const { return matrices[int(s)][size_t(i)]; }
    const ByteMatrix& rounded(DraftMatrix s) const { return bytes[int(s)]; }
    const float* vector(DraftVector s) const { return vectors[int(s)].data(); }
};

// The row pool: a block holds the target's rows of all its tokens, then the drafter's, layer by layer.
struct DraftPool {
    float* rows;
    int64_t num_blocks, block_floats;
    int32_t block_tokens;

    float* row(const DraftConfig& c, const int32_t* blocks, int layer, int64_t position) const {
        return rows + blocks[position / block_tokens] * block_floats + block_tokens * c.mla_width +
               (int64_t(layer) * block_tokens + position % block_tokens) * c.row_width();
    }
};

// Both are mirrored by ffi.py. Arrays hold one entry a segment or request, `blocks` all their tables in a row.
struct DraftRows {
    int32_t num_segments;
    const int32_t* tokens;
    const int64_t* start;
    const int32_t *blocks, *num_blocks;
    DraftPool pool;
    const float* taps;  // [token][tap][hidden]
};

struct DraftPass {
    int32_t num_requests;
    const int32_t* anchor;
    const int64_t *position, *first;
    const int32_t* length;
    const float* temperature;
    const double* uniforms;  // [sum of lengths]
    const int32_t* guess;    // [sum of lengths], -1: none; or null: of nobody
    const float* more;       // [sum of lengths]: log odds that the guess is given, while the draft says the same
    const int32_t *blocks, *num_blocks;
    DraftPool pool;
    int32_t* tokens;    // [sum of lengths]
    float* confidence;  // [sum of lengths]
    float* laws;        // [sum of lengths where the temperature is above 0][vocab]
    int32_t* good;      // per request: slots, from the first on, whose output is finite
};

// How long a piece of work takes one thread, roughly, from which on another is called for a half of it.
constexpr double kWorthMeeting = 3.0;              // microseconds
constexpr double kByteMacs = 150e3, kFloatMacs = 45e3;  // multiply-adds in one

struct DraftTop {  // of some logits: the largest, and whether all are finite
    float value;
    bool finite;
};

class Drafter {
public:
    Drafter(const DraftConfig& config, int threads);

    void check();  // throws std::runtime_error naming a missing or misshapen weight
    void write(const DraftRows& work);
    void propose(const DraftPass& work);

    const DraftConfig config;
    Arena arena;
    Pool pool;
    Gemm gemm;
    std::vector<DraftLayer> layers;
    DraftLayer globals;
    const void* embedding = nullptr;
    Kind embedding_kind = Kind::kF32;

private:
    struct Buffer {
        float* data = nullptr;
        ptrdiff_t stride = 0;
        float* row(int64_t r) const { return data + r * stride; }
    };
    struct Place {
        const int32_t* blocks;
        int64_t position;
    };
    struct Request {  // one of a pass, longest first
        int index, row0, length, at;  // at: in the caller's arrays; row0: of the slots
        int64_t position, first;
        const int32_t* blocks;
        float temperature;
        float* law;
        int32_t token;  // the last one chosen
        int32_t good;
        bool guessed;  // all chosen are the guess's
    };

    void reserve(int rows);
    void check_rounded() const;
    void list(const DraftPass& work);
    void embed();
    void turns(int row, int64_t position);
    void rotate(float* x, int row) const;
    void share(double microseconds) { pool.alone(microseconds < kWorthMeeting); }
    void product(const DraftLayer& layer, DraftMatrix slot, const Buffer& a, const Buffer& c,
                 Finish finish = Finish::kStore);
    void multiply(const ByteMatrix& w, const float* a, ptrdiff_t lda, int rows, const Buffer& c,
                  Finish finish = Finish::kStore);
    void features(const float* taps, int rows);
    void heads(const DraftLayer& layer, DraftMatrix slot, const float* a, ptrdiff_t a_step, ptrdiff_t lda, float* c,
               ptrdiff_t c_step, ptrdiff_t ldc);
    void attend(const DraftLayer& layer, int index, const DraftPool& rows);
    void attend_some(int layer, const DraftPool& rows, const Request& request, int query, int queries,
                     std::vector<float>& scratch);
    void mlp(const DraftLayer& layer);
    void chain(const DraftPass& work);
    void vocabulary(DraftMatrix slot, const float* a, ptrdiff_t lda, const std::vector<int32_t>& rows, float* logits,
                    bool add, DraftTop* tops);
    float confide(const Request& request, int slot) const;
    void choose(const DraftPass& work, Request& request, int slot, float* logits, DraftTop* tops, float* sums);

    std::vector<Place> places_;  // of the rows that are written
    std::vector<Request> requests_;
    int rows_ = 0;  // slots of the pass in work
    Buffer h_, x_, q_, own_, query_, latent_, mixed_, wide_, turn_;  // own_: the slots' rows, behind q_'s queries
    std::vector<float> memory_;
    std::vector<std::vector<float>> thread_scratch_;
    std::vector<GemmJob> jobs_;
    std::vector<int32_t> order_, before_;
    std::vector<float> logits_, sums_;
    std::vector<DraftTop> tops_;
    ByteRows bytes_;
    int reserved_rows_ = 0;
};

}  // namespace mr
