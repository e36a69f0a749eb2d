// The feed-forward half: dense layers, and the latent mixture of experts. A row's experts are the k best of
// sigmoid + bias (ties to the lower index), weighted by the plain sigmoid and summed in ascending expert index, so a
// row's result does not depend on which other rows met the same experts.
#include "network.h"
#include "rows.h"

namespace mr {
namespace {

// The indices of the k largest scores, ascending. NaN never beats anything, so k indices always result.
void choose(const float* scores, int n, int k, int32_t* chosen) {
    int count = 0;
    for (int e = 0; e < n; ++e) {
        if (count == k && !(scores[e] > scores[chosen[k - 1]])) continue;
        int at = count < k ? count++ : k - 1;
        for (; at > 0 && scores[e] > scores[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
        chosen[at] = e;
    }
    for (int i = 1; i < k; ++i)
        for (int j = i; j > 0 && chosen[j] < chosen[j - 1]; --j) {
            const int32_t x = chosen[j];
            chosen[j] = chosen[j - 1], chosen[j - 1] = x;
        }
}

}  // namespace

// Fills chosen and weight [rows][k]; then groups by expert: `first[e]` is where expert e's share of the joint list
// begins, `order` lists the rows, `place[row*k + i]` is the list position of a row's i-th expert. A part's list has the
// places of its rows.
void Model::route(const Layer& layer, const Part& part) {
    const Config& c = config;
    const int E = c.experts, k = c.top_k, listed = part.row0 * k;
    const float* bias = layer.vector(VectorSlot::kRouterBias);
    Hand& hand = part.hand;
    if (hand.scratch.size() < size_t(E) + 16) hand.scratch.resize(size_t(E) + 16);
    float* biased = hand.scratch.data();
    hand.first.assign(size_t(E) + 1, 0);
    for (int row = part.row0; row < part.row0 + part.rows; ++row) {
        float* s = s_.ffn.row(row);
        each16(E, [&](int i, int lanes, int) {
            const F16 x = sigmoid(load16_n(s + i, lanes));
            store16_n(s + i, x, lanes);
            store16_n(biased + i, add(x, load16_n(bias + i, lanes)), lanes);
        });
        int32_t* chosen = s_.chosen.data() + row * k;
        choose(biased, E, k, chosen);
        float total = 0;
        for (int i = 0; i < k; ++i) total += s[chosen[i]], ++hand.first[size_t(chosen[i]) + 1];
        const float divide = c.renormalize ? total + 1e-20f : 1.0f;
        for (int i = 0; i < k; ++i) s_.weight[size_t(row * k + i)] = s[chosen[i]] / divide * c.routed_scale;
    }
    hand.first[0] = listed;
    for (int e = 0; e < E; ++e) hand.first[size_t(e) + 1] += hand.first[size_t(e)];
    hand.cursor.assign(hand.first.begin(), hand.first.end());
    for (int i = listed; i < listed + part.rows * k; ++i) {
        const int at = hand.cursor[size_t(s_.chosen[size_t(i)])]++;
        s_.order[size_t(at)] = i / k, s_.place[size_t(i)] = at;
    }
}

void Model::dense(const Layer& layer, const Part& part, const Buffer& h) {
    timed(part.hand, Op::kFfnIn, [&] {
        GemmJob job = part.job(layer.matrix(MatrixSlot::kDenseIn), s_.x, s_.wide);
        job.finish = Finish::kGlu, job.act = act_;
        part.gemm.run(job);
    });
    timed(part.hand, Op::kFfnOut, [&] {
        GemmJob job = part.job(layer.matrix(MatrixSlot::kDenseOut), s_.wide, h);
        job.finish = Finish::kAdd, job.d = job.c, job.ldd = job.ldc;
        part.gemm.run(job);
    });
}

void Model::moe(const Layer& layer, const Part& part, const Buffer& h) {
    const Config& c = config;
    const int k = c.top_k, size = c.expert_size();
    const Buffer z = c.latent ? Buffer{s_.ffn.data + c.experts, s_.ffn.stride} : s_.x;
    timed(part.hand, Op::kFfnIn, [&] {  // router and latent beside the shared experts' first half
        GemmJob jobs[2] = {part.job(layer.matrix(MatrixSlot::kFfnIn), s_.x, s_.ffn),
                           part.job(layer.matrix(MatrixSlot::kSharedIn), s_.x, s_.joined)};
        jobs[1].c += c.latent, jobs[1].finish = Finish::kGlu, jobs[1].act = act_;
        part.gemm.run(jobs, 2);
    });
    timed(part.hand, Op::kRoute, [&] { route(layer, part); });
    // While one expert works, the weights of the one after it come near: of `then` after the last.
    const auto experts = [&](MatrixSlot slot, const Matrix* then, const auto& fill) {
        std::vector<GemmJob>& jobs = part.hand.jobs;
        jobs.clear();
        for (int e = 0; e < c.experts; ++e) {
            const int at = part.hand.first[size_t(e)], m = part.hand.first[size_t(e) + 1] - at;
            if (!m) continue;
            GemmJob job;
            job.w = &layer.matrix(slot, e), job.m = m;
            fill(job, at);
            if (!jobs.empty()) jobs.back().next = job.w;
            jobs.push_back(job);
        }
        jobs.back().next = then;
        part.gemm.run(jobs.data(), int(jobs.size()));
    };
    timed(part.hand, Op::kExpertIn, [&] {
        int lowest = 0;
        while (part.hand.first[size_t(lowest) + 1] == part.hand.first[0]) ++lowest;
        const Matrix* then = &layer.matrix(MatrixSlot::kExpertOut, lowest);
        experts(MatrixSlot::kExpertIn, then, [&](GemmJob& job, int at) {
            job.a = z.data, job.lda = z.stride, job.rows = s_.order.data() + at;
            job.c = s_.act.row(at), job.ldc = s_.act.stride, job.finish = Finish::kGlu, job.act = act_;
        });
    });
    timed(part.hand, Op::kExpertOut, [&] {
        experts(MatrixSlot::kExpertOut, nullptr, [&](GemmJob& job, int at) {
            job.a = s_.act.row(at), job.lda = s_.act.stride, job.c = s_.expert.row(at), job.ldc = s_.expert.stride;
        });
    });
    timed(part.hand, Op::kCombine, [&] {
        part.each_row([&](int row) {
            const int32_t* place = s_.place.data() + row * k;
            const float* weight = s_.weight.data() + row * k;
            float* to = c.latent ? s_.joined.row(row) : h.row(row);
            each16(size, [&](int i, int lanes, int) {
                F16 sum = zero16();
                for (int j = 0; j < k; ++j)
                    sum = fma(set16(weight[j]), load16_n(s_.expert.row(place[j]) + i, lanes), sum);
                if (!c.latent) sum = add(load16_n(to + i, lanes), sum);
                store16_n(to + i, sum, lanes);
            });
            if (c.latent) rms_norm(to, layer.vector(VectorSlot::kRoutedNorm), size, c.eps, to);
        });
    });
    timed(part.hand, Op::kFfnOut, [&] {  // latent up and shared down as one product over their joined inputs
        GemmJob job = part.job(layer.matrix(MatrixSlot::kFfnOut), s_.joined, h);
        job.finish = Finish::kAdd, job.d = job.c, job.ldd = job.ldc;
        part.gemm.run(job);
    });
}

}  // namespace mr
