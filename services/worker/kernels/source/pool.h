// Threads that share the work of one kernel.
#pragma once

#define EXPORT __attribute__((visibility("default")))

typedef void (*task)(const void *context, long index);

// Calls work(context, i) once for every i below n, on this thread and those of the pool; returns when all are done.
void share(task work, const void *context, long n);

// The same where one index prepares the next: every thread has a part of them, in order, and helps the others at its end.
void share_in_order(task work, const void *context, long n);

long pool_threads(void);

// A moment for the neighbours of whoever looks out.
static inline void pause_briefly(void) {
#ifdef __aarch64__
    __asm__ volatile("isb"); // `yield` does nothing on most processors
#else
    __builtin_ia32_pause();
#endif
}
