// Single operations behind the C interface, for tests and profiles.
#include <vector>

#include "api.h"
#include "network.h"

using namespace mr;

MR_API int mr_op_gemm(const Source* parts, int32_t num_parts, int32_t join, const float* a, int32_t m, float* c,
                      int64_t ldc, int32_t finish, const float* d, int64_t ldd, const float* betas, int32_t threads) {
    return guarded([&] {
        Arena arena;
        Pool pool(threads);
        Gemm gemm(pool);
        const Matrix w = pack(arena, parts, num_parts, Join(join));
        GemmJob job;
        job.w = &w, job.a = a, job.lda = w.k, job.m = m, job.c = c, job.ldc = ldc;
        job.finish = Finish(finish), job.d = d, job.ldd = ldd;
        if (betas) job.act = {betas[0] > 0, betas[0], betas[1]};
        gemm.run(job);
    });
}

MR_API int mr_op_unpack(const Source* parts, int32_t num_parts, int32_t join, float* out, int32_t* kind) {
    return guarded([&] {
        Arena arena;
        const Matrix w = pack(arena, parts, num_parts, Join(join));
        *kind = int32_t(w.kind);
        for (int r = 0; r < w.n * (w.glu ? 2 : 1); ++r)
            for (int k = 0; k < w.k; ++k) *out++ = unpack_one(w, r, k);
    });
}

MR_API void mr_op_math(int32_t function, const float* x, float* out, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes) {
        const int lanes = n - i < kLanes ? int(n - i) : kLanes;
        const V a = load_n(x + i, lanes);
        const V y = function == 0 ? exp(a) : function == 1 ? sigmoid(a) : function == 2 ? tanh(a) : softplus(a);
        store_n(out + i, y, lanes);
    }
}

// One head: q (scaled), k, g = log decay [tokens][keys], v and out [tokens][values], state [keys][values].
MR_API int mr_op_kda(int32_t tokens, int32_t keys, int32_t values, const float* q, const float* k, const float* g,
                     const float* beta, const float* v, float* state, float* out) {
    return guarded([&] {
        const ptrdiff_t wide = (values + 15) / 16 * 16;
        std::vector<float> alpha(size_t(tokens) * size_t(keys) + 16), padded(size_t(tokens * wide)), o(size_t(tokens * wide));
        std::vector<float> work(size_t(tokens) * size_t(keys) + size_t(keys) * kLanes);
        mr_op_math(0, g, alpha.data(), int64_t(tokens) * keys);
        for (int t = 0; t < tokens; ++t)
            for (int i = 0; i < values; ++i) padded[size_t(t * wide + i)] = v[t * values + i];
        kda_recurrence(KdaState{state, state, true}, keys, values, tokens, q, k, alpha.data(), beta, padded.data(),
                       o.data(), wide, work.data());
        for (int t = 0; t < tokens; ++t)
            for (int i = 0; i < values; ++i) out[t * values + i] = o[size_t(t * wide + i)];
    });
}

// One thread's ceilings: fused multiply-adds per second (as GFLOP/s) and bytes read per second (GB/s) from a buffer
// too large for the caches. The best of a few runs, in CPU time.
MR_API void mr_op_ceiling(double* gflops, double* gbytes) {
    const auto seconds = [](const auto& f) {
        double best = 1e9;
        for (int i = 0; i < 5; ++i) {
            const double begin = now(Clock::kCpu);
            f();
            const double s = now(Clock::kCpu) - begin;
            best = s < best ? s : best;
        }
        return best;
    };
    constexpr int kChains = 12, kRounds = 1 << 20;
    V chain[kChains];
    for (int i = 0; i < kChains; ++i) chain[i] = set1(float(i));
    float factor = 0.999f;
    const double compute = seconds([&] {
        const V b = set1(factor), c = set1(0.001f);
        for (int r = 0; r < kRounds; ++r) {
#pragma GCC unroll 12
            for (int i = 0; i < kChains; ++i) chain[i] = fma(chain[i], b, c);
        }
    });
    std::vector<float> big(size_t(32) << 20, 1.0f);
    V sum[8] = {};
    const double read = seconds([&] {
        for (size_t i = 0; i < big.size(); i += 8 * kLanes)
            for (int j = 0; j < 8; ++j) sum[j] = add(sum[j], load(big.data() + i + size_t(j) * kLanes));
    });
    volatile float keep = 0;  // the work must not be optimised away
    float lane[kLanes];
    for (const V& v : chain) store(lane, v), keep = keep + lane[0];
    for (const V& v : sum) store(lane, v), keep = keep + lane[0];
    *gflops = 2.0 * kChains * kRounds * kLanes / compute / 1e9;
    *gbytes = double(big.size()) * 4 / read / 1e9;
}
