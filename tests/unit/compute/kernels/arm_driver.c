// Calls kernels for another process: which one, its arguments and what they point to come by stdin, the latter goes back by stdout.
// Whatever an argument points to ends where nothing may be read or written any more.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels.h"

void rz_attend_float(const float *q, long ldq, float *out, long ldo, const float *cache, long n_kv, long group, long head_dim,
                     long block_size, float scale, float softcap, long window, const int64_t *starts, const int64_t *lengths,
                     const int64_t *blocks, long n_blocks, long tables, long sequences) __attribute__((weak)); // not everywhere

#include "calls.h"

typedef union {
    void *p;
    long i;
    float f;
} argument;

typedef struct {
    long kernel;
    argument a[ARGUMENTS];
    long sizes[ARGUMENTS]; // of what an argument points to; -1: it is no pointer, or null
} request;

static void *place(long size, long *mapped) {
    long page = sysconf(_SC_PAGESIZE), pages = (size + page - 1) / page * page;
    *mapped = pages + page;
    char *start = mmap(0, *mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mprotect(start + pages, page, PROT_NONE)) abort();
    return start + pages - size;
}

#define ROW_COUNT(argument) argument.i
#define SEQUENCE_COUNT(argument) argument.i

static void call_kernel(long kernel, const argument *a) {
    switch (kernel) {
        CALLS_OF_A_STEP
        OTHER_CALLS
    default: abort();
    }
}

int main(int n, char **words) {
    request r;
    if (n != 2 || rz_enable(atol(words[1]))) return 1;
    while (fread(&r, sizeof r, 1, stdin)) {
        long mapped[ARGUMENTS];
        for (int i = 0; i < ARGUMENTS; i++)
            if (r.sizes[i] >= 0) {
                r.a[i].p = place(r.sizes[i], mapped + i);
                if (r.sizes[i] && !fread(r.a[i].p, r.sizes[i], 1, stdin)) return 1;
            }
        call_kernel(r.kernel, r.a);
        for (int i = 0; i < ARGUMENTS; i++)
            if (r.sizes[i] >= 0) {
                fwrite(r.a[i].p, 1, r.sizes[i], stdout);
                munmap((char *)r.a[i].p + r.sizes[i] + sysconf(_SC_PAGESIZE) - mapped[i], mapped[i]);
            }
        fflush(stdout);
    }
    return 0;
}
