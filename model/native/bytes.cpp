#include "bytes.h"

#include <cmath>
#include <stdexcept>

#include "rows.h"

#if defined(MR_AVX512) && defined(__AVX512VNNI__)
#define MR_VNNI 1
#endif

namespace mr {
namespace {

constexpr int kZero = 64;  // a weight of 0
constexpr int kParts = kBytePanel / kLanes;

float stored(const Source& s, int row, int col) {
    const int64_t at = row * s.row_stride + col * s.col_stride;
    return Kind(s.kind) == Kind::kF32 ? static_cast<const float*>(s.data)[at]
                                      : bf16_to_float(static_cast<const uint16_t*>(s.data)[at]);
}

// R rows times P panels: sums[r][panel][register]. The integers are the same whatever computes them: pairs of products
// stay below 2^15 (127 * 127 * 2), so that nothing saturates.
#if defined(MR_VNNI)

constexpr int kMostRows = 8;  // at once: more, and sums, weights and inputs no longer fit into the registers

template <int R, int P>
MR_INLINE void panel_sums(const uint8_t* w, size_t panel_bytes, const int8_t* const* a, int k4, I (&sums)[R][P][kParts]) {
#pragma GCC unroll 16
    for (int i = 0; i < R * P * kParts; ++i) sums[i / (P * kParts)][i / kParts % P][i % kParts] = set1_i(0);
#pragma GCC unroll 2
    for (int q = 0; q < k4; ++q, w += 4 * kBytePanel) {
        I weights[P][kParts];
#pragma GCC unroll 4
        for (int i = 0; i < P * kParts; ++i) {
            const uint8_t* at = w + size_t(i / kParts) * panel_bytes + i % kParts * 4 * kLanes;
            __builtin_prefetch(at + 2048);
            weights[i / kParts][i % kParts] = load_i(at);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            int32_t four;
            std::memcpy(&four, a[r] + 4 * q, 4);
            const __m512i x = _mm512_set1_epi32(four);
#pragma GCC unroll 4
            for (int i = 0; i < P * kParts; ++i) {
                I& sum = sums[r][i / kParts][i % kParts];
                sum.v = _mm512_dpbusd_epi32(sum.v, weights[i / kParts][i % kParts].v, x);
            }
        }
    }
}

#elif defined(MR_AVX2) || defined(MR_AVX512)

constexpr int kMostRows = 3;

template <int R, int P>
MR_INLINE void panel_sums(const uint8_t* w, size_t panel_bytes, const int8_t* const* a, int k4, I (&sums)[R][P][kParts]) {
    constexpr int kHalf = 2;  // registers of eight outputs at once
    const __m256i ones = _mm256_set1_epi16(1);
    for (int part = 0; part < P * 4; part += kHalf) {
        __m256i acc[R][kHalf];
#pragma GCC unroll 8
        for (int i = 0; i < R * kHalf; ++i) acc[i / kHalf][i % kHalf] = _mm256_setzero_si256();
        const uint8_t* at = w + size_t(part / 4) * panel_bytes + part % 4 * 32;
        for (int q = 0; q < k4; ++q, at += 4 * kBytePanel) {
            __builtin_prefetch(at + 2048);
#pragma GCC unroll 3
            for (int r = 0; r < R; ++r) {
                int32_t four;
                std::memcpy(&four, a[r] + 4 * q, 4);
                const __m256i x = _mm256_set1_epi32(four);
#pragma GCC unroll 2
                for (int i = 0; i < kHalf; ++i) {
                    const __m256i weights = _mm256_loadu_si256((const __m256i*)(at + i * 32));
                    const __m256i pairs = _mm256_maddubs_epi16(weights, x);
                    acc[r][i] = _mm256_add_epi32(acc[r][i], _mm256_madd_epi16(pairs, ones));
                }
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < R * kHalf; ++i)
            _mm256_storeu_si256((__m256i*)&sums[i / kHalf] + part + i % kHalf, acc[i / kHalf][i % kHalf]);
    }
}

#else

constexpr int kMostRows = 3;

template <int R, int P>
void panel_sums(const uint8_t* w, size_t panel_bytes, const int8_t* const* a, int k4, I (&sums)[R][P][kParts]) {
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < P * kBytePanel; ++j) {
            const uint8_t* at = w + size_t(j / kBytePanel) * panel_bytes + j % kBytePanel * 4;
            int32_t sum = 0;
            for (int q = 0; q < k4; ++q)
                for (int i = 0; i < 4; ++i) sum += at[q * 4 * kBytePanel + i] * a[r][4 * q + i];
            std::memcpy(reinterpret_cast<char*>(&sums[r]) + j * 4, &sum, 4);
        }
}

#endif

MR_INLINE V unscaled(I sum, I offset, V scale, const float* weight_scale) {
    return mul(to_float(sub_i(sum, offset)), mul(scale, load(weight_scale)));
}

template <int R, int P>
void panels(const ByteJob& job, int row0, int p) {
    const ByteMatrix& w = *job.w;
    const ByteRows& a = *job.a;
    const int8_t* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = a.data.data() + ptrdiff_t(row0 + r) * a.stride;
    alignas(64) I sums[R][P][kParts];
    panel_sums<R, P>(w.data + size_t(p) * w.panel_bytes, w.panel_bytes, rows, (w.k + 3) / 4, sums);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const I offset = set1_i(a.offset[size_t(row0 + r)]);
        const V scale = set1(a.scale[size_t(row0 + r)]);
#pragma GCC unroll 2
        for (int i = 0; i < P; ++i) {
            const int outputs = w.panel_outputs(), first = (p + i) * outputs;
            const float* weight_scale = w.scale.data() + (p + i) * kBytePanel;
            float* to = job.c + ptrdiff_t(row0 + r) * job.ldc + first;
#pragma GCC unroll 8
            for (int j = 0; j < kParts; ++j) {
                const int n = min_int(kLanes, min_int(outputs, w.n - first) - j * kLanes);
                if (n <= 0) break;
                V x = unscaled(sums[r][i][j], offset, scale, weight_scale + j * kLanes);
                if (w.glu)
                    x = gated(job.act, x, unscaled(sums[r][i][(j + kParts / 2) % kParts], offset, scale,
                                                   weight_scale + j * kLanes + kBytePanel / 2));
                float* at = to + j * kLanes;
                if (n == kLanes) store(at, job.finish == Finish::kAdd ? add(x, load(at)) : x);
                else store_n(at, job.finish == Finish::kAdd ? add(x, load_n(at, n)) : x, n);
            }
        }
    }
}

// All panels of [panel0, panel1) for one tile of rows; one or two rows alone have too few sums in flight.
template <int R>
void tile(const ByteJob& job, int row0, int panel0, int panel1) {
    int p = panel0;
    if constexpr (R <= 2)
        for (; p + 2 <= panel1; p += 2) panels<R, 2>(job, row0, p);
    for (; p < panel1; ++p) panels<R, 1>(job, row0, p);
}

void tile(const ByteJob& job, int rows, int row0, int panel0, int panel1) {
    switch (rows) {
        case 1: return tile<1>(job, row0, panel0, panel1);
        case 2: return tile<2>(job, row0, panel0, panel1);
        case 3: return tile<3>(job, row0, panel0, panel1);
#if defined(MR_VNNI)
        case 4: return tile<4>(job, row0, panel0, panel1);
        case 5: return tile<5>(job, row0, panel0, panel1);
        case 6: return tile<6>(job, row0, panel0, panel1);
        case 7: return tile<7>(job, row0, panel0, panel1);
        default: return tile<8>(job, row0, panel0, panel1);
#endif
    }
}

// The numbers of one register, each in -127..127, as bytes.
MR_INLINE void store_bytes(int8_t* to, I a) {
#if defined(MR_AVX512)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(a.v));
#elif defined(MR_AVX2)
    const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(pairs, pairs));
#else
    for (int i = 0; i < kLanes; ++i) to[i] = int8_t(a.v[i]);
#endif
}

