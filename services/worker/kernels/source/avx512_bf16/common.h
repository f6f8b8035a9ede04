// What the kernels for AVX-512 with bfloat16 share.
#pragma once

#include "avx512.h"

// Two neighbours in every place, as products take them.
INLINE __m512bh spread_pair(const bf16 *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}
