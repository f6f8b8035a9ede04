// Registers of integers, and floats as integers of the same order: the values of backends/keys.py.
#pragma once

#include "common.h"

typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));

INLINE ints choose(ints where, ints a, ints b) { return (where & a) | (~where & b); }

INLINE ints spread_int(int32_t x) { return x - (ints){0}; }

INLINE ints counted(void) { // 0, 1, 2, ...
    ints x;
    for (int j = 0; j < WIDTH; j++) x[j] = j;
    return x;
}

// x where low <= position < limit, else y.
INLINE vec choose_within(ints position, int32_t low, int32_t limit, vec x, vec y) {
#ifdef __AVX512F__
    __mmask16 before = _mm512_cmplt_epi32_mask((__m512i)position, _mm512_set1_epi32(limit));
    return _mm512_mask_blend_ps(before & _mm512_cmpge_epi32_mask((__m512i)position, _mm512_set1_epi32(low)), y, x);
#else
    return (vec)choose((position < limit) & (position >= low), (ints)x, (ints)y);
#endif
}

INLINE ints ordered(vec x) {
    x += spread(0.0f);                                         // -0.0 becomes +0.0
    ints bits = choose(x != x, spread_int(0x7F800000), (ints)x); // NaN becomes +inf
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

// The key of a token: a larger value has a larger key; of equal values the lower id does.
INLINE int64_t key_of(int32_t value, int64_t id) { return value * (1L << 32) + (0xFFFFFFFF - id); }
