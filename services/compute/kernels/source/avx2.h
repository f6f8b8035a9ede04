// Number formats and vector maths for registers of 8 floats (AVX2).
#pragma once

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "pool.h"

// Keeps the compiler from adding up in another order, for which registers would not suffice.
#define IN_ORDER(sum) __asm__("" : "+x"(sum))

#define INLINE static inline __attribute__((always_inline))

#define WIDTH 8 // floats in a register
#define REGISTERS 16

typedef __m256 vec;

INLINE vec load(const float *x) { return _mm256_loadu_ps(x); }

INLINE void store(float *y, vec x) { _mm256_storeu_ps(y, x); }

INLINE __m256 load_bf16(const bf16 *x) {
    __m128i narrow = _mm_loadu_si128((const __m128i *)x);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

// Rounds to bfloat16 in the upper halves: to nearest, ties to even; NaN keeps its high bits.
INLINE __m256i round_bf16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
}

INLINE void store_bf16(bf16 *y, __m256 x) {
    __m256i high = _mm256_srli_epi32(round_bf16(x), 16);
    _mm_storeu_si128((__m128i *)y, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}

// The even or the odd numbers of 16.
INLINE __m256 load_part(const bf16 *x, int odd) {
    __m256i both = _mm256_loadu_si256((const __m256i *)x), high = _mm256_set1_epi32((int)0xFFFF0000);
    return _mm256_castsi256_ps(odd ? _mm256_and_si256(both, high) : _mm256_slli_epi32(both, 16));
}

INLINE void store_both(bf16 *y, __m256 even, __m256 odd) {
    __m256i low = _mm256_srli_epi32(round_bf16(even), 16);
    __m256i high = _mm256_and_si256(round_bf16(odd), _mm256_set1_epi32((int)0xFFFF0000));
    _mm256_storeu_si256((__m256i *)y, _mm256_or_si256(low, high));
}

#include "unmasked.h"

INLINE vec spread(float x) { return _mm256_set1_ps(x); }

INLINE vec fma_of(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); } // a b + c

INLINE vec load_f16(const uint16_t *x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)); }

// c + the sums of both products of each pair of 16-bit integers.
INLINE __m256i add_dots_of(__m256i a, __m256i b, __m256i c) { return _mm256_add_epi32(c, _mm256_madd_epi16(a, b)); }

// Sums of products of unsigned with signed bytes: pairs of neighbours in 16 bits, until end_bytes() adds up pairs of those.
INLINE __m256i begin_bytes(__m256i pairs) { return pairs; }

INLINE __m256i add_bytes_of(__m256i a, __m256i b, __m256i c) { return _mm256_add_epi16(c, _mm256_maddubs_epi16(a, b)); }

INLINE __m256i end_bytes(__m256i c) { return _mm256_madd_epi16(c, _mm256_set1_epi16(1)); }

INLINE float total_of(vec x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

INLINE vec totals_of(const vec x[WIDTH]) { // total_of each
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

INLINE vec larger_of(vec a, vec b) { return _mm256_max_ps(a, b); }

INLINE vec sqrt_of(vec x) { return _mm256_sqrt_ps(x); }

INLINE float largest_of(vec x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

#include "maths.h"

// 2^x: the fraction by a polynomial, the integer by the exponent.
INLINE vec exp2_of(vec x) {
    __m256 normal = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_GE_OQ); // below -126 the result is 0
    x = _mm256_min_ps(_mm256_and_ps(x, normal), _mm256_set1_ps(128.0f)); // from 128 on the result is infinite
    __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(exp2_of_fraction(x - whole), _mm256_castsi256_ps(exponent)), normal);
}
