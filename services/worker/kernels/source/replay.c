// Calls kernels again, with the arguments that were recorded. Both lists are told apart by their order alone: the kernels'
// here and in bfloat16.py, the arguments' here and in kernels.h.
#include <time.h>

#include "collective.h"
#include "common.h"

#define ARGUMENTS 17 // of attention, which has most

typedef union {
    void *p;
    long i;
    float f;
} argument;

typedef struct {
    long kernel;
    argument a[ARGUMENTS];
} call;

enum { LINEAR, RMS_NORM, ADD, ROTATE, WRITE_ROWS, GATE, ATTEND, REDUCE };

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

// From the call `first` on. Returns which call has to be made by the caller, a collective, or `n` when all were made; without
// `group` all collectives are the caller's.
EXPORT long rz_replay(const call *calls, long n, long first, collectives *group) {
    for (long i = first; i < n; i++) {
        const argument *a = calls[i].a;
        switch (calls[i].kernel) {
        case LINEAR:
            rz_linear(a[0].p, a[1].i, a[2].i, a[3].i, a[4].p, a[5].p, a[6].i, a[7].p, a[8].i, (int)a[9].i, a[10].p);
            break;
        case RMS_NORM:
            rz_rms_norm(a[0].p, a[1].i, a[2].p, a[3].i, a[4].f, a[5].p, a[6].i, a[7].i, a[8].i);
            break;
        case ADD:
            rz_add(a[0].p, a[1].p, a[2].f, a[3].i);
            break;
        case ROTATE:
            rz_rotate(a[0].p, a[1].i, a[2].i, a[3].i, a[4].p, a[5].p, a[6].i, a[7].p, a[8].i);
            break;
        case WRITE_ROWS:
            rz_write_rows(a[0].p, a[1].p, a[2].p, a[3].i, a[4].i, a[5].i);
            break;
        case GATE:
            rz_gate(a[0].p, a[1].p, a[2].i, a[3].i, (int)a[4].i);
            break;
        case ATTEND:
            rz_attend(a[0].p, a[1].i, a[2].p, a[3].i, a[4].p, a[5].i, a[6].i, a[7].i, a[8].i, a[9].f, a[10].f, a[11].i,
                      a[12].p, a[13].p, a[14].p, a[15].i, a[16].i);
            break;
        case REDUCE:
            if (!group || !reduce(group, a[0].p, a[1].i)) return i;
            break;
        }
    }
    return n;
}
