// From the block's hidden vectors to tokens: the shared head for all slots at once, then slot by slot what the token
// before it adds (the Markov head), how sure the confidence head is, and the choice itself.
#include <cmath>

#include "drafter.h"

namespace mr {
namespace {

// The largest of n values, and whether all are finite.
struct Top {
    float value;
    bool finite;
};

Top top_of(const float* x, int n) {
    F16 largest = set16(-kInfinity), rest = zero16();  // x - x is 0 or NaN
    each16(n, [&](int i, int lanes, int) {
        const F16 a = load16_n(x + i, lanes);
        largest = max(largest, lanes == 16 ? a : set16(x[i]));
        rest = add(rest, sub(a, a));
    });
    float top = max16(largest);
    for (int i = n / 16 * 16; i < n; ++i) top = x[i] > top ? x[i] : top;
    return {top, sum16(rest) == 0.0f};
}

// law = softmax(x / temperature); returns its sum before it was scaled to 1.
float soften(const float* x, int n, float top, float temperature, float* law) {
    const F16 shift = set16(top), factor = set16(1.0f / temperature);
    Sum total;
    each16(n, [&](int i, int lanes, int j) {
        const F16 e = exp(mul(sub(load16_n(x + i, lanes), shift), factor));
        store16_n(law + i, e, lanes);
        total.part[j] = add(total.part[j], load16_n(law + i, lanes));
    });
    const float sum = total.total();
    const F16 inverse = set16(1.0f / sum);
    each16(n, [&](int i, int lanes, int) { store16_n(law + i, mul(load16_n(law + i, lanes), inverse), lanes); });
    return sum;
}

// The token at which the law's running sum first exceeds its share `uniform` of the whole.
int draw(const float* law, int n, double uniform) {
    double total = 0, running = 0;
    for (int i = 0; i < n; ++i) total += law[i];
    int last = 0;
    for (int i = 0; i < n; ++i) {
        if (law[i] <= 0) continue;
        running += law[i], last = i;
        if (running > uniform * total) break;
    }
    return last;
}

}  // namespace

// The chance that the token of a slot is kept: it sees the slot and the token before it.
float Drafter::confide(const Request& request, int slot) const {
    const DraftConfig& c = config;
    const float* weight = globals.vector(DraftVector::kConfidence);
    Sum sum;
    const auto dot = [&](const float* x, int n, const float* w) {
        each16(n, [&](int i, int lanes, int j) {
            sum.part[j] = fma(load16_n(x + i, lanes), load16_n(w + i, lanes), sum.part[j]);
        });
    };
    dot(x_.row(request.row0 + slot), c.hidden, weight);
    const float* markov = globals.vector(DraftVector::kMarkovIn) + int64_t(request.token) * c.markov_rank;
    if (c.confidence_markov) dot(markov, c.markov_rank, weight + c.hidden);
    return sigmoid1(sum.total() + *globals.vector(DraftVector::kConfidenceBias));
}

void Drafter::choose(const DraftPass& work, Request& request, int slot, float* logits) {
    const int n = config.vocab;
    const Top top = top_of(logits, n);
    float& confidence = work.confidence[request.at + slot];
    if (config.confidence) confidence = confide(request, slot);
    request.token = 0;
    if (request.law) {
        float* law = request.law + int64_t(slot) * n;
        const float sum = soften(logits, n, top.value, request.temperature, law);
        if (!config.confidence) confidence = 1.0f / sum;
        if (top.finite) request.token = draw(law, n, work.uniforms[request.at + slot]);
    } else if (top.finite) {
        while (logits[request.token] != top.value) ++request.token;
        if (!config.confidence) confidence = 1.0f / soften(logits, n, top.value, 1.0f, logits);
    }
    // Cut here, not dropped whole: whether this slot is finite hangs on the tokens drawn before it, and to keep only
    // drafts that stay finite would bend what is kept of them.
    if (request.good == slot && top.finite && std::isfinite(confidence)) request.good = slot + 1;
    work.tokens[request.at + slot] = request.token;
}

// Scores of the whole vocabulary for the rows of `a` that `rows` names, stored or added to the logits.
void Drafter::vocabulary(DraftMatrix exact, const ByteMatrix& rounded, const float* a, ptrdiff_t lda,
                         const std::vector<int32_t>& rows, float* logits, bool add) {
    const int n = config.vocab, m = int(rows.size());
    if (!config.exact) {
        bytes_.round(a, lda, rows.data(), m, rounded.k);
        return multiply(pool, rounded, bytes_, m, logits, n, add);
    }
    GemmJob job;
    job.w = &globals.matrix(exact), job.a = a, job.lda = lda, job.rows = rows.data(), job.m = m;
    job.c = logits, job.ldc = n;
    if (add) job.finish = Finish::kAdd, job.d = logits, job.ldd = n;
    gemm.run(job);
}

void Drafter::chain(const DraftPass& work) {
    const DraftConfig& c = config;
    const int longest = requests_[0].length, count = int(requests_.size());
    order_.clear();  // slot by slot: the rows of one step lie together
    for (int slot = 0; slot < longest; ++slot)
        for (const Request& r : requests_)
            if (slot < r.length) order_.push_back(r.row0 + slot);
    if (logits_.size() < size_t(rows_) * size_t(c.vocab)) logits_.resize(size_t(rows_) * size_t(c.vocab));
    vocabulary(DraftMatrix::kHead, head, x_.data, x_.stride, order_, logits_.data(), false);
    float* logits = logits_.data();
    int active = count;
    for (int slot = 0; slot < longest; ++slot, logits += int64_t(active) * c.vocab) {
        while (requests_[size_t(active - 1)].length <= slot) --active;
        before_.clear();
        for (int i = 0; i < active; ++i) before_.push_back(requests_[size_t(i)].token);
        if (c.markov_rank)
            vocabulary(DraftMatrix::kMarkovOut, markov, globals.vector(DraftVector::kMarkovIn), c.markov_rank, before_,
                       logits, true);
        pool.run(active, [&](int i, int) { choose(work, requests_[size_t(i)], slot, logits + int64_t(i) * c.vocab); });
    }
    for (const Request& r : requests_) work.good[r.index] = r.good;
}

}  // namespace mr
