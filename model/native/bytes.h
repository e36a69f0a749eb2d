// Products with weights of seven bits and inputs of eight, exact in integers: for guesses that somebody else checks.
// Half the bytes of bf16 and two to four times the products an instruction, at an error of about one part in a hundred
// of a typical output.
#pragma once

#include <cstdint>
#include <vector>

#include "gemm.h"
#include "matrix.h"
#include "pool.h"

namespace mr {

constexpr int kBytePanel = 32;  // outputs side by side, with four successive k each

// Per panel and four k: 32 outputs of 4 bytes, each 64 plus the rounded weight over its output's scale, in 1..127. A
// gated pair has 16 gates and their 16 ups in a panel.
struct ByteMatrix {
    int n = 0, k = 0, panels = 0;  // n: outputs, or gates
    bool glu = false;
    size_t panel_bytes = 0;
    const uint8_t* data = nullptr;
    std::vector<float> scale;  // [panels * kBytePanel]

    int panel_outputs() const { return glu ? kBytePanel / 2 : kBytePanel; }
};

// From stored matrices of fp32 or bf16, joined along outputs or as gate and up.
ByteMatrix pack_bytes(Arena& arena, const Source* parts, int num_parts, Join join);

// Rows rounded to -127..127 of their largest: [rows][padded k] and what undoes it.
struct ByteRows {
    std::vector<int8_t> data;
    std::vector<float> scale;
    std::vector<int32_t> offset;  // 64 times the sum of a row
    int stride = 0;

    void round(const float* a, ptrdiff_t lda, const int32_t* rows, int m, int k);
};

// c[m] = w a[m], c[m] += w a[m], or the gated unit of w a[m]; a row that was not finite gives NaN.
struct ByteJob {
    const ByteMatrix* w;
    const ByteRows* a;
    int m;
    float* c;
    ptrdiff_t ldc;
    Finish finish = Finish::kStore;  // or kAdd, or kGlu
    Activation act{};
};

void multiply_panels(const ByteJob& job, int panel0, int panel1);  // on the calling thread

}  // namespace mr
