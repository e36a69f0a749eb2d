// Vectors. `V` is the machine's register (kLanes floats); `F16` is always 16 lanes, whatever the machine, so that
// every reduction has one order and results are the same bits on AVX2, AVX-512 and anything else. Contraction of
// a*b+c is off for the whole build; fused operations are only the explicit ones here.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if !defined(MR_GENERIC_LANES) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define MR_AVX512 1
#elif !defined(MR_GENERIC_LANES) && defined(__AVX2__) && defined(__FMA__)
#define MR_AVX2 1
#endif
#if defined(MR_AVX512) || defined(MR_AVX2)
#include <immintrin.h>
#endif

#define MR_INLINE inline __attribute__((always_inline))

namespace mr {

#if defined(MR_AVX512)

constexpr int kLanes = 16;
constexpr const char* kIsa = "avx512";
struct V { __m512 v; };
struct I { __m512i v; };

MR_INLINE V zero() { return {_mm512_setzero_ps()}; }
MR_INLINE V set1(float x) { return {_mm512_set1_ps(x)}; }
MR_INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
MR_INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
MR_INLINE V load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
MR_INLINE void store_n(float* p, V a, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), a.v); }
MR_INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
MR_INLINE V fnma(V a, V b, V c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
MR_INLINE V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
MR_INLINE V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
MR_INLINE V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
MR_INLINE V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
// max and min keep the second operand when the first is NaN, as the x86 instruction does.
MR_INLINE V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
MR_INLINE V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
MR_INLINE V round(V a) { return {_mm512_roundscale_ps(a.v, 8)}; }
MR_INLINE V abs(V a) { return {_mm512_abs_ps(a.v)}; }
MR_INLINE V less(V a, V b, V yes, V no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
MR_INLINE V copysign(V magnitude, V sign) {
    return {_mm512_or_ps(_mm512_abs_ps(magnitude.v), _mm512_and_ps(sign.v, _mm512_set1_ps(-0.0f)))};
}
MR_INLINE I load_i(const void* p) { return {_mm512_loadu_si512(p)}; }
MR_INLINE I to_int(V a) { return {_mm512_cvtps_epi32(a.v)}; }
MR_INLINE V to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
MR_INLINE V as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
MR_INLINE I as_int(V a) { return {_mm512_castps_si512(a.v)}; }
MR_INLINE I set1_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
MR_INLINE I add_i(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
MR_INLINE I sub_i(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
MR_INLINE I and_i(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
MR_INLINE I or_i(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N> MR_INLINE I shl(I a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> MR_INLINE I shr(I a) { return {_mm512_srli_epi32(a.v, N)}; }
MR_INLINE I load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
MR_INLINE void store_i(void* p, I a) { _mm512_storeu_si512(p, a.v); }

#elif defined(MR_AVX2)

constexpr int kLanes = 8;
constexpr const char* kIsa = "avx2";
struct V { __m256 v; };
struct I { __m256i v; };

alignas(32) inline const int32_t kMaskTable[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
MR_INLINE __m256i lane_mask(int n) { return _mm256_loadu_si256((const __m256i*)(kMaskTable + 8 - n)); }

MR_INLINE V zero() { return {_mm256_setzero_ps()}; }
MR_INLINE V set1(float x) { return {_mm256_set1_ps(x)}; }
MR_INLINE V load(const float* p) { return {_mm256_loadu_ps(p)}; }
MR_INLINE void store(float* p, V a) { _mm256_storeu_ps(p, a.v); }
MR_INLINE V load_n(const float* p, int n) { return {_mm256_maskload_ps(p, lane_mask(n))}; }
MR_INLINE void store_n(float* p, V a, int n) { _mm256_maskstore_ps(p, lane_mask(n), a.v); }
MR_INLINE V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
MR_INLINE V fnma(V a, V b, V c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
MR_INLINE V add(V a, V b) { return {_mm256_add_ps(a.v, b.v)}; }
MR_INLINE V sub(V a, V b) { return {_mm256_sub_ps(a.v, b.v)}; }
MR_INLINE V mul(V a, V b) { return {_mm256_mul_ps(a.v, b.v)}; }
MR_INLINE V div(V a, V b) { return {_mm256_div_ps(a.v, b.v)}; }
MR_INLINE V max(V a, V b) { return {_mm256_max_ps(a.v, b.v)}; }
MR_INLINE V min(V a, V b) { return {_mm256_min_ps(a.v, b.v)}; }
MR_INLINE V round(V a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
MR_INLINE V abs(V a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
MR_INLINE V less(V a, V b, V yes, V no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
MR_INLINE V copysign(V magnitude, V sign) {
    return {_mm256_or_ps(abs(magnitude).v, _mm256_and_ps(sign.v, _mm256_set1_ps(-0.0f)))};
}
MR_INLINE I load_i(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
MR_INLINE I to_int(V a) { return {_mm256_cvtps_epi32(a.v)}; }
MR_INLINE V to_float(I a) { return {_mm256_cvtepi32_ps(a.v)}; }
MR_INLINE V as_float(I a) { return {_mm256_castsi256_ps(a.v)}; }
MR_INLINE I as_int(V a) { return {_mm256_castps_si256(a.v)}; }
MR_INLINE I set1_i(int32_t x) { return {_mm256_set1_epi32(x)}; }
MR_INLINE I add_i(I a, I b) { return {_mm256_add_epi32(a.v, b.v)}; }
MR_INLINE I sub_i(I a, I b) { return {_mm256_sub_epi32(a.v, b.v)}; }
MR_INLINE I and_i(I a, I b) { return {_mm256_and_si256(a.v, b.v)}; }
MR_INLINE I or_i(I a, I b) { return {_mm256_or_si256(a.v, b.v)}; }
template <int N> MR_INLINE I shl(I a) { return {_mm256_slli_epi32(a.v, N)}; }
template <int N> MR_INLINE I shr(I a) { return {_mm256_srli_epi32(a.v, N)}; }
MR_INLINE I load_u8(const uint8_t* p) { return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))}; }
MR_INLINE void store_i(void* p, I a) { _mm256_storeu_si256((__m256i*)p, a.v); }

#else  // any machine: plain loops, which compilers turn into their own vectors where they can

#ifndef MR_GENERIC_LANES
#define MR_GENERIC_LANES 8
#endif
constexpr int kLanes = MR_GENERIC_LANES;
constexpr const char* kIsa = "generic";
struct V { float v[kLanes]; };
struct I { int32_t v[kLanes]; };
#define MR_EACH(T, expr) T r; for (int i = 0; i < kLanes; ++i) r.v[i] = (expr); return r

MR_INLINE V zero() { MR_EACH(V, 0.0f); }
MR_INLINE V set1(float x) { MR_EACH(V, x); }
MR_INLINE V load(const float* p) { MR_EACH(V, p[i]); }
MR_INLINE void store(float* p, V a) { for (int i = 0; i < kLanes; ++i) p[i] = a.v[i]; }
MR_INLINE V load_n(const float* p, int n) { MR_EACH(V, i < n ? p[i] : 0.0f); }
MR_INLINE void store_n(float* p, V a, int n) { for (int i = 0; i < n; ++i) p[i] = a.v[i]; }
MR_INLINE V fma(V a, V b, V c) { MR_EACH(V, __builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
MR_INLINE V fnma(V a, V b, V c) { MR_EACH(V, __builtin_fmaf(-a.v[i], b.v[i], c.v[i])); }
MR_INLINE V add(V a, V b) { MR_EACH(V, a.v[i] + b.v[i]); }
MR_INLINE V sub(V a, V b) { MR_EACH(V, a.v[i] - b.v[i]); }
MR_INLINE V mul(V a, V b) { MR_EACH(V, a.v[i] * b.v[i]); }
MR_INLINE V div(V a, V b) { MR_EACH(V, a.v[i] / b.v[i]); }
MR_INLINE V max(V a, V b) { MR_EACH(V, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
MR_INLINE V min(V a, V b) { MR_EACH(V, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
MR_INLINE V round(V a) { MR_EACH(V, std::nearbyintf(a.v[i])); }
MR_INLINE V abs(V a) { MR_EACH(V, std::fabs(a.v[i])); }
MR_INLINE V less(V a, V b, V yes, V no) { MR_EACH(V, a.v[i] < b.v[i] ? yes.v[i] : no.v[i]); }
MR_INLINE V copysign(V magnitude, V sign) { MR_EACH(V, std::copysign(magnitude.v[i], sign.v[i])); }
MR_INLINE I load_i(const void* p) { I r; std::memcpy(&r, p, sizeof r); return r; }
MR_INLINE int32_t to_int_one(float x) {  // what the x86 conversion answers, without undefined behaviour
    return std::fabs(x) < 2147483648.0f ? int32_t(std::nearbyintf(x)) : INT32_MIN;
}
MR_INLINE I to_int(V a) { MR_EACH(I, to_int_one(a.v[i])); }
MR_INLINE V to_float(I a) { MR_EACH(V, float(a.v[i])); }
MR_INLINE V as_float(I a) { V r; std::memcpy(&r, &a, sizeof r); return r; }
MR_INLINE I as_int(V a) { I r; std::memcpy(&r, &a, sizeof r); return r; }
MR_INLINE I set1_i(int32_t x) { MR_EACH(I, x); }
MR_INLINE I add_i(I a, I b) { MR_EACH(I, int32_t(uint32_t(a.v[i]) + uint32_t(b.v[i]))); }
MR_INLINE I sub_i(I a, I b) { MR_EACH(I, int32_t(uint32_t(a.v[i]) - uint32_t(b.v[i]))); }
MR_INLINE I and_i(I a, I b) { MR_EACH(I, a.v[i] & b.v[i]); }
MR_INLINE I or_i(I a, I b) { MR_EACH(I, a.v[i] | b.v[i]); }
template <int N> MR_INLINE I shl(I a) { MR_EACH(I, int32_t(uint32_t(a.v[i]) << N)); }
template <int N> MR_INLINE I shr(I a) { MR_EACH(I, int32_t(uint32_t(a.v[i]) >> N)); }
MR_INLINE I load_u8(const uint8_t* p) { MR_EACH(I, p[i]); }
MR_INLINE void store_i(void* p, I a) { std::memcpy(p, &a, sizeof a); }
#undef MR_EACH

#endif

static_assert(kLanes == 4 || kLanes == 8 || kLanes == 16, "F16 is built from whole registers");

MR_INLINE int min_int(int a, int b) { return a < b ? a : b; }

// Keeps a value in its register: compilers like to load it again for every use, and loads are what runs out first.
MR_INLINE void pin(V& a) {
#if defined(MR_AVX512)
    asm("" : "+v"(a.v));
#elif defined(MR_AVX2)
    asm("" : "+x"(a.v));
#else
    (void)a;
#endif
}

// sum += x * y in sum's own register, and a number in all lanes, loaded anew: a compiler that may choose keeps copies
// and spills the sums of a wide tile. The same operations as fma and set1.
MR_INLINE void fma_into(V& sum, V x, V y) {
#if defined(MR_AVX2)
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum.v) : "x"(x.v), "x"(y.v));
#else
    sum = fma(x, y, sum);
#endif
}

MR_INLINE V set1_anew(const float* p) {
#if defined(MR_AVX2)
    V x;
    asm volatile("vbroadcastss %1, %0" : "=x"(x.v) : "m"(*p));
    return x;
#else
    return set1(*p);
#endif
}

// A bf16 panel word holds two columns: the low half is column j, the high half column j + kLanes.
MR_INLINE V low_bf16(I w) { return as_float(shl<16>(w)); }
MR_INLINE V high_bf16(I w) { return as_float(and_i(w, set1_i(int32_t(0xFFFF0000u)))); }

MR_INLINE float bf16_to_float(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float r;
    std::memcpy(&r, &bits, 4);
    return r;
}

}  // namespace mr
