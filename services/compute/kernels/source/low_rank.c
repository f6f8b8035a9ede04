// The sum that adapters add to the outputs of a linear layer: a product with two narrow matrices, of each row's own adapter.
// Rows of one adapter are computed together, since reading and widening its factors takes longer than the products.
#include "common.h"
#include "pool.h"

#define TILE (REGISTERS / 8) // rows of a task, all of one adapter
#define ACROSS 4             // registers of sums for a row: enough to hide the latency of an addition
#define PIECE 4096           // rows that are sorted at a time

typedef struct {
    const bf16 *x, *a, *b;
    const int64_t *ranks, *slots;
    bf16 *y;
    long ldx, ldy, k, n, most;
    const int32_t *order, *tiles; // rows with an adapter, by slot; the place there of each tile's first row, and the end
} low_rank;

typedef struct {
    const bf16 *x[TILE];
    bf16 *y[TILE];
} tile;

// inner [n_rows, most] = products of the rows' x [k] with `width` rows of `a`.
INLINE void shrink(const tile *t, const bf16 *a, long k, float *inner, long most, int n_rows, int width) {
    vec sums[TILE][ACROSS], input[TILE];
    for (int i = 0; i < n_rows; i++)
        for (int r = 0; r < width; r++) sums[i][r] = spread(0);
    long whole = k / WIDTH * WIDTH;
    for (long j = 0; j < whole; j += WIDTH) {
        for (int i = 0; i < n_rows; i++) input[i] = load_bf16(t->x[i] + j);
        for (int r = 0; r < width; r++) {
            vec factor = load_bf16(a + r * k + j);
            for (int i = 0; i < n_rows; i++) sums[i][r] = fma_of(input[i], factor, sums[i][r]);
        }
    }
    if (whole < k) {
        lanes mask = first_lanes(k - whole);
        for (int i = 0; i < n_rows; i++) input[i] = load_bf16_tail(t->x[i] + whole, mask);
        for (int r = 0; r < width; r++) {
            vec factor = load_bf16_tail(a + r * k + whole, mask);
            for (int i = 0; i < n_rows; i++) sums[i][r] = fma_of(input[i], factor, sums[i][r]);
        }
    }
    for (int i = 0; i < n_rows; i++)
        for (int r = 0; r < width; r++) inner[i * most + r] = total_of(sums[i][r]);
}

// y [n] += b^T inner for each row, with one rounding; b [rank, n].
INLINE void expand(const float *inner, const bf16 *b, long rank, long most, long n, const tile *t, int n_rows) {
    long j = 0;
    for (; j + ACROSS * WIDTH <= n; j += ACROSS * WIDTH) {
        vec sums[TILE][ACROSS];
        for (int i = 0; i < n_rows; i++)
            for (int r = 0; r < ACROSS; r++) sums[i][r] = spread(0);
        for (long at = 0; at < rank; at++) {
            vec factors[TILE];
            for (int i = 0; i < n_rows; i++) factors[i] = spread(inner[i * most + at]);
            for (int r = 0; r < ACROSS; r++) {
                vec column = load_bf16(b + at * n + j + r * WIDTH);
                for (int i = 0; i < n_rows; i++) sums[i][r] = fma_of(factors[i], column, sums[i][r]);
            }
        }
        for (int i = 0; i < n_rows; i++)
            for (int r = 0; r < ACROSS; r++) {
                bf16 *to = t->y[i] + j + r * WIDTH;
                store_bf16(to, load_bf16(to) + sums[i][r]);
            }
    }
    for (; j < n; j += WIDTH) {
        lanes mask = first_lanes(n - j);
        vec sums[TILE];
        for (int i = 0; i < n_rows; i++) sums[i] = spread(0);
        for (long at = 0; at < rank; at++) {
            vec column = load_bf16_tail(b + at * n + j, mask);
            for (int i = 0; i < n_rows; i++) sums[i] = fma_of(spread(inner[i * most + at]), column, sums[i]);
        }
        for (int i = 0; i < n_rows; i++) {
            bf16 *to = t->y[i] + j;
            store_bf16_tail(to, load_bf16_tail(to, mask) + sums[i], mask);
        }
    }
}

INLINE void add_rows(const low_rank *p, const tile *t, long slot, int n_rows) {
    float inner[TILE * p->most];
    long rank = p->ranks[slot], r = 0;
    const bf16 *a = p->a + slot * p->most * p->k;
    for (; r + ACROSS <= rank; r += ACROSS) shrink(t, a + r * p->k, p->k, inner + r, p->most, n_rows, ACROSS);
    for (; r < rank; r++) shrink(t, a + r * p->k, p->k, inner + r, p->most, n_rows, 1);
    expand(inner, p->b + slot * p->most * p->n, rank, p->most, p->n, t, n_rows);
}

static void add_tile(const void *context, long index) {
    const low_rank *p = context;
    const int32_t *order = p->order + p->tiles[index];
    int n_rows = p->tiles[index + 1] - p->tiles[index];
    tile t;
    for (int i = 0; i < n_rows; i++) t.x[i] = p->x + order[i] * p->ldx, t.y[i] = p->y + order[i] * p->ldy;
    long slot = p->slots[order[0]];
    switch (n_rows) { // the compiler keeps the sums of a fixed number of rows in registers
    case 1: return add_rows(p, &t, slot, 1);
    case 2: return add_rows(p, &t, slot, 2);
#if TILE > 2
    case 3: return add_rows(p, &t, slot, 3);
    case 4: return add_rows(p, &t, slot, 4);
#endif
    }
}

// Sorts the rows [first, end) that have an adapter by slot, and cuts them into tiles; returns the number of tiles.
static long sort_rows(const low_rank *p, long first, long end, int32_t *order, int32_t *tiles) {
    int64_t last = -1;
    for (long i = first; i < end; i++)
        if (p->slots[i] > last) last = p->slots[i];
    int32_t places[last + 2], n_tiles = 0; // the next place of a slot's rows
    memset(places, 0, sizeof places);
    for (long i = first; i < end; i++)
        if (p->slots[i] >= 0 && p->ranks[p->slots[i]]) places[p->slots[i] + 1]++;
    for (int64_t slot = 0; slot <= last; slot++) {
        for (int32_t at = 0; at < places[slot + 1]; at += TILE) tiles[n_tiles++] = places[slot] + at;
        places[slot + 1] += places[slot];
    }
    tiles[n_tiles] = places[last + 1];
    for (long i = first; i < end; i++)
        if (p->slots[i] >= 0 && p->ranks[p->slots[i]]) order[places[p->slots[i]]++] = (int32_t)i;
    return n_tiles;
}

// y[i] += b[s]^T (a[s] x[i]) for s = slots[i], where that is not negative. x [m, k], y [m, n]; a [slots, most, k] and b [slots, most, n], of
// which ranks[s] rows count. Sums are in float32, in one order for every number of rows.
EXPORT void rz_low_rank(const bf16 *x, long ldx, long m, long k, const bf16 *a, const bf16 *b, long most, long n,
                        const int64_t *ranks, const int64_t *slots, bf16 *y, long ldy) {
    int32_t order[PIECE], tiles[PIECE + 1];
    low_rank p = {x, a, b, ranks, slots, y, ldx, ldy, k, n, most, order, tiles};
    for (long first = 0; first < m; first += PIECE) {
        long end = first + PIECE < m ? first + PIECE : m, n_tiles = sort_rows(&p, first, end, order, tiles);
        if (n_tiles) share(add_tile, &p, n_tiles);
    }
}
