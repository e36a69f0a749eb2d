#include "bytes.h"

#include <cmath>

#include "rows.h"

namespace mr {
namespace {

constexpr int kZero = 64;  // a weight of 0
constexpr int kMostRows = 3;  // at once: more, and the compiler spills

float stored(const Source& s, int row, int col) {
    const int64_t at = row * s.row_stride + col * s.col_stride;
    return Kind(s.kind) == Kind::kF32 ? static_cast<const float*>(s.data)[at]
                                      : bf16_to_float(static_cast<const uint16_t*>(s.data)[at]);
}

// R rows times one panel: sums[r][output]. Pairs of products stay below 2^15 and never saturate: 127 * 127 * 2.
#if defined(MR_AVX2) || defined(MR_AVX512)
template <int R>
void panel_sums(const uint8_t* w, const int8_t* const* a, int k4, int32_t (*sums)[kBytePanel]) {
    constexpr int P = 2;  // registers of outputs at once
    const __m256i ones = _mm256_set1_epi16(1);
    for (int part = 0; part < 4; part += P, w += P * 4 * kByteLanes) {
        __m256i acc[R][P];
#pragma GCC unroll 8
        for (int i = 0; i < R * P; ++i) acc[i / P][i % P] = _mm256_setzero_si256();
        const uint8_t* at = w;
        for (int q = 0; q < k4; ++q, at += 4 * kBytePanel) {
            __builtin_prefetch(at + 2048);
#pragma GCC unroll 3
            for (int r = 0; r < R; ++r) {
                int32_t four;
                std::memcpy(&four, a[r] + 4 * q, 4);
                const __m256i x = _mm256_set1_epi32(four);
#pragma GCC unroll 2
                for (int i = 0; i < P; ++i) {
                    const __m256i weights = _mm256_loadu_si256((const __m256i*)(at + i * 4 * kByteLanes));
                    const __m256i pairs = _mm256_maddubs_epi16(weights, x);
                    acc[r][i] = _mm256_add_epi32(acc[r][i], _mm256_madd_epi16(pairs, ones));
                }
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < R * P; ++i)
            _mm256_storeu_si256((__m256i*)(sums[i / P] + (part + i % P) * kByteLanes), acc[i / P][i % P]);
    }
}
#else
template <int R>
void panel_sums(const uint8_t* w, const int8_t* const* a, int k4, int32_t (*sums)[kBytePanel]) {
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < kBytePanel; ++j) {
            sums[r][j] = 0;
            for (int q = 0; q < k4; ++q)
                for (int i = 0; i < 4; ++i) sums[r][j] += w[(q * kBytePanel + j) * 4 + i] * a[r][4 * q + i];
        }
}
#endif

template <int R>
void panel(const ByteMatrix& w, const ByteRows& a, int row0, int p, float* c, ptrdiff_t ldc, bool add) {
    const int8_t* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = a.data.data() + ptrdiff_t(row0 + r) * a.stride;
    alignas(32) int32_t sums[R][kBytePanel];
    panel_sums<R>(w.data + size_t(p) * w.panel_bytes, rows, a.stride / 4, sums);
    const int first = p * kBytePanel, count = min_int(kBytePanel, w.n - first);
    for (int r = 0; r < R; ++r) {
        float* to = c + ptrdiff_t(row0 + r) * ldc + first;
        const I offset = set1_i(a.offset[size_t(row0 + r)]);
        const V scale = set1(a.scale[size_t(row0 + r)]);
        for (int j = 0; j < count; j += kLanes) {
            const int n = min_int(kLanes, count - j);
            V x = mul(to_float(sub_i(load_i(sums[r] + j), offset)), mul(scale, load(w.scale.data() + first + j)));
            if (n == kLanes) {
                store(to + j, add ? mr::add(x, load(to + j)) : x);
            } else {
                store_n(to + j, add ? mr::add(x, load_n(to + j, n)) : x, n);
            }
        }
    }
}

}  // namespace

ByteMatrix pack_bytes(Arena& arena, const Source& source) {
    ByteMatrix m;
    m.n = source.rows, m.k = source.cols;
    m.panels = (m.n + kBytePanel - 1) / kBytePanel;
    const int k4 = (m.k + 3) / 4;
    m.panel_bytes = size_t(k4) * 4 * kBytePanel;
    m.scale.assign(size_t(m.panels) * kBytePanel, 0.0f);
    uint8_t* out = arena.take(m.panel_bytes * size_t(m.panels));
    m.data = out;
    std::memset(out, kZero, m.panel_bytes * size_t(m.panels));
    for (int row = 0; row < m.n; ++row) {
        float largest = 0, lost = 0;  // lost: 0, or NaN where a weight is not finite
        for (int c = 0; c < m.k; ++c) {
            const float x = stored(source, row, c);
            largest = std::fmax(largest, std::fabs(x)), lost += x - x;
        }
        const float scale = m.scale[size_t(row)] = largest / float(kZero - 1) + lost;
        if (!(scale > 0)) continue;
        uint8_t* to = out + size_t(row / kBytePanel) * m.panel_bytes + size_t(row % kBytePanel) * 4;
        for (int c = 0; c < m.k; ++c)
            to[c / 4 * 4 * kBytePanel + c % 4] = uint8_t(kZero + int(std::lround(stored(source, row, c) / scale)));
    }
    return m;
}

void ByteRows::round(const float* a, ptrdiff_t lda, const int32_t* rows, int m, int k) {
    stride = (k + 3) / 4 * 4;
    data.assign(size_t(m) * size_t(stride), 0);
    scale.resize(size_t(m)), offset.resize(size_t(m));
    for (int r = 0; r < m; ++r) {
        const float* x = a + ptrdiff_t(rows ? rows[r] : r) * lda;
        F16 top = zero16(), rest = zero16();
        each16(k, [&](int i, int lanes, int) {
            const F16 v = load16_n(x + i, lanes);
            top = max(max(top, v), sub(zero16(), v));
            rest = add(rest, sub(v, v));  // 0 or NaN
        });
        const float largest = max16(top), lost = sum16(rest);
        scale[size_t(r)] = largest / 127.0f + lost;
        const float inverse = largest > 0 && lost == 0.0f ? 127.0f / largest : 0.0f;
        int8_t* to = data.data() + ptrdiff_t(r) * stride;
        int32_t sum = 0;
        for (int i = 0; i < k; ++i) {
            const int v = inverse > 0 ? int(std::lrintf(x[i] * inverse)) : 0;
            to[i] = int8_t(v), sum += v;
        }
        offset[size_t(r)] = kZero * sum;
    }
}

void multiply(Pool& pool, const ByteMatrix& w, const ByteRows& a, int m, float* c, ptrdiff_t ldc, bool add) {
    const int per_task = pool.threads() == 1 ? w.panels : 16;
    pool.run((w.panels + per_task - 1) / per_task, [&](int task, int) {
        for (int p = task * per_task; p < min_int(w.panels, (task + 1) * per_task); ++p)
            for (int r = 0, left = (m + kMostRows - 1) / kMostRows; r < m; --left) {
                const int rows = (m - r + left - 1) / left;
                if (rows == 1) panel<1>(w, a, r, p, c, ldc, add);
                else if (rows == 2) panel<2>(w, a, r, p, c, ldc, add);
                else panel<3>(w, a, r, p, c, ldc, add);
                r += rows;
            }
    });
}

}  // namespace mr
