// Calls kernels again, with the arguments that were recorded. Both lists are told apart by their order alone: the kernels'
// here and in bfloat16.py, the arguments' here and in kernels.h.
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

enum { LINEAR, RMS_NORM, ADD, ROTATE, WRITE_ROWS, GATE, ATTEND };

EXPORT void rz_replay(const call *calls, long n) {
    for (const call *c = calls; c < calls + n; c++) {
        const argument *a = c->a;
        switch (c->kernel) {
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
        }
    }
}
