// What adapters add to the outputs of a linear layer: a product with two narrow matrices, of each row's own adapter.
#include "common.h"
#include "pool.h"

#define ROWS 4   // rows of a task
#define ACROSS 4 // registers of sums: enough to hide the latency of an addition

typedef struct {
    const bf16 *x, *a, *b;
    const int64_t *ranks, *slots;
    bf16 *y;
    long ldx, ldy, m, k, n, most;
} low_rank;

// Products of `x` [k] with ACROSS rows of `a`, or with one.
INLINE void shrink(const bf16 *x, const bf16 *a, long k, float *inner, int rows) {
    vec sums[ACROSS];
    for (int r = 0; r < rows; r++) sums[r] = spread(0);
    long whole = k / WIDTH * WIDTH;
    for (long j = 0; j < whole; j += WIDTH) {
        vec input = load_bf16(x + j);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) sums[r] = fma_of(input, load_bf16(a + r * k + j), sums[r]);
    }
    if (whole < k) {
        lanes mask = first_lanes(k - whole);
        vec input = load_bf16_tail(x + whole, mask);
        for (int r = 0; r < rows; r++) sums[r] = fma_of(input, load_bf16_tail(a + r * k + whole, mask), sums[r]);
    }
    for (int r = 0; r < rows; r++) inner[r] = total_of(sums[r]);
}

// y [n] += b^T inner, with one rounding; b [rank, n].
INLINE void expand(const float *inner, const bf16 *b, long rank, long n, bf16 *y) {
    long j = 0;
    for (; j + ACROSS * WIDTH <= n; j += ACROSS * WIDTH) {
        vec sums[ACROSS];
        for (int r = 0; r < ACROSS; r++) sums[r] = spread(0);
        for (long i = 0; i < rank; i++) {
            vec factor = spread(inner[i]);
#pragma GCC unroll 4
            for (int r = 0; r < ACROSS; r++) sums[r] = fma_of(factor, load_bf16(b + i * n + j + r * WIDTH), sums[r]);
        }
        for (int r = 0; r < ACROSS; r++) {
            lanes mask = first_lanes(WIDTH);
            bf16 *to = y + j + r * WIDTH;
            store_bf16_tail(to, load_bf16_tail(to, mask) + sums[r], mask);
        }
    }
    for (; j < n; j += WIDTH) {
        lanes mask = first_lanes(n - j);
        vec sum = spread(0);
        for (long i = 0; i < rank; i++) sum = fma_of(spread(inner[i]), load_bf16_tail(b + i * n + j, mask), sum);
        store_bf16_tail(y + j, load_bf16_tail(y + j, mask) + sum, mask);
    }
}

static void add_rows(const void *context, long index) {
    const low_rank *p = context;
    float inner[p->most];
    for (long i = index * ROWS; i < (index + 1) * ROWS && i < p->m; i++) {
        long slot = p->slots[i], rank = slot < 0 ? 0 : p->ranks[slot], r = 0;
        if (!rank) continue;
        const bf16 *x = p->x + i * p->ldx, *a = p->a + slot * p->most * p->k;
        for (; r + ACROSS <= rank; r += ACROSS) shrink(x, a + r * p->k, p->k, inner + r, ACROSS);
        for (; r < rank; r++) shrink(x, a + r * p->k, p->k, inner + r, 1);
        expand(inner, p->b + slot * p->most * p->n, rank, p->n, p->y + i * p->ldy);
    }
}

// y[i] += b[s]^T (a[s] x[i]) for s = slots[i], where that is not negative. x [m, k], y [m, n]; a [slots, most, k] and b [slots, most, n], of
// which ranks[s] rows count. Sums are in float32, in one order for every number of rows.
EXPORT void rz_low_rank(const bf16 *x, long ldx, long m, long k, const bf16 *a, const bf16 *b, long most, long n,
                        const int64_t *ranks, const int64_t *slots, bf16 *y, long ldy) {
    low_rank p = {x, a, b, ranks, slots, y, ldx, ldy, m, k, n, most};
    share(add_rows, &p, (m + ROWS - 1) / ROWS);
}
