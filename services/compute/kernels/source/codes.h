// The layout of a cache of int8 codes: [blocks, 2 * n_kv, run]. A run is what a block holds of a head of K or V: the codes
// [block_tokens, head_dim], then a bfloat16 scale for each position, [block_tokens]. A number is its code times its scale. Keys are rotated
// before they are coded, and so are queries.
#pragma once

#include <math.h>
#include <stdint.h>

#define LARGEST_CODE 127
#define LONGEST_HEAD 256

static inline long bytes_of_run(long block_tokens, long head_dim) { return block_tokens * (head_dim + 2); }

// Rotates a head in place by a Walsh-Hadamard matrix, which is its own inverse: scores stay the same, and a number that is much
// larger than its neighbours is spread over them. Heads that are no power of two are rotated in parts.
static inline void rotate_head(float *x, long head_dim) {
    long part = head_dim & -head_dim;
    float unit = (float)(1.0 / sqrt((double)part));
    for (long j = 0; j < head_dim; j++) x[j] *= unit;
    for (long h = 1; h < part; h *= 2)
        for (long i = 0; i < head_dim; i += 2 * h)
            for (long j = i; j < i + h; j++) {
                float a = x[j], b = x[j + h];
                x[j] = a + b;
                x[j + h] = a - b;
            }
}
