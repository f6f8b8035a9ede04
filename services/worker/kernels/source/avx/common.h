// What the kernels for AVX2 and for AVX-512 without bfloat16 share; they are written for registers of either width.
#pragma once

#ifdef __AVX512F__
#include "avx512.h"
#else
#include "avx2.h"
#endif
