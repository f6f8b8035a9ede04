// The two halves of an all-reduce between processes, in memory that they share. Who waits for whom, and for how long, is
// the caller's affair; here a rank only looks out for a moment.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common.h"

typedef struct {
    char *area; // of all ranks, `stride` bytes each: the tag first
    long stride, sizes, payload; // where in a rank's area: bytes brought, and what was brought
    long rank, ranks;
} group;

// Publishes x under `tag`; returns 0 when all other ranks have come that far within `looks`, else 1.
EXPORT int rz_publish(const group *g, const bf16 *x, long count, uint64_t tag, long looks) {
    char *mine = g->area + g->rank * g->stride;
    memcpy(mine + g->payload, x, count * sizeof(bf16));
    *(uint64_t *)(mine + g->sizes) = count * sizeof(bf16);
    __atomic_store_n((uint64_t *)mine, tag, __ATOMIC_RELEASE);
    syscall(SYS_futex, mine, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
    for (long peer = 0; peer < g->ranks; peer++)
        while (__atomic_load_n((uint64_t *)(g->area + peer * g->stride), __ATOMIC_ACQUIRE) < tag) {
            if (!looks--) return 1;
            _mm_pause();
        }
    return 0;
}

// x [count] = the sum of what all ranks brought, in float32 and in their order, rounded once.
EXPORT void rz_sum(const group *g, bf16 *x, long count) {
    for (long j = 0; j < count; j += WIDTH) {
        lanes mask = first_lanes(count - j);
        vec total = load_bf16_tail((const bf16 *)(g->area + g->payload) + j, mask);
        for (long rank = 1; rank < g->ranks; rank++) {
            const bf16 *theirs = (const bf16 *)(g->area + rank * g->stride + g->payload);
            total += load_bf16_tail(theirs + j, mask);
        }
        store_bf16_tail(x + j, total, mask);
    }
}
