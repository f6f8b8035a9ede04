// The registers of floats that everything here is written for. Each header gives the same: numbers in and out, sums, maths.
#pragma once

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#else
#include "neon.h"
#endif
