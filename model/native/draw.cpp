#include "draw.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "math.h"
#include "random.h"

namespace mr {
namespace {

constexpr int kBlock = 256;  // ids whose weights are summed by themselves; engine.sampler.BLOCK
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Floats that begin on a cache line and grow as needed.
class Floats {
public:
    float* room(int n) {
        if (int(memory_.size()) < n + 16) memory_.resize(size_t(n) + 16);
        return (float*)((uintptr_t(memory_.data()) + 63) / 64 * 64);
    }

private:
    std::vector<float> memory_;
};

// Whether one of sixteen is `value`, or at least it.
MR_INLINE bool any_equal(const float* x, float value) {
    int found = 0;
    for (int i = 0; i < 16; ++i) found |= x[i] == value;
    return found;
}
MR_INLINE bool any_from(const float* x, float value) {
    int found = 0;
    for (int i = 0; i < 16; ++i) found |= x[i] >= value;
    return found;
}

// One row looked through once: its largest logit, where that first stands, and whether all are finite.
class Row {
public:
    Row(const float* x, int n, Floats& tops) : x_(x), n_(n), tops_(tops.room((n / kBlock + 1) * 16)) {
        F16 rest = zero16(), most = set16(-kInfinity);  // x * 0 is 0 or NaN
        const F16 none = zero16();
        for (int b = 0; b * kBlock < n; ++b) {
            const float* block = x + b * kBlock;
            const int size = min_int(kBlock, n - b * kBlock), whole = size / 64 * 64;
            F16 top[4], bad[4] = {rest, zero16(), zero16(), zero16()};
            for (F16& t : top) t = set16(-kInfinity);
            for (int i = 0; i < whole; i += 64)
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    const F16 a = load16(block + i + 16 * j);
                    top[j] = max(a, top[j]), bad[j] = fma(a, none, bad[j]);
                }
            for (int i = whole; i < size; i += 16) {
                const int lanes = min_int(16, size - i);
                const F16 a = load16_n(block + i, lanes);
                bad[0] = fma(a, none, bad[0]);
                if (lanes == 16) top[0] = max(a, top[0]);
                else for (int j = 0; j < lanes; ++j) top[1] = max(set16(block[i + j]), top[1]);
            }
            const F16 best = max(max(top[0], top[1]), max(top[2], top[3]));
            store16(tops_ + b * 16, best);
            most = max(best, most);
            rest = add(add(bad[0], bad[1]), add(bad[2], bad[3]));
        }
        top_ = max16(most), finite_ = sum16(rest) == 0.0f;
    }

    float top() const { return top_; }
    bool finite() const { return finite_; }

