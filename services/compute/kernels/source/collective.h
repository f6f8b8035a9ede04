// Sums over the ranks of a group in shared memory.
#pragma once

#include "kernels.h"

// A rank's position and progress in its group.
struct collectives {
    char *area;                        // `stride` bytes per rank; a rank's area starts with its tag
    long stride, sizes, payload, room; // sizes, payload: offsets in an area of a round's bytes and its data, at most `room`;
    long rank, ranks;                  // those of odd rounds follow those of even rounds
    uint64_t tag, rounds;              // tag of the last collective; number of collectives
    uint64_t *beats;                   // heartbeat counter
    long looks;                        // checks for other ranks before the caller has to wait
    uint64_t elapsed_ns;               // time in collectives between replayed kernels
};
