// A linear layer whose outputs are divided between threads, for kernels without AMX.
#pragma once

#include "common.h"

#define GROUP 64 // outputs of a group; n is padded to a multiple of GROUP

typedef struct {
    const bf16 *x, *packed; // x [m, ldx]
    const float *bias;      // [n] or null
    void *y;                // [m, ldy]
    long ldx, ldy, m, k, n, groups; // groups of outputs in a share
    int wide;               // y is float32
} product;

INLINE void store_sums(const product *p, long row, long column, vec sums) {
    long n = p->n - column, at = row * p->ldy + column;
    if (n <= 0) return;
    lanes mask = first_lanes(n);
    if (p->bias) sums += load_tail(p->bias + column, mask);
    if (p->wide)
        store_tail((float *)p->y + at, sums, mask);
    else
        store_bf16_tail((bf16 *)p->y + at, sums, mask);
}

// A share computes outputs [first_of_share, end_of_share).
static inline long first_of_share(const product *p, long index) { return index * p->groups * GROUP; }

static inline long end_of_share(const product *p, long index) {
    long end = first_of_share(p, index + 1);
    return end < p->n ? end : p->n;
}

static inline long groups_of(const product *p) { return (p->n + GROUP - 1) / GROUP; }

static inline void share_product(product *p, task multiply, long groups_at_once) {
    p->groups = groups_at_once;
    share_in_order(multiply, p, (groups_of(p) + groups_at_once - 1) / groups_at_once);
}
