// The layout of a cache of int8 codes: [blocks, 2 * n_kv, run]. A run is what a block holds of a head of K or V: the codes
// [block_size, head_dim], then a bfloat16 scale for each position, [block_size]. A number is its code times its scale.
#pragma once

#include <stdint.h>

#define LARGEST_CODE 127

static inline long bytes_of_run(long block_size, long head_dim) { return block_size * (head_dim + 2); }
