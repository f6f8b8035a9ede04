// What the kernels for vectors share; they are written for registers of either width.
#pragma once

#ifdef __AVX512F__
#include "wide.h"
#else
#include "narrow.h"
#endif
