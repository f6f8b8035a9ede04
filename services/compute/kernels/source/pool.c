// A thread pool for tasks of microseconds: idle threads spin briefly, then sleep in the operating system's kernel.
#include "kernels.h"
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LOOKS 1000 // spins for some tens of microseconds; more would take the core from other processes without need

#define PARTS 8 // most parts of a round; more threads share parts

typedef struct {
    _Alignas(64) atomic_ulong taken; // round << 32 | next index
    atomic_long end;
} part;

// A round is one call of share(). A thread takes an index by raising `taken`, which also contains the round, so that a late
// thread can neither take an index of a later round nor use that round's fields for its own.
static struct {
    pthread_mutex_t owner; // held by the thread that shares; other threads meanwhile compute their work alone
    atomic_uint round, sleepers;
    atomic_long left, n_parts;
    _Atomic(task) work;
    _Atomic(const void *) context;
    long threads;
    part parts[PARTS];
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .threads = 1};

static void work_off(part *p, uint64_t round, task work, const void *context) {
    long end = p->end;
    uint64_t seen = atomic_load(&p->taken);
    while (seen >> 32 == round && (long)(uint32_t)seen < end)
        if (atomic_compare_exchange_weak(&p->taken, &seen, seen + 1)) {
            work(context, (uint32_t)seen);
            atomic_fetch_sub(&pool.left, 1);
            seen = atomic_load(&p->taken);
        }
}

// Works on the thread's own part first, then on the rest of the others.
static void help(uint64_t round, long thread) {
    task work = pool.work;
    const void *context = pool.context;
    long n = pool.n_parts;
    for (long i = 0; i < n; i++) work_off(&pool.parts[(thread + i) % n], round, work, context);
}

static void *stand_by(void *thread) {
    for (uint32_t seen = 0;; seen = atomic_load(&pool.round), help(seen, (long)thread)) {
        for (int look = 0; look < LOOKS && atomic_load(&pool.round) == seen; look++) pause_briefly();
        atomic_fetch_add(&pool.sleepers, 1);
        while (atomic_load(&pool.round) == seen) syscall(SYS_futex, &pool.round, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
        atomic_fetch_sub(&pool.sleepers, 1);
    }
    return 0;
}

static void start(task work, const void *context, long n, long parts) {
    uint32_t round = atomic_load(&pool.round) + 1;
    // No index can be taken while the fields change.
    for (long i = 0; i < PARTS; i++) atomic_store(&pool.parts[i].taken, (uint64_t)round << 32 | UINT32_MAX);
    pool.work = work;
    pool.context = context;
    pool.n_parts = parts;
    atomic_store(&pool.left, n);
    for (long i = 0; i < parts; i++) {
        pool.parts[i].end = n * (i + 1) / parts;
        atomic_store(&pool.parts[i].taken, (uint64_t)round << 32 | (uint64_t)(n * i / parts));
    }
    atomic_store(&pool.round, round);
    if (atomic_load(&pool.sleepers)) syscall(SYS_futex, &pool.round, FUTEX_WAKE_PRIVATE, INT32_MAX, 0, 0, 0);
}

static void share_parts(task work, const void *context, long n, long parts) {
    if (pool.threads == 1 || n < 2 || pthread_mutex_trylock(&pool.owner)) {
        for (long i = 0; i < n; i++) work(context, i);
        return;
    }
    start(work, context, n, parts);
    help(atomic_load(&pool.round), 0);
    for (int look = 0; atomic_load(&pool.left); look++) { // yields the core to a helper that lost its own
        if (look < LOOKS)
            pause_briefly();
        else
            sched_yield();
    }
    pthread_mutex_unlock(&pool.owner);
}

void share(task work, const void *context, long n) { share_parts(work, context, n, 1); }

void share_in_order(task work, const void *context, long n) {
    share_parts(work, context, n, pool.threads < PARTS ? pool.threads : PARTS);
}

long pool_threads(void) { return pool.threads; }

// Requests the tile registers, which threads inherit, from the operating system; returns 1 when granted or not needed.
static int get_registers(void) {
#ifdef __AMX_TILE__
    enum { ARCH_REQ_XCOMP_PERM = 0x1023,
           XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 1;
#endif
}

// Starts threads up to `threads`. Returns 0, -1 when the operating system refuses the registers that the kernels need, -2
// when it refuses threads.
EXPORT int rz_enable(long threads) {
    if (!get_registers()) return -1;
    pthread_mutex_lock(&pool.owner);
    int failed = 0;
    for (; pool.threads < threads && !failed; pool.threads += !failed) {
        pthread_t thread;
        failed = pthread_create(&thread, 0, stand_by, (void *)pool.threads) || pthread_detach(thread);
    }
    pthread_mutex_unlock(&pool.owner);
    return failed ? -2 : 0;
}
