// A product with integers, for all files that compute it.
#pragma once

#include "product.h"
#include "quantized.h"

typedef struct {
    product p; // first, for share_product(); its x and packed are not used
    const char *inputs, *codes, *scales, *offsets;
    long stride, block, common, groups; // `common` blocks have a scale in common, an output has `groups` scales
    int half;                           // scales and offsets are float16
} quantized;

// Scales and offsets are [n / GROUP][scales of an output][GROUP].
INLINE vec scale_at(const char *scales, long at, int half) {
    return half ? load_f16((const uint16_t *)scales + at) : load((const float *)scales + at);
}

// The negative sum of a block's inputs.
INLINE int32_t sum_of(const block_facts *facts, int input_bits) {
    return input_bits == 16 ? facts->sum : (int16_t)facts->sum + (facts->sum >> 16);
}

// In tile registers, where there are any: computes the first rows, and returns their number.
long multiply_in_tiles(quantized *q, int bits, int input_bits);
