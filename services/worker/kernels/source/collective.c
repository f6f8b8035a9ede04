// An all-reduce between processes, in memory that they share. Who waits for whom, and for how long, is the caller's affair;
// here a rank only looks out for a moment.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common.h"

typedef struct {
    char *area; // of all ranks, `stride` bytes each: the tag first
    long stride, sizes, payload; // where in a rank's area: bytes brought, and what was brought
    long rank, ranks;
} group;

static void publish(const group *g, const bf16 *x, long count, uint64_t tag) {
    char *mine = g->area + g->rank * g->stride;
    memcpy(mine + g->payload, x, count * sizeof(bf16));
    *(uint64_t *)(mine + g->sizes) = count * sizeof(bf16);
    __atomic_store_n((uint64_t *)mine, tag, __ATOMIC_RELEASE);
    syscall(SYS_futex, mine, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
}

// In float32 and in the order of the ranks, rounded once.
static void sum(const group *g, bf16 *x, long count) {
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

// x [count] = the sum of what all ranks brought under `tag`. Returns 1, and leaves x alone, when another rank has not come
// that far within `looks`, or brought another number; a second call goes on where the first one stopped.
EXPORT int rz_all_reduce(const group *g, bf16 *x, long count, uint64_t tag, long looks) {
    publish(g, x, count, tag);
    for (long peer = 0; peer < g->ranks; peer++) {
        const char *theirs = g->area + peer * g->stride;
        while (__atomic_load_n((const uint64_t *)theirs, __ATOMIC_ACQUIRE) < tag) {
            if (!looks--) return 1;
            _mm_pause();
        }
        if (*(const uint64_t *)(theirs + g->sizes) != count * sizeof(bf16)) return 1;
    }
    sum(g, x, count);
    return 0;
}
