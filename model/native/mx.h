// MXFP4: E2M1 codes with one power-of-two scale per 32 inputs, widened exactly to fp32 in the register.
//
// A quad holds 4 successive k of one panel in 4*kLanes bytes. Byte b carries two codes: its low nibble belongs to k 0
// or 1, its high nibble to k 2 or 3. Within each 16-byte run l, bytes 0-7 belong to k 0 (2), bytes 8-15 to k 1 (3);
// byte 2i + h is column 4l + i + h*kLanes. That is the order in which byte shuffles and unpacks of 128-bit lanes
// yield bf16 pairs (column j, column j + kLanes) in 32-bit words, the same words as a bf16 panel.
#pragma once

#include "matrix.h"

namespace mr {

// The two bytes of each code's bf16 value: 0 .5 1 1.5 2 3 4 6, then the same negative.
alignas(16) inline const uint8_t kMxHigh[16] = {0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                                0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};
alignas(16) inline const uint8_t kMxLow[16] = {0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0,
                                               0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0};

// Byte and shift of the code of (k in 0..3, column in 0..kPanel-1) inside a quad.
struct MxPlace { int byte, shift; };
inline MxPlace mx_place(int k, int column) {
    const int half = column / kLanes, j = column % kLanes;
    return {(j / 4) * 16 + (k % 2) * 8 + (j % 4) * 2 + half, (k / 2) * 4};
}

inline uint16_t mx_bf16(int code) { return uint16_t(kMxHigh[code] << 8 | kMxLow[code]); }

// words[k]: the unscaled values of k as bf16 pairs.
#if defined(MR_AVX512)
MR_INLINE void mx_quad(const uint8_t* p, I words[4]) {
    const __m512i nibble = _mm512_set1_epi8(0x0F), bytes = _mm512_loadu_si512(p);
    const __m512i high = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kMxHigh));
    const __m512i low = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kMxLow));
    const __m512i a = _mm512_and_si512(bytes, nibble);
    const __m512i b = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
    const __m512i ah = _mm512_shuffle_epi8(high, a), al = _mm512_shuffle_epi8(low, a);
    const __m512i bh = _mm512_shuffle_epi8(high, b), bl = _mm512_shuffle_epi8(low, b);
    words[0].v = _mm512_unpacklo_epi8(al, ah), words[1].v = _mm512_unpackhi_epi8(al, ah);
    words[2].v = _mm512_unpacklo_epi8(bl, bh), words[3].v = _mm512_unpackhi_epi8(bl, bh);
}
#elif defined(MR_AVX2)
MR_INLINE void mx_quad(const uint8_t* p, I words[4]) {
    const __m256i nibble = _mm256_set1_epi8(0x0F), bytes = _mm256_loadu_si256((const __m256i*)p);
    const __m256i high = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kMxHigh));
    const __m256i low = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kMxLow));
    const __m256i a = _mm256_and_si256(bytes, nibble);
    const __m256i b = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
    const __m256i ah = _mm256_shuffle_epi8(high, a), al = _mm256_shuffle_epi8(low, a);
    const __m256i bh = _mm256_shuffle_epi8(high, b), bl = _mm256_shuffle_epi8(low, b);
    words[0].v = _mm256_unpacklo_epi8(al, ah), words[1].v = _mm256_unpackhi_epi8(al, ah);
    words[2].v = _mm256_unpacklo_epi8(bl, bh), words[3].v = _mm256_unpackhi_epi8(bl, bh);
}
#else
inline void mx_quad(const uint8_t* p, I words[4]) {
    for (int k = 0; k < 4; ++k)
        for (int j = 0; j < kLanes; ++j) {
            const MxPlace lo = mx_place(k, j), hi = mx_place(k, j + kLanes);
            const uint32_t a = mx_bf16(p[lo.byte] >> lo.shift & 15), b = mx_bf16(p[hi.byte] >> hi.shift & 15);
            words[k].v[j] = int32_t(b << 16 | a);
        }
}
#endif

// A scale exponent e in 1..254 is the float 2^(e-127).
MR_INLINE V mx_scale(const uint8_t* e) { return as_float(shl<23>(load_u8(e))); }

// Widen one MX panel of k columns into a bf16 panel, exactly.
inline void mx_to_bf16(const uint8_t* src, int k, uint8_t* dst) {
    for (int g = 0; g < k / kMxGroup; ++g, src += kMxGroupBytes) {
        const V scale_low = mx_scale(src), scale_high = mx_scale(src + kLanes);
        for (int q = 0; q < kMxQuads; ++q) {
            I words[4];
            mx_quad(src + kPanel + q * 4 * kLanes, words);
            for (int i = 0; i < 4; ++i, dst += 4 * kLanes) {
                const I low = as_int(mul(low_bf16(words[i]), scale_low));
                const I high = as_int(mul(high_bf16(words[i]), scale_high));
                store_i(dst, or_i(shr<16>(low), and_i(high, set1_i(int32_t(0xFFFF0000u)))));
            }
        }
    }
}

}  // namespace mr