    // The lowest id among the largest. Only before `tops` serves another row.
    int first() const {
        int b = 0;
        while (!any_equal(tops_ + b * 16, top_)) ++b;
        int i = b * kBlock;
        while (i + 16 <= n_ && !any_equal(x_ + i, top_)) i += 16;
        while (x_[i] != top_) ++i;
        return i;
    }

private:
    const float* x_;
    int n_;
    float* tops_;  // [blocks][16]
    float top_;
    bool finite_;
};

// Calls f(i, lanes) for sixteen ids at a time of each block and done(block) behind it.
template <class F, class G>
MR_INLINE void each_block(int n, const F& f, const G& done) {
    for (int b = 0; b * kBlock < n; ++b) {
        const int end = min_int((b + 1) * kBlock, n);
        int i = b * kBlock;
        for (; i + 16 <= end; i += 16) f(i, 16);
        if (i < end) f(i, end - i);
        done(b);
    }
}

double sum_of(const float* x, int n) {
    double total = 0;
    F16 sum = zero16();
    each_block(n, [&](int i, int lanes) { sum = add(sum, load16_n(x + i, lanes)); },
               [&](int) { total += double(sum16(sum)), sum = zero16(); });
    return total;
}

// A finite float as a number that orders alike, and back; both zeros are one.
MR_INLINE uint32_t key_of(float x) {
    x += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

MR_INLINE float of_key(uint32_t key) {
    key ^= key >> 31 ? 0x80000000u : 0xFFFFFFFFu;
    float x;
    std::memcpy(&x, &key, 4);
    return x;
}

// Ids ordered by value, the largest first and equals by ascending id: those kept are the ones from `least` on, but for
// the last of its equals.
struct Cut {
    float least;
    std::vector<int32_t> dropped;
};

// Finds the fewest first ids whose masses add up to a goal, or all of those from `least` on. `masses` null: 1 each.
// Nothing is sorted but the last few: a sum over all from a value on takes less time than to move them about.
class Cutter {
public:
    Cutter(const float* values, const float* masses, int n) : values_(values), masses_(masses), n_(n) {}

    Cut at(double goal, float least, float most) const {
        uint32_t low = key_of(least), high = key_of(most);  // the last one kept lies between
        Sums low_sums = from(least), above{0, 0};             // from `low` on; above `high`
        while (low < high && low_sums.count - above.count > kFew) {
            const uint32_t middle = low + (high - low) / 2 + 1;
            const Sums sums = from(of_key(middle));
            if (sums.mass >= goal) low = middle, low_sums = sums;
            else high = middle - 1, above = sums;
        }
        std::vector<int32_t> rest = between(of_key(low), of_key(high));
        if (low < high)
            std::stable_sort(rest.begin(), rest.end(), [&](int32_t a, int32_t b) { return values_[a] > values_[b]; });
        double reached = above.mass;
        size_t kept = 0;
        while (kept < rest.size() && (kept == 0 || reached < goal)) reached += mass(rest[kept++]);
        Cut cut{kept ? values_[rest[kept - 1]] : least, {}};
        for (size_t i = kept; i < rest.size() && values_[rest[i]] == cut.least; ++i) cut.dropped.push_back(rest[i]);
        return cut;
    }

private:
    static constexpr double kFew = 32;
    struct Sums {
        double mass, count;
    };

    double mass(int32_t id) const { return masses_ ? double(masses_[id]) : 1.0; }

    Sums from(float least) const {
        alignas(64) static const float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
        const V bound = set1(least), none = zero();
        const F16 ones = load16(kOnes);
        Sums sums{0, 0};
        F16 mass = zero16(), count = zero16();
        each_block(
            n_,
            [&](int i, int lanes) {
                const F16 v = load16_n(values_ + i, lanes), one = lanes == 16 ? ones : load16_n(kOnes, lanes);
                const F16 m = masses_ ? load16_n(masses_ + i, lanes) : one;
                for (int r = 0; r < kRegs; ++r) {
                    count.r[r] = add(count.r[r], less(v.r[r], bound, none, one.r[r]));
                    mass.r[r] = add(mass.r[r], less(v.r[r], bound, none, m.r[r]));
                }
            },
            [&](int) { sums.mass += double(sum16(mass)), mass = zero16(); });
        sums.count = double(sum16(count));
        return sums;
    }

    // Ids, ascending.
    std::vector<int32_t> between(float least, float most) const {
        std::vector<int32_t> ids;
        for (int i = 0; i < n_; i += 16) {
            if (i + 16 <= n_ && !any_from(values_ + i, least)) continue;
            for (int j = i; j < min_int(i + 16, n_); ++j)
                if (values_[j] >= least && values_[j] <= most) ids.push_back(j);
        }
        return ids;
    }

    const float *values_, *masses_;
    int n_;
};

// A law over the vocabulary: weights, and their sums by blocks. Nothing of it is normalised.
class Law {
public:
    double total() const { return total_; }
    const float* weights() const { return w_; }

    // The request's own law over a row that is finite.
    void set(const float* x, int n, float top, const Wanted& wanted) {
        w_ = memory_.room(n), n_ = n;
        // One over it must be a number and not 0: far below the largest a weight is 0, as it should be.
        const float temperature = float(std::fmin(std::fmax(wanted.temperature, 1e-30), 3e38));
        const F16 most = set16(top), factor = set16(1.0f / temperature);
        fill([&](int i, int lanes) { return exp(mul(sub(load16_n(x + i, lanes), most), factor)); });
        int left = n;
        if (wanted.top_k > 0 && wanted.top_k < n)
            apply(Cutter(x, nullptr, n).at(left = wanted.top_k, std::numeric_limits<float>::lowest(), top), x);
        if (wanted.top_p < 1.0) keep_nucleus(wanted.top_p, left);
    }

    // What is left of `law`, weighed by `share`, above `other` [n] of the sum `other_total`; returns how much that is.
    double difference(const Law& law, double share, const float* other, double other_total) {
        w_ = memory_.room(law.n_), n_ = law.n_;
        const F16 ours = set16(float(share / law.total_)), theirs = set16(float(1.0 / other_total)), none = zero16();
        fill([&](int i, int lanes) {
            return max(sub(mul(load16_n(law.w_ + i, lanes), ours), mul(load16_n(other + i, lanes), theirs)), none);
        });
        return total_;
    }

    // The first id at which the running sum exceeds `fraction` of the whole; never one of weight 0.
    int invert(double fraction) const {
        const double target = fraction * total_;
        double before = 0, reached = 0;
        int block = 0, at = 0;
        for (int b = 0; b < int(sums_.size()); ++b) {
            if (sums_[size_t(b)] <= 0) continue;
            before = reached, reached += sums_[size_t(b)], block = b;
            if (reached > target) break;
        }
        double running = 0;
        for (int i = block * kBlock; i < min_int((block + 1) * kBlock, n_); ++i) {
            if (w_[i] <= 0) continue;
            running += double(w_[i]), at = i;  // by rounding none may exceed it: then the last that has any weight
            if (running > target - before) break;
        }
        return at;
    }

private:
    template <class F>
    MR_INLINE void fill(const F& f) {
        sums_.resize(size_t(n_ + kBlock - 1) / kBlock);
        total_ = 0;
        float* w = w_;
        F16 sum = zero16();
        each_block(
            n_,
            [&](int i, int lanes) {
                const F16 a = f(i, lanes);
                store16_n(w + i, a, lanes);
                sum = add(sum, lanes == 16 ? a : load16_n(w + i, lanes));
            },
            [&](int b) { total_ += sums_[size_t(b)] = double(sum16(sum)), sum = zero16(); });
    }

    // Weights outside the cut become 0; `values` [n] are what was cut, perhaps the weights themselves.
    void apply(const Cut& cut, const float* values) {
        for (const int32_t id : cut.dropped) w_[id] = 0.0f;
        const V least = set1(cut.least), none = zero();
        fill([&](int i, int lanes) {
            F16 w = load16_n(w_ + i, lanes);
            const F16 value = load16_n(values + i, lanes);
            for (int r = 0; r < kRegs; ++r) w.r[r] = less(value.r[r], least, none, w.r[r]);
            return w;
        });
    }

    // The fewest largest weights that together reach top_p of the whole.
    void keep_nucleus(double top_p, int count) {
        // All below this weigh less than 1 - top_p together, so none of them is needed.
        const float least = float(std::fmin((1.0 - top_p) * total_ / double(count), 1.0));
        apply(Cutter(w_, w_, n_).at(top_p * total_, least, 1.0f), w_);
    }

    Floats memory_;
    float* w_ = nullptr;
    int n_ = 0;
    std::vector<double> sums_;
    double total_ = 0;
};

// What a thread draws with.
struct Scratch {
    Floats tops;
    Law law, rest;
    std::vector<float> row_tops;
};

Scratch& scratch() {
    thread_local Scratch s;
    return s;
}

// The one way to a token from a row, for a plain step and a verified one alike.
int32_t draw_row(const Wanted& w, int vocab, int row) {
    Scratch& s = scratch();
    const float* x = w.logits + int64_t(row) * vocab;
    const Row seen(x, vocab, s.tops);
    if (!seen.finite()) return kNotFinite;
    if (w.temperature == 0.0) return seen.first();
    s.law.set(x, vocab, seen.top(), w);
    return s.law.invert(uniform(w.seed, w.choice, w.position + uint64_t(row), Purpose::kSample));
}

// Rejection sampling against the request's own law; see engine/verify.py.
class Judge {
public:
    Judge(const Wanted& wanted, const int32_t* drafted, int vocab) : w_(wanted), drafted_(drafted), vocab_(vocab) {}

    Drawn run(Rule rule) {
        // A row that is not finite ends the draft before it: that is known from the tokens before it alone.
        s_.row_tops.clear();
        for (k_ = 0; k_ < w_.num_drafted; ++k_) {
            const Row row(logits(k_), vocab_, s_.tops);
            if (!row.finite()) break;
            s_.row_tops.push_back(row.top());
        }
        if (k_ == 0) return {0, draw_row(w_, vocab_, 0)};
        accepted_ = 0, share_ = 1.0;
        if (rule == Rule::kStandard) standard();
        else block();
        if (accepted_ == k_) return {k_, draw_row(w_, vocab_, k_)};
        hold(accepted_);
        // Nothing is left only where both laws agree; then a refusal has no weight, and any law is right.
        const Law& law = left(share_, accepted_) > 0.0 ? s_.rest : s_.law;
        return {accepted_, law.invert(uniform(w_.seed, w_.choice, w_.position + uint64_t(accepted_), Purpose::kSample))};
    }

private:
    const float* logits(int row) const { return w_.logits + int64_t(row) * vocab_; }
    const float* draft(int row) const { return w_.laws + int64_t(row) * vocab_; }
    double number(int slot) const { return uniform(w_.seed, w_.choice, w_.position, Purpose::kAccept, uint32_t(slot)); }

    // Makes `s_.law` the target's at this row.
    void hold(int row) {
        if (held_ == row) return;
        s_.law.set(logits(row), vocab_, s_.row_tops[size_t(row)], w_);
        held_ = row, draft_total_ = sum_of(draft(row), vocab_);
    }

    double left(double share, int row) { return s_.rest.difference(s_.law, share, draft(row), draft_total_); }
    double target_of(int row) const { return double(s_.law.weights()[drafted_[row]]) / s_.law.total(); }
    double draft_of(int row) const { return double(draft(row)[drafted_[row]]) / draft_total_; }

    void standard() {
        for (; accepted_ < k_; ++accepted_) {
            hold(accepted_);
            if (number(accepted_) * draft_of(accepted_) >= target_of(accepted_)) return;
        }
    }

    // The longest prefix that its own threshold admits, and the share of the target's law that is left there.
    void block() {
        double share = 1.0;
        for (int i = 0; i < k_; ++i) {
            hold(i);
            const double of = target_of(i), to = draft_of(i);
            share = to > 0.0 ? std::fmin(share * of / to, 1.0) : of > 0.0 ? 1.0 : 0.0;
            if (share == 0.0) return;  // stays so, and every threshold is 0
            double threshold = share;
            if (i + 1 < k_) {
                hold(i + 1);
                const double mass = left(share, i + 1), below = mass + 1.0 - share;
                threshold = below > 0.0 ? mass / below : 1.0;
            }
            if (number(i) < threshold) accepted_ = i + 1, share_ = share;
        }
    }

    const Wanted& w_;
    const int32_t* drafted_;
    int vocab_;
    Scratch& s_ = scratch();
    int k_ = 0, held_ = -1, accepted_ = 0;
    double draft_total_ = 0, share_ = 1.0;
};

}  // namespace

Drawn draw(const Wanted& wanted, const int32_t* drafted, int vocab, Rule rule) {
    if (wanted.laws && wanted.temperature > 0.0) return Judge(wanted, drafted, vocab).run(rule);
    for (int i = 0;; ++i) {  // certain drafts are kept while they are the very tokens that are drawn
        const int32_t token = draw_row(wanted, vocab, i);
        if (token == kNotFinite || i == wanted.num_drafted || token != drafted[i]) return {i, token};
    }
}

bool weigh(const Wanted& wanted, int vocab, float* weights) {
    Scratch& s = scratch();
    const Row row(wanted.logits, vocab, s.tops);
    if (!row.finite()) return false;
    s.law.set(wanted.logits, vocab, row.top(), wanted);
    std::copy_n(s.law.weights(), vocab, weights);
    return true;
}

}  // namespace mr
