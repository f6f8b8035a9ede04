// Shares the work of one kernel between threads.
#pragma once

#define EXPORT __attribute__((visibility("default")))

typedef void (*task)(const void *context, long index);

// Calls work(context, i) once for every i < n, on this thread and the pool's; returns when all calls are done.
void share(task work, const void *context, long n);

// Like share(), for work where an index prepares the next one: each thread has a part of the indices and takes them in order;
// then it helps with other parts.
void share_in_order(task work, const void *context, long n);

long pool_threads(void);

// Pauses a spinning thread briefly, in favour of the core's other hardware threads.
static inline void pause_briefly(void) {
#ifdef __aarch64__
    __asm__ volatile("isb"); // `yield` does nothing on most processors
#else
    __builtin_ia32_pause();
#endif
}
