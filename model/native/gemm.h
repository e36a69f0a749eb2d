// C = A * W^T for packed W. Every output is one chain of fused multiply-adds over k in ascending order, in a lane of
// its own, so a row's result is the same bits whatever M is, however rows and panels are split over threads, and for
// bf16 and MX weights alike (the widened weight is exact).
#pragma once

#include <vector>

#include "math.h"
#include "matrix.h"
#include "pool.h"

namespace mr {

enum class Finish : int {
    kStore,  // c = acc
    kAdd,    // c = d + acc
    kGate,   // c = acc * sigmoid(d)
    kGlu,    // c = activation(gate acc, up acc); only with a GLU matrix
};

struct GemmJob {
    const Matrix* w = nullptr;
    const float* a = nullptr;  // row m is a + (rows ? rows[m] : m) * lda
    ptrdiff_t lda = 0;
    const int32_t* rows = nullptr;
    int m = 0;
    float* c = nullptr;  // [m][ldc]
    ptrdiff_t ldc = 0;
    Finish finish = Finish::kStore;
    const float* d = nullptr;  // [m][ldd]; may be c
    ptrdiff_t ldd = 0;
    Activation act{};
    const Matrix* next = nullptr;  // worth fetching meanwhile: where rows are few, the kernel only waits for weights
};

// Runs independent products side by side: all jobs' panels are shared out over the pool's threads, or without a pool
// they all run on the calling one.
class Gemm {
public:
    Gemm() : widened_(1) {}
    explicit Gemm(Pool& pool) : pool_(&pool), widened_(size_t(pool.size())) {}
    void run(const GemmJob* jobs, int num_jobs);
    void run(const GemmJob& job) { run(&job, 1); }

private:
    struct Task {
        const GemmJob* job;
        int panel0, panel1, row0, row1;
    };
    void split(const GemmJob& job, double share);
    void in_parts(const GemmJob* jobs, int num_jobs, double total, int parts);
    void execute(const Task& task, int thread);

    Pool* pool_ = nullptr;
    std::vector<Task> tasks_;
    std::vector<int> ends_;   // of each share of the tasks
    double room_ = 0;         // multiply-adds that the share in the making still takes
    std::vector<std::vector<uint8_t>> widened_;  // per thread: one MX panel as bf16
};

}  // namespace mr
