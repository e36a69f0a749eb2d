// A weight matrix [n, k] packed for streaming: panels of 2*kLanes output columns, each panel contiguous along k.
//
//   f32   per k: 2*kLanes floats
//   bf16  per k: kLanes words, low half = column j, high half = column j + kLanes
//   mx    per group of 32 k: 2*kLanes scale exponents, then 8 quads; a quad is 4*kLanes bytes holding 4 k of every
//         column as E2M1 codes (see mx.h for their order)
//
// A gated (GLU) matrix pairs gate row j with up row j in one panel, so that one kernel call yields both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace mr {

enum class Kind : int { kF32 = 0, kBf16 = 1, kMx = 2 };
enum class Join : int { kRows = 0, kColumns = 1, kGlu = 2 };

constexpr int kPanel = 2 * kLanes;
constexpr int kMxGroup = 32;
constexpr int kMxQuads = kMxGroup / 4;
constexpr int kMxGroupBytes = kPanel + kMxQuads * 4 * kLanes;

// Where packed bytes live: a few large, huge-page friendly chunks.
class Arena {
public:
    Arena() = default;
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    uint8_t* take(size_t bytes);  // 64-byte aligned; lives as long as the arena
    size_t bytes() const { return bytes_; }

private:
    std::vector<uint8_t*> chunks_;
    size_t used_ = 0, capacity_ = 0, bytes_ = 0;
};

// One stored tensor or a part of it. Element (r, c) is at r*row_stride + c*col_stride; kMx is row-major, packed two
// codes a byte, low nibble first, with one scale exponent per 32 columns.
struct Source {
    const void* data;
    const uint8_t* scale;
    int32_t kind;
    int32_t rows, cols;
    int64_t row_stride, col_stride;
};

struct Matrix {
    Kind kind = Kind::kF32;
    bool glu = false;
    int n = 0;       // outputs: rows, or gate rows of a GLU pair
    int k = 0;
    int panels = 0;
    size_t panel_bytes = 0;
    const uint8_t* data = nullptr;

    const uint8_t* panel(int p) const { return data + size_t(p) * panel_bytes; }
    int panel_outputs() const { return glu ? kLanes : kPanel; }
};

// Join the parts along outputs, along inputs, or as gate and up. Kinds that differ are widened to f32, which is
// exact. MX parts stay MX unless joined along inputs or holding an exponent of 0 or 255, which the fast decoder
// cannot express; then, and where `widen` asks for it, they are widened to bf16, exactly.
Matrix pack(Arena& arena, const Source* parts, int num_parts, Join join, bool widen = false);

// Element (output row, column) of a packed matrix, as the kernels see it; for tests. A GLU matrix has gate rows
// first, then up rows.
float unpack_one(const Matrix& m, int row, int col);

}  // namespace mr
