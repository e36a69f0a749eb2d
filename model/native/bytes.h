// Products with weights of seven bits and inputs of eight, exact in integers: for guesses that somebody else checks.
// Half the bytes of bf16 and twice the products an instruction, at an error of about one part in a hundred of a
// typical output.
#pragma once

#include <cstdint>
#include <vector>

#include "matrix.h"
#include "pool.h"

namespace mr {

constexpr int kByteLanes = 8;  // outputs of one register: four successive k each
constexpr int kBytePanel = 4 * kByteLanes;

// Per panel and four k: 32 outputs of 4 bytes, each 64 plus the rounded weight over its output's scale, in 1..127.
struct ByteMatrix {
    int n = 0, k = 0, panels = 0;
    size_t panel_bytes = 0;
    const uint8_t* data = nullptr;
    std::vector<float> scale;  // [panels * kBytePanel]
};

// From a stored [n, k] matrix of fp32 or bf16.
ByteMatrix pack_bytes(Arena& arena, const Source& source);

// Rows rounded to -127..127 of their largest: [rows][padded k] and what undoes it.
struct ByteRows {
    std::vector<int8_t> data;
    std::vector<float> scale;
    std::vector<int32_t> offset;  // 64 times the sum of a row
    int stride = 0;

    void round(const float* a, ptrdiff_t lda, const int32_t* rows, int m, int k);
};

// c[m] = w a[m], or c[m] += w a[m]; a row that was not finite gives NaN.
void multiply(Pool& pool, const ByteMatrix& w, const ByteRows& a, int m, float* c, ptrdiff_t ldc, bool add);

}  // namespace mr
