// Sums over the ranks of a group, in memory that they share.
#pragma once

#include "kernels.h"

// A rank's place in its group, and how far it has got.
struct collectives {
    char *area;                        // of all ranks, `stride` bytes each: the tag first
    long stride, sizes, payload, room; // where in a rank's area: bytes brought, and what was brought, at most `room`, ...
    long rank, ranks;                  // ... of even rounds; of odd ones each lies behind that
    uint64_t tag, rounds;              // of the last collective; how many there were
    uint64_t *beats;                   // counts signs of life
    long looks;                        // out for the others, before it is the caller's turn to wait for them
    uint64_t elapsed_ns;               // in collectives between replayed kernels
};
