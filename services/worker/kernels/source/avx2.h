// Number formats and vector maths for registers of 8 floats (AVX2).
#pragma once

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "pool.h"

#define INLINE static inline __attribute__((always_inline))

#define WIDTH 8 // floats in a register

typedef __m256 vec;

INLINE vec load(const float *x) { return _mm256_loadu_ps(x); }

INLINE void store(float *y, vec x) { _mm256_storeu_ps(y, x); }

INLINE __m256 load_bf16(const bf16 *x) {
    __m128i narrow = _mm_loadu_si128((const __m128i *)x);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

// In the upper halves, to nearest, ties to even; NaN keeps its high bits.
INLINE __m256i round_bf16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
}

INLINE void store_bf16(bf16 *y, __m256 x) {
    __m256i high = _mm256_srli_epi32(round_bf16(x), 16);
    _mm_storeu_si128((__m128i *)y, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}

// The even numbers, or the odd ones, of 16.
INLINE __m256 load_part(const bf16 *x, int odd) {
    __m256i both = _mm256_loadu_si256((const __m256i *)x), high = _mm256_set1_epi32((int)0xFFFF0000);
    return _mm256_castsi256_ps(odd ? _mm256_and_si256(both, high) : _mm256_slli_epi32(both, 16));
}

INLINE __m256 load_part_tail(const bf16 *x, int odd, long n) {
    bf16 values[2 * WIDTH] = {0};
    memcpy(values, x, n * sizeof(bf16));
    return load_part(values, odd);
}

INLINE void store_parts(bf16 *y, __m256 even, __m256 odd, long n) { // the first n of them
    __m256i low = _mm256_srli_epi32(round_bf16(even), 16);
    __m256i both = _mm256_or_si256(low, _mm256_and_si256(round_bf16(odd), _mm256_set1_epi32((int)0xFFFF0000)));
    bf16 values[2 * WIDTH];
    if (n >= 2 * WIDTH) return _mm256_storeu_si256((__m256i *)y, both);
    _mm256_storeu_si256((__m256i *)values, both);
    memcpy(y, values, n * sizeof(bf16));
}

typedef long lanes; // how many of them, from the first one

INLINE lanes first_lanes(long n) { return n < WIDTH ? n : WIDTH; }

INLINE vec load_tail(const float *x, lanes n) {
    float values[WIDTH] = {0};
    if (n == WIDTH) return load(x);
    memcpy(values, x, n * sizeof(float));
    return load(values);
}

INLINE void store_tail(float *y, vec x, lanes n) {
    float values[WIDTH];
    if (n == WIDTH) return store(y, x);
    store(values, x);
    memcpy(y, values, n * sizeof(float));
}

INLINE vec load_bf16_tail(const bf16 *x, lanes n) {
    bf16 values[WIDTH] = {0};
    if (n == WIDTH) return load_bf16(x);
    memcpy(values, x, n * sizeof(bf16));
    return load_bf16(values);
}

INLINE void store_bf16_tail(bf16 *y, vec x, lanes n) {
    bf16 values[WIDTH];
    if (n == WIDTH) return store_bf16(y, x);
    store_bf16(values, x);
    memcpy(y, values, n * sizeof(bf16));
}

INLINE vec spread(float x) { return _mm256_set1_ps(x); }

INLINE vec fma_of(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); } // a b + c

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

INLINE float largest_of(vec x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

// 2^x: the fraction by a polynomial (minimax on [-0.5, 0.5], relative error 2e-7), the integer by the exponent.
INLINE __m256 exp2_of(__m256 x) {
    __m256 normal = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_GE_OQ); // below, it is 0
    x = _mm256_min_ps(_mm256_and_ps(x, normal), _mm256_set1_ps(128.0f)); // from there on, infinite
    __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm256_sub_ps(x, whole);
    __m256 p = _mm256_set1_ps(1.5403530e-4f);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.3333558e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.6181291e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.5504109e-2f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.4022651e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.9314718e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(exponent)), normal);
}

// 1 / (1 + e^-x)
INLINE vec sigmoid_of(vec x) {
    return spread(1.0f) / (spread(1.0f) + exp2_of(x * spread(-1.44269504f)));
}

INLINE vec tanh_of(vec x) { return fma_of(spread(2.0f), sigmoid_of(x + x), spread(-1.0f)); } // 2 sigmoid(2x) - 1
