// Includes the header for this CPU's registers of floats. All these headers define the same functions: loads and stores, sums,
// maths.
#pragma once

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#else
#include "neon.h"
#endif
