#include "attend.h"

#include <type_traits>

namespace mr {
namespace {

// Adds one register of the products q_r * row_j to each sum.
template <int R, int J, class LoadRow>
MR_INLINE void dot_step(const float* q, ptrdiff_t q_stride, const LoadRow& load_row, V (&sum)[R][J]) {
    V row[J];
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) {
        row[j] = load_row(j);
        pin(row[j]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        V x = load(q + r * q_stride);
        pin(x);
#pragma GCC unroll 8
        for (int j = 0; j < J; ++j) sum[r][j] = fma(x, row[j], sum[r][j]);
    }
}

// scores[r][j] = q_r . row_j over `width` floats for R queries and J rows; q is zero past `width`. Not inlined: the
// register allocator then keeps the sums where they belong.
template <int R, int J>
__attribute__((noinline)) void dots(const float* q, ptrdiff_t q_stride, const float* const* rows, int width,
                                    float* scores) {
    V sum[kRegs][R][J];
#pragma GCC unroll 4
    for (int i = 0; i < kRegs; ++i)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int j = 0; j < J; ++j) sum[i][r][j] = zero();
    int c = 0;
    for (; c + 16 <= width; c += 16)
#pragma GCC unroll 4
        for (int i = 0; i < kRegs; ++i)
            dot_step(q + c + i * kLanes, q_stride, [&](int j) { return load(rows[j] + c + i * kLanes); }, sum[i]);
    if (c < width)
#pragma GCC unroll 4
        for (int i = 0; i < kRegs; ++i) {
            const int rest = width - c - i * kLanes;
            if (rest <= 0) break;
            const int n = min_int(rest, kLanes);
            dot_step(q + c + i * kLanes, q_stride, [&](int j) { return load_n(rows[j] + c + i * kLanes, n); }, sum[i]);
        }
    const auto whole = [&](int k) {
        F16 s;
#pragma GCC unroll 4
        for (int i = 0; i < kRegs; ++i) s.r[i] = sum[i][k / J][k % J];
        return s;
    };
    constexpr int kLast = R * J - 1;
    float sums[R * J + 3];
#pragma GCC unroll 4
    for (int k = 0; k < R * J; k += 4)
        sum16x4(whole(k), whole(k + 1 < kLast ? k + 1 : kLast), whole(k + 2 < kLast ? k + 2 : kLast),
                whole(k + 3 < kLast ? k + 3 : kLast), sums + k);
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < J; ++j) scores[r * kTile + j] = sums[r * J + j];
}

// Calls f(std::integral_constant<R>, first) for runs of R = 3, 2 or 1 queries that cover them all.
template <class F>
MR_INLINE void each_run(int queries, const F& f) {
    int r = 0;
    for (; queries - r == 3 || queries - r > 4; r += 3) f(std::integral_constant<int, 3>{}, r);
    for (; queries - r >= 2; r += 2) f(std::integral_constant<int, 2>{}, r);
    if (r < queries) f(std::integral_constant<int, 1>{}, r);
}

}  // namespace

void tile_scores(const float* q, ptrdiff_t q_stride, int queries, const float* tile, ptrdiff_t tile_stride, int width,
                 int count, float* scores) {
    constexpr int kChunk = 16;  // rows that stay in the first-level cache while all queries pass
    for (int first = 0; first < count; first += kChunk)
        each_run(queries, [&](auto run, int r) {
            constexpr int R = run, J = (R == 1 ? 4 : 2) * (kLanes == 16 ? 2 : 1);
            for (int j = first; j < min_int(first + kChunk, count); j += J) {
                const float* rows[J];
                for (int i = 0; i < J; ++i) rows[i] = tile + ptrdiff_t(min_int(j + i, count - 1)) * tile_stride;
                dots<R, J>(q + r * q_stride, q_stride, rows, width, scores + r * kTile + j);
            }
        });
}

namespace {

// out_r = out_r * rescale_r + sum_j weights[r][j] * row_j, rows in ascending order, for N registers of columns.
template <int R, int N>
__attribute__((noinline)) void mix_columns(float* out, ptrdiff_t out_stride, const float* weights, const float* rescale,
                                           const float* tile, ptrdiff_t width, int count) {
    V acc[R][N];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) acc[r][i] = mul(load(out + r * out_stride + i * kLanes), set1(rescale[r]));
    for (int j = 0; j < count; ++j, tile += width) {
        V w[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) w[r] = set1(weights[r * kTile + j]);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            V x = load(tile + i * kLanes);
            pin(x);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) acc[r][i] = fma(w[r], x, acc[r][i]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) store(out + r * out_stride + i * kLanes, acc[r][i]);
}

void mix_tail(float* out, const float* weights, float rescale, const float* tile, ptrdiff_t width, int count, int n) {
    V acc = mul(load_n(out, n), set1(rescale));
    for (int j = 0; j < count; ++j) acc = fma(set1(weights[j]), load_n(tile + j * width, n), acc);
    store_n(out, acc, n);
}

}  // namespace

void tile_mix(float* out, ptrdiff_t out_stride, const Softmax& s, const float* tile, ptrdiff_t tile_stride, int count,
              int columns) {
    int c = 0;
    const auto run_columns = [&](auto registers) {
        constexpr int N = registers;
        for (; c + N * kLanes <= columns; c += N * kLanes)
            each_run(s.queries, [&](auto run, int r) {
                mix_columns<run, N>(out + r * out_stride + c, out_stride, s.scores + r * kTile, s.rescale + r, tile + c,
                                    tile_stride, count);
            });
    };
    run_columns(std::integral_constant<int, 4>{});
    run_columns(std::integral_constant<int, 1>{});
    if (c < columns)
        for (int r = 0; r < s.queries; ++r)
            mix_tail(out + r * out_stride + c, s.scores + r * kTile, s.rescale[r], tile + c, tile_stride, count, columns - c);
}

}  // namespace mr
