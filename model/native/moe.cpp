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
// begins, `order` lists the rows, `place[row*k + i]` is the list position of a row's i-th expert.
void Model::route(const Layer& layer, int rows) {
    const Config& c = config;
    const int E = c.experts, k = c.top_k;
    const float* bias = layer.vector(VectorSlot::kRouterBias);
    auto& biased = thread_scratch_[0];
    biased.resize(size_t(E) + 16);
    s_.first.assign(size_t(E) + 1, 0);
    for (int row = 0; row < rows; ++row) {
        float* s = s_.ffn.row(row);
        each16(E, [&](int i, int lanes, int) {
            const F16 x = sigmoid(load16_n(s + i, lanes));
            store16_n(s + i, x, lanes);
            store16_n(biased.data() + i, add(x, load16_n(bias + i, lanes)), lanes);
        });
        int32_t* chosen = s_.chosen.data() + row * k;
        choose(biased.data(), E, k, chosen);
        float total = 0;
        for (int i = 0; i < k; ++i) total += s[chosen[i]], ++s_.first[size_t(chosen[i]) + 1];
        const float divide = c.renormalize ? total + 1e-20f : 1.0f;
        for (int i = 0; i < k; ++i) s_.weight[size_t(row * k + i)] = s[chosen[i]] / divide * c.routed_scale;
    }
    for (int e = 0; e < E; ++e) s_.first[size_t(e) + 1] += s_.first[size_t(e)];
    s_.cursor.assign(s_.first.begin(), s_.first.end());
    for (int i = 0; i < rows * k; ++i) {
        const int at = s_.cursor[size_t(s_.chosen[size_t(i)])]++;
        s_.order[size_t(at)] = i / k, s_.place[size_t(i)] = at;
    }
}

void Model::dense(const Layer& layer, int rows, float* h) {
    timed(Op::kFfnIn, [&] {
        GemmJob job;
        job.w = &layer.matrix(MatrixSlot::kDenseIn);
        job.a = s_.x.data, job.lda = s_.x.stride, job.m = rows, job.c = s_.wide.data, job.ldc = s_.wide.stride;
        job.finish = Finish::kGlu, job.act = act_;
        gemm.run(job);
    });
    timed(Op::kFfnOut, [&] {
        GemmJob job;
        job.w = &layer.matrix(MatrixSlot::kDenseOut);
        job.a = s_.wide.data, job.lda = s_.wide.stride, job.m = rows;
        job.finish = Finish::kAdd, job.c = h, job.ldc = s_.x.stride, job.d = h, job.ldd = s_.x.stride;
        gemm.run(job);
    });
}

void Model::moe(const Layer& layer, int rows, float* h) {
    const Config& c = config;
    const int k = c.top_k, size = c.expert_size();
    const Buffer z = c.latent ? Buffer{s_.ffn.data + c.experts, s_.ffn.stride} : s_.x;
    timed(Op::kFfnIn, [&] {  // router and latent beside the shared experts' first half
        GemmJob jobs[2];
        jobs[0].w = &layer.matrix(MatrixSlot::kFfnIn);
        jobs[0].c = s_.ffn.data, jobs[0].ldc = s_.ffn.stride;
        jobs[1].w = &layer.matrix(MatrixSlot::kSharedIn);
        jobs[1].c = s_.joined.data + c.latent, jobs[1].ldc = s_.joined.stride;
        jobs[1].finish = Finish::kGlu, jobs[1].act = act_;
        for (GemmJob& job : jobs) job.a = s_.x.data, job.lda = s_.x.stride, job.m = rows;
        gemm.run(jobs, 2);
    });
    timed(Op::kRoute, [&] { route(layer, rows); });
    const auto experts = [&](MatrixSlot slot, const auto& fill) {
        jobs_.clear();
        for (int e = 0; e < c.experts; ++e) {
            const int at = s_.first[size_t(e)], m = s_.first[size_t(e) + 1] - at;
            if (!m) continue;
            GemmJob job;
            job.w = &layer.matrix(slot, e), job.m = m;
            fill(job, at);
            jobs_.push_back(job);
        }
        gemm.run(jobs_.data(), int(jobs_.size()));
    };
    timed(Op::kExpertIn, [&] {
        experts(MatrixSlot::kExpertIn, [&](GemmJob& job, int at) {
            job.a = z.data, job.lda = z.stride, job.rows = s_.order.data() + at;
            job.c = s_.act.row(at), job.ldc = s_.act.stride, job.finish = Finish::kGlu, job.act = act_;
        });
    });
    timed(Op::kExpertOut, [&] {
        experts(MatrixSlot::kExpertOut, [&](GemmJob& job, int at) {
            job.a = s_.act.row(at), job.lda = s_.act.stride, job.c = s_.expert.row(at), job.ldc = s_.expert.stride;
        });
    });
    timed(Op::kCombine, [&] {
        for_rows(rows, [&](int row) {
            const int32_t* place = s_.place.data() + row * k;
            const float* weight = s_.weight.data() + row * k;
            float* to = c.latent ? s_.joined.row(row) : h + row * s_.x.stride;
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
    timed(Op::kFfnOut, [&] {  // latent up and shared down as one product over their joined inputs
        GemmJob job;
        job.w = &layer.matrix(MatrixSlot::kFfnOut);
        job.a = s_.joined.data, job.lda = s_.joined.stride, job.m = rows;
        job.finish = Finish::kAdd, job.c = h, job.ldc = s_.x.stride, job.d = h, job.ldd = s_.x.stride;
        gemm.run(job);
    });
}

}  // namespace mr