void put_row(ByteMatrix& m, uint8_t* out, const Source& source, int row, int at) {
    float largest = 0, lost = 0;  // lost: 0, or NaN where a weight is not finite
    for (int c = 0; c < m.k; ++c) {
        const float x = stored(source, row, c);
        largest = std::fmax(largest, std::fabs(x)), lost += x - x;
    }
    const float scale = m.scale[size_t(at)] = largest / float(kZero - 1) + lost;
    if (!(scale > 0)) return;
    uint8_t* to = out + size_t(at / kBytePanel) * m.panel_bytes + size_t(at % kBytePanel) * 4;
    for (int c = 0; c < m.k; ++c)
        to[c / 4 * 4 * kBytePanel + c % 4] = uint8_t(kZero + int(std::lround(stored(source, row, c) / scale)));
}

}  // namespace

ByteMatrix pack_bytes(Arena& arena, const Source* parts, int num_parts, Join join) {
    ByteMatrix m;
    m.glu = join == Join::kGlu, m.k = parts[0].cols;
    for (int i = 0; i < num_parts; ++i) {
        if (parts[i].cols != m.k || join == Join::kColumns || (m.glu && (num_parts != 2 || parts[i].rows != parts[0].rows)))
            throw std::runtime_error("parts of a byte matrix do not fit together");
        m.n += parts[i].rows;
    }
    if (m.glu) m.n /= 2;
    m.panels = (m.n + m.panel_outputs() - 1) / m.panel_outputs();
    m.panel_bytes = size_t((m.k + 3) / 4) * 4 * kBytePanel;
    m.scale.assign(size_t(m.panels) * kBytePanel, 0.0f);
    uint8_t* out = arena.take(m.panel_bytes * size_t(m.panels));
    m.data = out;
    std::memset(out, kZero, m.panel_bytes * size_t(m.panels));
    for (int i = 0, first = 0; i < num_parts; first += parts[i].rows, ++i)
        for (int row = 0; row < parts[i].rows; ++row) {
            const int half = kBytePanel / 2;
            put_row(m, out, parts[i], row, m.glu ? row / half * kBytePanel + i * half + row % half : first + row);
        }
    return m;
}

