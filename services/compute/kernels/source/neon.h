// Number formats and vector maths for registers of 4 floats (NEON, 64-bit ARM).
#pragma once

#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "pool.h"

// Keeps the compiler from adding up in another order, for which registers would not suffice.
#define IN_ORDER(sum) __asm__("" : "+w"(sum))

#define INLINE static inline __attribute__((always_inline))

#define WIDTH 4 // floats in a register
#define REGISTERS 32

typedef float32x4_t vec;

INLINE vec load(const float *x) { return vld1q_f32(x); }

INLINE void store(float *y, vec x) { vst1q_f32(y, x); }

INLINE vec load_bf16(const bf16 *x) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(x), 16)); }

// Rounds to bfloat16 in the upper halves: to nearest, ties to even; NaN keeps its high bits.
INLINE uint32x4_t round_bf16(vec x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
}

INLINE void store_bf16(bf16 *y, vec x) { vst1_u16(y, vshrn_n_u32(round_bf16(x), 16)); }

// The even or the odd numbers of 8.
INLINE vec load_part(const bf16 *x, int odd) {
    uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(x));
    return vreinterpretq_f32_u32(odd ? vandq_u32(both, vdupq_n_u32(0xFFFF0000)) : vshlq_n_u32(both, 16));
}

INLINE void store_both(bf16 *y, vec even, vec odd) {
    uint32x4_t both = vsriq_n_u32(round_bf16(odd), round_bf16(even), 16);
    vst1q_u16(y, vreinterpretq_u16_u32(both));
}

#include "unmasked.h"

INLINE vec spread(float x) { return vdupq_n_f32(x); }

INLINE vec fma_of(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); } // a b + c

INLINE vec load_f16(const uint16_t *x) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }

// c + the sums of both products of each pair of 16-bit integers.
INLINE int32x4_t add_dots_of(int32x4_t a, int32x4_t b, int32x4_t c) {
    int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
    int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
    return vaddq_s32(c, vpaddq_s32(low, high));
}

// Sums of products of bytes below 128 with signed bytes: pairs of neighbours in 16 bits, until end_bytes() adds up pairs of those.
INLINE int32x4_t begin_bytes(int32x4_t pairs) { return pairs; }

INLINE int32x4_t add_bytes_of(int32x4_t a, int32x4_t b, int32x4_t c) {
    int8x16_t x = vreinterpretq_s8_s32(a), y = vreinterpretq_s8_s32(b);
    int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
    return vreinterpretq_s32_s16(vaddq_s16(vreinterpretq_s16_s32(c), vpaddq_s16(low, high)));
}

INLINE int32x4_t end_bytes(int32x4_t c) { return vpaddlq_s16(vreinterpretq_s16_s32(c)); }

INLINE float total_of(vec x) { return vaddvq_f32(x); }

INLINE vec totals_of(const vec x[WIDTH]) { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); } // total_of each

INLINE vec larger_of(vec a, vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); } // b if a or b is NaN

INLINE vec sqrt_of(vec x) { return vsqrtq_f32(x); }

INLINE float largest_of(vec x) { return vmaxvq_f32(x); }

#include "maths.h"

// 2^x: the fraction by a polynomial, the integer by the exponent.
INLINE vec exp2_of(vec x) {
    uint32x4_t normal = vcgeq_f32(x, spread(-126.0f)); // below -126 the result is 0
    x = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), normal));
    x = vminq_f32(x, spread(128.0f)); // from 128 on the result is infinite
    vec whole = vrndnq_f32(x);
    int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(whole), vdupq_n_s32(127)), 23);
    vec y = vmulq_f32(exp2_of_fraction(vsubq_f32(x, whole)), vreinterpretq_f32_s32(exponent));
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(y), normal));
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC

typedef uint32x4_t pairs; // WIDTH pairs of bfloat16

INLINE pairs load_pairs(const bf16 *x) { return vreinterpretq_u32_u16(vld1q_u16(x)); }

typedef long pair_lanes;

INLINE pair_lanes first_pairs(long n) { return n < 2 * WIDTH ? n : 2 * WIDTH; } // n counts numbers, not pairs

INLINE pairs load_pairs_tail(const bf16 *x, pair_lanes n) {
    bf16 values[2 * WIDTH] = {0};
    if (n == 2 * WIDTH) return load_pairs(x);
    memcpy(values, x, n * sizeof(bf16));
    return load_pairs(values);
}

INLINE void store_pairs(bf16 *y, pairs x) { vst1q_u16(y, vreinterpretq_u16_u32(x)); }

INLINE pairs spread_pair(const bf16 *x) { // the same pair in every place
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
    return vdupq_n_u32(pair);
}

// a b + c, where a b is the sum of both products of each pair.
INLINE vec dot_of(pairs a, pairs b, vec c) { return vbfdotq_f32(c, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b)); }

// Pairs of a number of x and the number of y at the same place, from the lower or the upper numbers.
INLINE pairs zip_of(pairs x, pairs y, int upper) {
    uint16x8_t a = vreinterpretq_u16_u32(x), b = vreinterpretq_u16_u32(y);
    return vreinterpretq_u32_u16(upper ? vzip2q_u16(a, b) : vzip1q_u16(a, b));
}

// Transposes 4 x 4 pairs; the stored rows are `step` bytes apart.
INLINE void turn(pairs r[WIDTH], char *to, long step) {
    pairs a = vtrn1q_u32(r[0], r[1]), b = vtrn2q_u32(r[0], r[1]), c = vtrn1q_u32(r[2], r[3]), d = vtrn2q_u32(r[2], r[3]);
    uint64x2_t low[2] = {vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(c)}, high[2] = {vreinterpretq_u64_u32(b), vreinterpretq_u64_u32(d)};
    vst1q_u64((uint64_t *)to, vtrn1q_u64(low[0], low[1]));
    vst1q_u64((uint64_t *)(to + step), vtrn1q_u64(high[0], high[1]));
    vst1q_u64((uint64_t *)(to + 2 * step), vtrn2q_u64(low[0], low[1]));
    vst1q_u64((uint64_t *)(to + 3 * step), vtrn2q_u64(high[0], high[1]));
}

#endif
