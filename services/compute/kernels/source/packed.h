// Access to packed weights for rows.c; each linear.c has its own layout.
#pragma once

#include "kernels.h"

// Writes the k inputs of row `row` of a weight packed by rz_pack_weight to y.
void unpack_row(const bf16 *packed, long row, long k, bf16 *y);
