// Weights of integers, and the rows of inputs that they are multiplied with.
//
// A weight has codes of 8, 4 or 2 bits, and a scale and perhaps an offset for some blocks of inputs of an output, or for all of them.
//
// Inputs become integers of 16 bits or, for codes of 4 bits, of 8 bits, block by block. A row of inputs has `k` integers, then the facts
// of each block.
#pragma once

#include "order.h"

#define ACROSS 4               // registers of outputs in a packed strip
#define STRIP (ACROSS * WIDTH) // outputs of a packed strip
#define CENTER(bits) (1 << ((bits) - 1)) // a code means code - CENTER
#define LANES(input_bits) (32 / (input_bits)) // inputs in 32 bits

// The bit of a word at which the code of input k begins: the code of input LANES p + j is part p of the word's lane j.
#define PLACE(k, bits, input_bits) \
    ((k) % LANES(input_bits) * (input_bits) + (k) % (32 / (bits)) / LANES(input_bits) * (bits))

typedef struct {
    float step;
    int32_t sum; // of the integers, negative; of bytes two sums in 16 bits, of the first two of each four inputs and of the others
} block_facts;

static inline long blocks_of(long k, long block) { return (k + block - 1) / block; }
