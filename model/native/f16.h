// Sixteen lanes as one value, on every machine.
#pragma once

#include "simd.h"

namespace mr {

constexpr int kRegs = 16 / kLanes;
struct F16 { V r[kRegs]; };

#define MR_EACH(expr) F16 o; _Pragma("GCC unroll 4") for (int i = 0; i < kRegs; ++i) o.r[i] = (expr); return o
MR_INLINE F16 zero16() { MR_EACH(zero()); }
MR_INLINE F16 set16(float x) { MR_EACH(set1(x)); }
MR_INLINE F16 load16(const float* p) { MR_EACH(load(p + i * kLanes)); }
MR_INLINE F16 fma(F16 a, F16 b, F16 c) { MR_EACH(fma(a.r[i], b.r[i], c.r[i])); }
MR_INLINE F16 add(F16 a, F16 b) { MR_EACH(add(a.r[i], b.r[i])); }
MR_INLINE F16 sub(F16 a, F16 b) { MR_EACH(sub(a.r[i], b.r[i])); }
MR_INLINE F16 mul(F16 a, F16 b) { MR_EACH(mul(a.r[i], b.r[i])); }
MR_INLINE F16 max(F16 a, F16 b) { MR_EACH(max(a.r[i], b.r[i])); }
#undef MR_EACH

MR_INLINE void store16(float* p, F16 a) {
    for (int i = 0; i < kRegs; ++i) store(p + i * kLanes, a.r[i]);
}

// The first n of 16 floats, the rest zero; memory past n is not touched.
MR_INLINE F16 load16_n(const float* p, int n) {
    if (n >= 16) return load16(p);
    F16 o;
    for (int i = 0; i < kRegs; ++i) {
        const int rest = n - i * kLanes;
        o.r[i] = rest >= kLanes ? load(p + i * kLanes) : rest > 0 ? load_n(p + i * kLanes, rest) : zero();
    }
    return o;
}

MR_INLINE void store16_n(float* p, F16 a, int n) {
    if (n >= 16) return store16(p, a);
    for (int i = 0; i < kRegs; ++i) {
        const int rest = n - i * kLanes;
        if (rest >= kLanes) store(p + i * kLanes, a.r[i]);
        else if (rest > 0) store_n(p + i * kLanes, a.r[i], rest);
    }
}

#if defined(MR_AVX512) || defined(MR_AVX2)
MR_INLINE __m256 fold8(F16 a) {  // lanes i and i + 8
#if defined(MR_AVX512)
    return _mm256_add_ps(_mm512_castps512_ps256(a.r[0].v), _mm512_extractf32x8_ps(a.r[0].v, 1));
#else
    return _mm256_add_ps(a.r[0].v, a.r[1].v);
#endif
}

// The one order of a sum over lanes: i with i+8, then i+4, i+2, i+1.
MR_INLINE float sum16(F16 a) {
    const __m256 x = fold8(a);
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

// sum16 of four values at once, the same additions in the same order. Blends where they can stand for shuffles:
// those have more ports.
MR_INLINE void sum16x4(F16 a, F16 b, F16 c, F16 d, float* out) {
    const __m256 fa = fold8(a), fb = fold8(b), fc = fold8(c), fd = fold8(d);
    const __m256 ac = _mm256_add_ps(_mm256_blend_ps(fa, fc, 0xF0), _mm256_permute2f128_ps(fa, fc, 0x21));
    const __m256 bd = _mm256_add_ps(_mm256_blend_ps(fb, fd, 0xF0), _mm256_permute2f128_ps(fb, fd, 0x21));
    const __m256d x = _mm256_castps_pd(ac), y = _mm256_castps_pd(bd);  // a....c... , b....d...
    const __m256 pairs = _mm256_add_ps(_mm256_castpd_ps(_mm256_blend_pd(x, y, 0xA)),
                                       _mm256_castpd_ps(_mm256_shuffle_pd(x, y, 0x5)));  // a.b. | c.d.
    const __m256 sums = _mm256_add_ps(pairs, _mm256_movehdup_ps(pairs));
    const __m128 low = _mm256_castps256_ps128(sums), high = _mm256_extractf128_ps(sums, 1);
    _mm_storeu_ps(out, _mm_shuffle_ps(low, high, 0x88));
}
#else
MR_INLINE float sum16(F16 a) {
    float x[16];
    store16(x, a);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; ++i) x[i] += x[i + step];
    return x[0];
}

MR_INLINE void sum16x4(F16 a, F16 b, F16 c, F16 d, float* out) {
    out[0] = sum16(a), out[1] = sum16(b), out[2] = sum16(c), out[3] = sum16(d);
}
#endif

// The largest lane; which order finds it does not matter.
MR_INLINE float max16(F16 a) {
    V m = a.r[0];
    for (int i = 1; i < kRegs; ++i) m = max(m, a.r[i]);
    float x[kLanes];
    store(x, m);
#pragma GCC unroll 4
    for (int step = kLanes / 2; step; step /= 2)
        for (int i = 0; i < step; ++i) x[i] = x[i] < x[i + step] ? x[i + step] : x[i];
    return x[0];
}

}  // namespace mr
