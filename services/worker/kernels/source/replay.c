// Calls kernels again, with the arguments that were captured.
#include <time.h>

#include "calls.h"
#include "collective.h"
#include "common.h"

typedef union {
    void *p;
    long i;
    float f;
} argument;

struct call {
    long kernel;
    argument a[ARGUMENTS];
};

// Of the header that this was compiled with.
EXPORT const char rz_fingerprint[] = FINGERPRINT;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static int reduce(collectives *c, bf16 *x, long count) {
    if (count * (long)sizeof(bf16) > c->room) return 0;
    uint64_t began = now_ns();
    int late = rz_all_reduce(c, x, count);
    c->elapsed_ns += now_ns() - began;
    return !late;
}

// Counts are the step's, not the call's.
#define ROW_COUNT(argument) rows
#define SEQUENCE_COUNT(argument) sequences

// A step of so many rows and sequences, from the call `first` on. Returns which call has to be made by the caller, a collective,
// or `n` when all were made; without `group` all collectives are the caller's.
EXPORT long rz_replay(const call *calls, long n, long first, long rows, long sequences, collectives *group) {
    for (long i = first; i < n; i++) {
        const argument *a = calls[i].a;
        switch (calls[i].kernel) {
        CALLS_OF_A_STEP
        case REDUCE:
            if (!group || !reduce(group, a[0].p, rows * a[2].i)) return i;
            break;
        }
    }
    return n;
}