void ByteRows::round(const float* a, ptrdiff_t lda, const int32_t* rows, int m, int k) {
    stride = round16(k);
    if (data.size() < size_t(m) * size_t(stride)) data.resize(size_t(m) * size_t(stride));
    if (scale.size() < size_t(m)) scale.resize(size_t(m)), offset.resize(size_t(m));
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
        int8_t* to = data.data() + ptrdiff_t(r) * stride;
        offset[size_t(r)] = 0;
        if (!(largest > 0 && largest <= 3e38f && lost == 0.0f)) {
            std::memset(to, 0, size_t(stride));
            continue;
        }
        const F16 factor = set16(127.0f / largest);
        I sum = set1_i(0);
        each16(k, [&](int i, int lanes, int) {
            const F16 v = mul(load16_n(x + i, lanes), factor);
            for (int j = 0; j < kRegs; ++j) {
                const I whole = to_int(v.r[j]);
                store_bytes(to + i + j * kLanes, whole);
                sum = add_i(sum, whole);
            }
        });
        int32_t lanes[kLanes];
        store_i(lanes, sum);
        for (int32_t lane : lanes) offset[size_t(r)] += kZero * lane;
    }
}

void multiply_panels(const ByteJob& job, int panel0, int panel1) {
    const auto pass = [&](int p0, int p1) {
        for (int r = 0, left = (job.m + kMostRows - 1) / kMostRows; r < job.m; --left) {
            const int rows = (job.m - r + left - 1) / left;
            tile(job, rows, r, p0, p1);
            r += rows;
        }
    };
    if (job.m <= kMostRows) return pass(panel0, panel1);
    for (int p = panel0; p < panel1; p += 2) pass(p, min_int(p + 2, panel1));
}

}  // namespace mr
