// Number formats and vector maths for registers of 16 floats (AVX-512).
#pragma once

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "pool.h"

#define INLINE static inline __attribute__((always_inline))

#define WIDTH 16 // floats in a register

typedef __m512 vec;

static inline vec load(const float *x) { return _mm512_loadu_ps(x); }

static inline void store(float *y, vec x) { _mm512_storeu_ps(y, x); }

static inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

static inline __m512 load_bf16(const bf16 *x) { return widen(_mm256_loadu_si256((const __m256i *)x)); }

static inline __m512 load_bf16_tail(const bf16 *x, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, x)); }

// In the upper halves, to nearest, ties to even; NaN keeps its high bits.
static inline __m512i round_bf16(__m512 x) {
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
}

static inline __m256i narrow(__m512 x) { // to nearest, ties to even
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bf16(x), 16));
#endif
}

static inline void store_bf16(bf16 *y, __m512 x) { _mm256_storeu_si256((__m256i *)y, narrow(x)); }

static inline void store_bf16_tail(bf16 *y, __m512 x, __mmask16 mask) { _mm256_mask_storeu_epi16(y, mask, narrow(x)); }

INLINE __m512 part_of(__m512i x, int odd) {
    return _mm512_castsi512_ps(odd ? _mm512_and_si512(x, _mm512_set1_epi32((int)0xFFFF0000)) : _mm512_slli_epi32(x, 16));
}

INLINE __mmask32 first_bf16(long n) { return n >= 2 * WIDTH ? 0xFFFFFFFF : (1u << n) - 1; }

// The even numbers, or the odd ones, of 32.
INLINE __m512 load_part(const bf16 *x, int odd) { return part_of(_mm512_loadu_si512(x), odd); }

INLINE __m512 load_part_tail(const bf16 *x, int odd, long n) { return part_of(_mm512_maskz_loadu_epi16(first_bf16(n), x), odd); }

INLINE void store_parts(bf16 *y, __m512 even, __m512 odd, long n) { // the first n of them
    __m512i low = _mm512_srli_epi32(round_bf16(even), 16);
    __m512i high = _mm512_and_si512(round_bf16(odd), _mm512_set1_epi32((int)0xFFFF0000));
    _mm512_mask_storeu_epi16(y, first_bf16(n), _mm512_or_si512(low, high));
}

typedef __mmask16 lanes;

static inline lanes first_lanes(long n) { return n >= WIDTH ? 0xFFFF : (lanes)((1u << n) - 1); }

static inline vec load_tail(const float *x, lanes mask) { return _mm512_maskz_loadu_ps(mask, x); }

static inline void store_tail(float *y, vec x, lanes mask) { _mm512_mask_storeu_ps(y, mask, x); }

static inline vec spread(float x) { return _mm512_set1_ps(x); }

static inline vec fma_of(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); } // a b + c

static inline float total_of(vec x) { return _mm512_reduce_add_ps(x); }

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

static inline vec larger_of(vec a, vec b) { return _mm512_max_ps(a, b); }

static inline float largest_of(vec x) { return _mm512_reduce_max_ps(x); }

// 2^x: the fraction by a polynomial (minimax on [-0.5, 0.5], relative error 2e-7), the integer by the exponent.
static inline __m512 exp2_of(__m512 x) {
    // Below the normal numbers it is 0: the processor would take a hundred times as long to round to it.
    __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    x = _mm512_maskz_mov_ps(normal, x); // -inf would turn into NaN
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.5403530e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3333558e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(normal, p, whole);
}

// 1 / (1 + e^-x)
static inline __m512 sigmoid_of(__m512 x) {
    __m512 e = exp2_of(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)));
    return _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

static inline __m512 tanh_of(__m512 x) { // 2 sigmoid(2x) - 1
    __m512 s = sigmoid_of(_mm512_add_ps(x, x));
    return _mm512_fmsub_ps(_mm512_set1_ps(2.0f), s, _mm512_set1_ps(1.0f));
}

// 16 x 16 elements of 32 bits, rows to columns, which lie `step` bytes apart.
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
