// What rows.c needs of a packed weight, whose layout each linear.c has for itself.
#pragma once

#include "kernels.h"

// Writes row `row` of a weight that rz_pack_weight has packed, its k inputs, to y.
void unpack_row(const bf16 *packed, long row, long k, bf16 *y);
