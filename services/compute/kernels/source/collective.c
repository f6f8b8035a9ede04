// An all-reduce between processes. A rank checks for the others only briefly here; the caller decides how long to wait.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "collective.h"
#include "common.h"

static char *area_of(const collectives *c, long rank) { return c->area + rank * c->stride; }

static uint64_t *bytes_of(const collectives *c, long rank) {
    return (uint64_t *)(area_of(c, rank) + c->sizes) + (c->rounds & 1);
}

static bf16 *payload_of(const collectives *c, long rank) {
    return (bf16 *)(area_of(c, rank) + c->payload + (c->rounds & 1) * c->room);
}

static void publish(const collectives *c, const bf16 *x, long count) {
    char *mine = area_of(c, c->rank);
    memcpy(payload_of(c, c->rank), x, count * sizeof(bf16));
    *bytes_of(c, c->rank) = count * sizeof(bf16);
    __atomic_store_n((uint64_t *)mine, c->tag + 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, mine, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
}

// Sums in float32, in the order of the ranks, and rounds once.
static void sum(const collectives *c, bf16 *x, long count) {
    for (long j = 0; j < count; j += WIDTH) {
        lanes mask = first_lanes(count - j);
        vec total = load_bf16_tail(payload_of(c, 0) + j, mask);
        for (long rank = 1; rank < c->ranks; rank++) total += load_bf16_tail(payload_of(c, rank) + j, mask);
        store_bf16_tail(x + j, total, mask);
    }
}

static int all_are_there(const collectives *c, long count) {
    long looks = c->looks;
    for (long peer = 0; peer < c->ranks; peer++) {
        while (__atomic_load_n((const uint64_t *)area_of(c, peer), __ATOMIC_ACQUIRE) <= c->tag) {
            if (!looks--) return 0;
            pause_briefly();
        }
        if (*bytes_of(c, peer) != count * sizeof(bf16)) return 0;
    }
    return 1;
}

// x [count] = the sum of all ranks' x under the next tag. Returns 1, and leaves x and the tag unchanged, when another rank has
// not arrived within `looks` checks or has another count; then call it again.
EXPORT int rz_all_reduce(collectives *c, bf16 *x, long count) {
    if (c->ranks > 1) {
        publish(c, x, count);
        if (!all_are_there(c, count)) return 1;
        sum(c, x, count);
    }
    c->tag++;
    c->rounds++;
    ++*c->beats;
    return 0;
}
