// From the block's hidden vectors to tokens: the shared head for all slots at once, then slot by slot what the token
// before it adds (the Markov head), how sure the confidence head is, and the choice itself.
#include <cmath>

#include "drafter.h"

namespace mr {
namespace {

constexpr int kRangePanels = 16;
constexpr int kRange = kRangePanels * kBytePanel;  // of the vocabulary: what one task takes, and one partial result

int ranges_of(int vocab) { return (vocab + kRange - 1) / kRange; }

template <class F>
MR_INLINE void each_range(int n, const F& f) {
    for (int first = 0, i = 0; first < n; first += kRange, ++i) f(i, first, min_int(kRange, n - first));
}

DraftTop top_of(const float* x, int n) {
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

// law = e^((x - top) / temperature); returns its sum.
float soften(const float* x, int n, float top, float temperature, float* law) {
    const F16 shift = set16(top), factor = set16(1.0f / temperature);
    Sum total;
    each16(n, [&](int i, int lanes, int j) {
        store16_n(law + i, exp(mul(sub(load16_n(x + i, lanes), shift), factor)), lanes);
        total.part[j] = add(total.part[j], load16_n(law + i, lanes));
    });
    return total.total();
}

// The first of n parts with which the running sum exceeds `share`, or the last that is not empty; `running` is then the
// sum of those before it.
template <class F>
int part_of(int n, double& running, double share, const F& sum_of) {
    int last = 0;
    double before = running;
    for (int i = 0; i < n; ++i) {
        const double sum = sum_of(i);
        if (!(sum > 0)) continue;
        last = i, before = running, running += sum;
        if (running > share) break;
    }
    running = before;
    return last;
}

// The token at which the law's running sum first exceeds its share `uniform` of the whole; sums: of its ranges.
int draw(const float* law, int n, const float* sums, double uniform) {
    double total = 0, running = 0;
    for (int i = 0; i < ranges_of(n); ++i) total += sums[i];
    const double share = uniform * total;
    const int range = part_of(ranges_of(n), running, share, [&](int i) { return sums[i]; }) * kRange;
    n = min_int(kRange, n - range), law += range;
    const int sixteen = 16 * part_of((n + 15) / 16, running, share, [&](int i) {
        return sum16(load16_n(law + i * 16, min_int(16, n - i * 16)));
    });
    law += sixteen;
    return range + sixteen + part_of(min_int(16, n - sixteen), running, share, [&](int i) { return law[i]; });
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

// `tops` of the logits' ranges; `sums` is room for as many numbers.
void Drafter::choose(const DraftPass& work, Request& request, int slot, float* logits, DraftTop* tops, float* sums) {
    const int n = config.vocab, ranges = ranges_of(n), guess = request.guessed ? work.guess[request.at + slot] : -1;
    if (guess >= 0) {
        float &score = logits[guess], &most = tops[guess / kRange].value;
        score += work.more[request.at + slot] * (request.law ? request.temperature : 1.0f);
        most = score > most ? score : most;
    }
    DraftTop top = tops[0];
    for (int i = 1; i < ranges; ++i)
        top = {tops[i].value > top.value ? tops[i].value : top.value, top.finite && tops[i].finite};
    float& confidence = work.confidence[request.at + slot];
    if (config.confidence) confidence = confide(request, slot);
    const auto law_of = [&](float temperature, float* law) {
        float total = 0;
        each_range(n, [&](int i, int first, int count) {
            total += sums[i] = soften(logits + first, count, top.value, temperature, law + first);
        });
        return total;
    };
    request.token = 0;
    if (request.law) {
        float* law = request.law + int64_t(slot) * n;
        const float inverse = 1.0f / law_of(request.temperature, law);
        if (!config.confidence) confidence = inverse;
        if (top.finite) request.token = draw(law, n, sums, work.uniforms[request.at + slot]);
        each16(n, [&](int i, int lanes, int) {
            store16_n(law + i, mul(load16_n(law + i, lanes), set16(inverse)), lanes);
        });
    } else if (top.finite) {
        int range = 0;
        while (tops[range].value != top.value) ++range;
        request.token = range * kRange;
        while (logits[request.token] != top.value) ++request.token;
        if (!config.confidence) confidence = 1.0f / law_of(1.0f, logits);
    }
    // Cut here, not dropped whole: whether this slot is finite hangs on the tokens drawn before it, and to keep only
    // drafts that stay finite would bend what is kept of them.
    request.guessed = guess >= 0 && request.token == guess;
    if (request.good == slot && top.finite && std::isfinite(confidence)) request.good = slot + 1;
    work.tokens[request.at + slot] = request.token;
}

// Scores of the whole vocabulary for the rows of `a` that `rows` names, stored or added to the logits; `tops`, where
// given: of every row's ranges.
void Drafter::vocabulary(DraftMatrix slot, const float* a, ptrdiff_t lda, const std::vector<int32_t>& rows,
                         float* logits, bool add, DraftTop* tops) {
    const int n = config.vocab, m = int(rows.size()), ranges = ranges_of(n);
    const Matrix* whole = config.exact ? &globals.matrix(slot) : nullptr;
    const ByteMatrix& rounded = globals.rounded(slot);
    share(double(m) * n * (whole ? whole->k / kFloatMacs : rounded.k / kByteMacs));
    if (whole) {
        GemmJob job;
        job.w = whole, job.a = a, job.lda = lda, job.rows = rows.data(), job.m = m;
        job.c = logits, job.ldc = n;
        if (add) job.finish = Finish::kAdd, job.d = logits, job.ldd = n;
        gemm.run(job);
    } else {
        bytes_.round(a, lda, rows.data(), m, rounded.k);
    }
    const ByteJob job{&rounded, &bytes_, m, logits, n, add ? Finish::kAdd : Finish::kStore};
    pool.run(ranges, [&](int range, int) {
        const int panel = range * kRangePanels, first = range * kRange;
        if (!whole) multiply_panels(job, panel, min_int(rounded.panels, panel + kRangePanels));
        for (int row = 0; tops && row < m; ++row)
            tops[row * ranges + range] = top_of(logits + int64_t(row) * n + first, min_int(kRange, n - first));
    });
}

void Drafter::chain(const DraftPass& work) {
    const DraftConfig& c = config;
    const int longest = requests_[0].length, count = int(requests_.size()), ranges = ranges_of(c.vocab);
    order_.clear();  // slot by slot: the rows of one step lie together
    for (int slot = 0; slot < longest; ++slot)
        for (const Request& r : requests_)
            if (slot < r.length) order_.push_back(r.row0 + slot);
    if (logits_.size() < size_t(rows_) * size_t(c.vocab)) logits_.resize(size_t(rows_) * size_t(c.vocab));
    if (tops_.size() < size_t(rows_) * size_t(ranges)) tops_.resize(size_t(rows_) * size_t(ranges));
    if (sums_.size() < size_t(count) * size_t(ranges)) sums_.resize(size_t(count) * size_t(ranges));
    float* logits = logits_.data();
    DraftTop* tops = tops_.data();
    vocabulary(DraftMatrix::kHead, x_.data, x_.stride, order_, logits, false, c.markov_rank ? nullptr : tops);
    int active = count;
    for (int slot = 0; slot < longest; ++slot) {
        while (requests_[size_t(active - 1)].length <= slot) --active;
        before_.clear();
        for (int i = 0; i < active; ++i) before_.push_back(requests_[size_t(i)].token);
        if (c.markov_rank)
            vocabulary(DraftMatrix::kMarkovOut, globals.vector(DraftVector::kMarkovIn), c.markov_rank, before_,
                       logits, true, tops);
        pool.run(active, [&](int i, int) {
            choose(work, requests_[size_t(i)], slot, logits + int64_t(i) * c.vocab, tops + i * ranges,
                   sums_.data() + i * ranges);
        });
        logits += int64_t(active) * c.vocab, tops += active * ranges;
    }
    for (const Request& r : requests_) work.good[r.index] = r.good;
}

}  // namespace mr
