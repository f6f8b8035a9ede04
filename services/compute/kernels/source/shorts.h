// Registers of int16, in addition to the registers of floats, for codes of int8: a register of 2 * WIDTH int16, sums of products of pairs of
// neighbours in WIDTH int32. Integer sums are exact, so their order does not matter.
#pragma once

#include "common.h"

#if defined(__AVX512F__)

typedef __m512i shorts;
typedef __m512i sums;

INLINE shorts load_shorts(const int16_t *x) { return _mm512_loadu_si512(x); }

INLINE void store_shorts(int16_t *y, shorts x) { _mm512_storeu_si512(y, x); }

INLINE shorts load_codes(const int8_t *x) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)x)); }

// Pairs of a code of a and the code of b at the same place, for 32 places.
INLINE void zip_codes(const int8_t *a, const int8_t *b, shorts y[2]) {
    __m256i first = _mm256_loadu_si256((const __m256i *)a), second = _mm256_loadu_si256((const __m256i *)b);
    __m256i low = _mm256_unpacklo_epi8(first, second), high = _mm256_unpackhi_epi8(first, second); // of each 128 bits
    y[0] = _mm512_cvtepi8_epi16(_mm256_permute2x128_si256(low, high, 0x20));
    y[1] = _mm512_cvtepi8_epi16(_mm256_permute2x128_si256(low, high, 0x31));
}

INLINE shorts spread_shorts(const int16_t *x) { // the same pair in every place
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return _mm512_set1_epi32(pair);
}

INLINE sums no_sums(void) { return _mm512_setzero_si512(); }

INLINE vec floats_of(sums x) { return _mm512_cvtepi32_ps(x); }

INLINE vec totals_of_sums(const sums x[WIDTH]) { // total of each, rounded once
    __m512i a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++)
        b[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0x88), _mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0xDD));
    return floats_of(_mm512_add_epi32(_mm512_shuffle_i32x4(c[0], c[1], 0x88), _mm512_shuffle_i32x4(c[0], c[1], 0xDD)));
}

// Rounds to nearest, ties to even.
INLINE void store_rounded(int16_t *y, vec x) { _mm256_storeu_si256((__m256i *)y, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x))); }

INLINE void store_codes(int8_t *y, vec x) { _mm_storeu_si128((__m128i *)y, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x))); }

#elif defined(__AVX2__)

typedef __m256i shorts;
typedef __m256i sums;

INLINE shorts load_shorts(const int16_t *x) { return _mm256_loadu_si256((const __m256i *)x); }

INLINE void store_shorts(int16_t *y, shorts x) { _mm256_storeu_si256((__m256i *)y, x); }

INLINE shorts load_codes(const int8_t *x) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)x)); }

// Pairs of a code of a and the code of b at the same place, for 16 places.
INLINE void zip_codes(const int8_t *a, const int8_t *b, shorts y[2]) {
    __m128i first = _mm_loadu_si128((const __m128i *)a), second = _mm_loadu_si128((const __m128i *)b);
    y[0] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second));
    y[1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(first, second));
}

INLINE shorts spread_shorts(const int16_t *x) { // the same pair in every place
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return _mm256_set1_epi32(pair);
}

INLINE sums no_sums(void) { return _mm256_setzero_si256(); }

INLINE vec floats_of(sums x) { return _mm256_cvtepi32_ps(x); }

INLINE vec totals_of_sums(const sums x[WIDTH]) { // total of each, rounded once
    __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
    __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(x[4], x[5]), _mm256_hadd_epi32(x[6], x[7]));
    return floats_of(_mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31)));
}

// Rounds to nearest, ties to even.
INLINE __m128i round_short(vec x) {
    __m256i whole = _mm256_cvtps_epi32(x);
    return _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
}

INLINE void store_rounded(int16_t *y, vec x) { _mm_storeu_si128((__m128i *)y, round_short(x)); }

INLINE void store_codes(int8_t *y, vec x) { _mm_storel_epi64((__m128i *)y, _mm_packs_epi16(round_short(x), _mm_setzero_si128())); }

#else

typedef int16x8_t shorts;
typedef int32x4_t sums;

INLINE shorts load_shorts(const int16_t *x) { return vld1q_s16(x); }

INLINE void store_shorts(int16_t *y, shorts x) { vst1q_s16(y, x); }

INLINE shorts load_codes(const int8_t *x) { return vmovl_s8(vld1_s8(x)); }

// Pairs of a code of a and the code of b at the same place, for 8 places.
INLINE void zip_codes(const int8_t *a, const int8_t *b, shorts y[2]) {
    int8x8_t first = vld1_s8(a), second = vld1_s8(b);
    y[0] = vmovl_s8(vzip1_s8(first, second));
    y[1] = vmovl_s8(vzip2_s8(first, second));
}

INLINE shorts spread_shorts(const int16_t *x) { // the same pair in every place
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return vreinterpretq_s16_s32(vdupq_n_s32(pair));
}

INLINE sums no_sums(void) { return vdupq_n_s32(0); }

INLINE vec floats_of(sums x) { return vcvtq_f32_s32(x); }

INLINE vec totals_of_sums(const sums x[WIDTH]) { // total of each, rounded once
    return floats_of(vpaddq_s32(vpaddq_s32(x[0], x[1]), vpaddq_s32(x[2], x[3])));
}

// Rounds to nearest, ties to even.
INLINE void store_rounded(int16_t *y, vec x) { vst1_s16(y, vqmovn_s32(vcvtnq_s32_f32(x))); }

INLINE void store_codes(int8_t *y, vec x) {
    int16x4_t whole = vqmovn_s32(vcvtnq_s32_f32(x));
    int8x8_t codes = vqmovn_s16(vcombine_s16(whole, whole));
    memcpy(y, &codes, WIDTH);
}

#endif

INLINE sums add_products(shorts a, shorts b, sums c) { return add_dots_of((sums)a, (sums)b, c); }
