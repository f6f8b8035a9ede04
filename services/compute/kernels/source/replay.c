// Replays kernels with captured arguments.
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

// Fingerprint of the header that this library was compiled with.
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

// Counts come from the replayed step, not from the captured call.
#define ROW_COUNT(argument) rows
#define SEQUENCE_COUNT(argument) sequences

// Replays a step of `rows` rows and `sequences` sequences from the call `first` on. Returns the index of a collective that the
// caller has to make, or `n` when all calls were made; without `group` the caller makes all collectives.
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
