// Attention over one tile of rows with an online softmax: scores, weights, sums. Who sees which rows is the caller's.
#pragma once

#include <limits>

#include "rows.h"

namespace mr {

constexpr int kTile = 64;  // rows per softmax step
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The running softmax of one task's queries.
struct Softmax {
    float *scores, *maximum, *sum, *rescale;  // [queries][kTile], then [queries]
    int queries;

    // Turns scores into weights in place and sets what the output so far must be multiplied by. Of query r the first
    // visible(r) rows count.
    template <class Visible>
    void update(float scale, const Visible& visible) {
        const F16 factor = set16(scale);
        for (int r = 0; r < queries; ++r) {
            float* s = scores + r * kTile;
            const int n = visible(r);
            for (int j = n; j < kTile; ++j) s[j] = -kInfinity;
            F16 top = set16(maximum[r]);
            for (int j = 0; j < kTile; j += 16) {
                const F16 x = mul(load16(s + j), factor);
                store16(s + j, x);
                top = max(x, top);
            }
            const float now = max16(top);
            rescale[r] = maximum[r] - now, maximum[r] = now;
        }
        each16(queries, [&](int r, int lanes, int) { store16_n(rescale + r, exp(load16_n(rescale + r, lanes)), lanes); });
        for (int r = 0; r < queries; ++r) {
            float* s = scores + r * kTile;
            const F16 shift = set16(maximum[r]);
            F16 w[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) store16(s + i * 16, w[i] = exp(sub(load16(s + i * 16), shift)));
            sum[r] = sum[r] * rescale[r] + sum16(add(add(w[0], w[1]), add(w[2], w[3])));
        }
    }
};

// scores[r][j] = q_r . row_j over `width` floats, [queries][kTile]; row j is tile + j * tile_stride. q is zero past
// `width`, up to a multiple of 16.
void tile_scores(const float* q, ptrdiff_t q_stride, int queries, const float* tile, ptrdiff_t tile_stride, int width,
                 int count, float* scores);

// out_r = out_r * rescale_r + sum_j weights[r][j] * row_j over `columns` floats of each row, rows in ascending order.
void tile_mix(float* out, ptrdiff_t out_stride, const Softmax& s, const float* tile, ptrdiff_t tile_stride, int count,
              int columns);

}  // namespace mr
