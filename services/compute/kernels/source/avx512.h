// Number formats and vector maths for registers of 16 floats (AVX-512).
#pragma once

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "pool.h"

// Keeps the compiler from adding up in another order, for which registers would not suffice.
#define IN_ORDER(sum) __asm__("" : "+v"(sum))

#define INLINE static inline __attribute__((always_inline))

#define WIDTH 16 // floats in a register
#define REGISTERS 32

typedef __m512 vec;

INLINE vec load(const float *x) { return _mm512_loadu_ps(x); }

INLINE void store(float *y, vec x) { _mm512_storeu_ps(y, x); }

INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

INLINE __m512 load_bf16(const bf16 *x) { return widen(_mm256_loadu_si256((const __m256i *)x)); }

INLINE __m512 load_bf16_tail(const bf16 *x, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, x)); }

// Rounds to bfloat16 in the upper halves: to nearest, ties to even; NaN keeps its high bits.
INLINE __m512i round_bf16(__m512 x) {
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
}

INLINE __m256i narrow(__m512 x) { // to nearest, ties to even
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bf16(x), 16));
#endif
}

INLINE void store_bf16(bf16 *y, __m512 x) { _mm256_storeu_si256((__m256i *)y, narrow(x)); }

INLINE void store_bf16_tail(bf16 *y, __m512 x, __mmask16 mask) { _mm256_mask_storeu_epi16(y, mask, narrow(x)); }

INLINE __m512 part_of(__m512i x, int odd) {
    return _mm512_castsi512_ps(odd ? _mm512_and_si512(x, _mm512_set1_epi32((int)0xFFFF0000)) : _mm512_slli_epi32(x, 16));
}

INLINE __mmask32 first_bf16(long n) { return n >= 2 * WIDTH ? 0xFFFFFFFF : (1u << n) - 1; }

// The even or the odd numbers of 32.
INLINE __m512 load_part(const bf16 *x, int odd) { return part_of(_mm512_loadu_si512(x), odd); }

INLINE __m512 load_part_tail(const bf16 *x, int odd, long n) { return part_of(_mm512_maskz_loadu_epi16(first_bf16(n), x), odd); }

INLINE void store_parts(bf16 *y, __m512 even, __m512 odd, long n) { // stores the first n
    __m512i low = _mm512_srli_epi32(round_bf16(even), 16);
    __m512i high = _mm512_and_si512(round_bf16(odd), _mm512_set1_epi32((int)0xFFFF0000));
    _mm512_mask_storeu_epi16(y, first_bf16(n), _mm512_or_si512(low, high));
}

typedef __mmask16 lanes;

INLINE lanes first_lanes(long n) { return n >= WIDTH ? 0xFFFF : (lanes)((1u << n) - 1); }

INLINE vec load_tail(const float *x, lanes mask) { return _mm512_maskz_loadu_ps(mask, x); }

INLINE void store_tail(float *y, vec x, lanes mask) { _mm512_mask_storeu_ps(y, mask, x); }

INLINE vec spread(float x) { return _mm512_set1_ps(x); }

INLINE vec fma_of(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); } // a b + c

INLINE vec load_f16(const uint16_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)); }

// c + the sums of both products of each pair of 16-bit integers.
INLINE __m512i add_dots_of(__m512i a, __m512i b, __m512i c) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(c, a, b);
#else
    return _mm512_add_epi32(c, _mm512_madd_epi16(a, b));
#endif
}

// Sums of products of unsigned with signed bytes. Without VNNI: of pairs of neighbours in 16 bits, until end_bytes() adds up pairs of
// those; with VNNI: of four neighbours in 32 bits, from begin_bytes() on.
INLINE __m512i add_pairs(__m512i pairs) { return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }

#ifdef __AVX512VNNI__
INLINE __m512i begin_bytes(__m512i pairs) { return add_pairs(pairs); }

INLINE __m512i add_bytes_of(__m512i a, __m512i b, __m512i c) { return _mm512_dpbusd_epi32(c, a, b); }

INLINE __m512i end_bytes(__m512i c) { return c; }
#else
INLINE __m512i begin_bytes(__m512i pairs) { return pairs; }

INLINE __m512i add_bytes_of(__m512i a, __m512i b, __m512i c) { return _mm512_add_epi16(c, _mm512_maddubs_epi16(a, b)); }

INLINE __m512i end_bytes(__m512i c) { return add_pairs(c); }
#endif

INLINE float total_of(vec x) { return _mm512_reduce_add_ps(x); }

INLINE vec totals_of(const vec x[WIDTH]) { // total_of each
    __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        __m512d even = _mm512_castps_pd(a[2 * i]), odd = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)), _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd)));
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88), _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xDD));
    return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xDD));
}

INLINE vec larger_of(vec a, vec b) { return _mm512_max_ps(a, b); }

INLINE vec sqrt_of(vec x) { return _mm512_sqrt_ps(x); }

INLINE float largest_of(vec x) { return _mm512_reduce_max_ps(x); }

#include "maths.h"

// 2^x: the fraction by a polynomial, the integer by the exponent.
INLINE vec exp2_of(vec x) {
    // The result is 0 instead of a subnormal number, for which the CPU would take a hundred times as long.
    __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    x = _mm512_maskz_mov_ps(normal, x); // -inf would turn into NaN
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_maskz_scalef_ps(normal, exp2_of_fraction(x - whole), whole);
}

// Transposes 16 x 16 elements of 32 bits; the stored rows are `step` bytes apart.
INLINE void turn(__m512i r[16], char *to, long step) {
    __m512i s[16];
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    for (int i = 0; i < 4; i++) { // r[4 j + i] holds column 4 l + i of rows 4 j .. 4 j + 3 in its 128-bit lane l
        __m512i a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        __m512i c = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD), d = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
        _mm512_storeu_si512(to + i * step, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_storeu_si512(to + (4 + i) * step, _mm512_shuffle_i32x4(c, d, 0x88));
        _mm512_storeu_si512(to + (8 + i) * step, _mm512_shuffle_i32x4(a, b, 0xDD));
        _mm512_storeu_si512(to + (12 + i) * step, _mm512_shuffle_i32x4(c, d, 0xDD));
    }
}

#ifdef __AVX512BF16__

typedef __m512i pairs; // WIDTH pairs of bfloat16

INLINE pairs load_pairs(const bf16 *x) { return _mm512_loadu_si512(x); }

typedef __mmask32 pair_lanes;

INLINE pair_lanes first_pairs(long n) { return first_bf16(n); } // n counts numbers, not pairs

INLINE pairs load_pairs_tail(const bf16 *x, pair_lanes mask) { return _mm512_maskz_loadu_epi16(mask, x); }

INLINE void store_pairs(bf16 *y, pairs x) { _mm512_storeu_si512(y, x); }

INLINE pairs spread_pair(const bf16 *x) { // the same pair in every place
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return _mm512_set1_epi32(pair);
}

// a b + c, where a b is the sum of both products of each pair.
INLINE vec dot_of(pairs a, pairs b, vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }

// Pairs of a number of x and the number of y at the same place, from the lower or the upper numbers.
INLINE pairs zip_of(pairs x, pairs y, int upper) {
    static const uint16_t order[2][32] = {
        {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    return _mm512_permutex2var_epi16(x, _mm512_loadu_si512(order[upper]), y);
}

#endif
