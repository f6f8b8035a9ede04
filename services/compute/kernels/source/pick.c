// The best tokens and the mass of a row of logits, for filters and log-probabilities. A row's length is a multiple of 16.
#include "order.h"

#define BLOCK 64 // columns of a block, which is searched only if its best column is good enough

typedef struct {
    const float *logits; // [rows, ld]
    long ld, n, width;
    int64_t first_id; // token id of column 0
    int64_t *keys;    // [rows, width]
    float *mass;      // [rows]
} picks;

// Moves the first of `n` keys down the heap until no child is less than its parent.
static inline void sink(int64_t *heap, long n) {
    int64_t key = heap[0];
    long i = 0;
    for (long child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && heap[child + 1] < heap[child]) child++;
        if (key <= heap[child]) break;
        heap[i] = heap[child];
    }
    heap[i] = key;
}

static inline void offer(int64_t *heap, long n, int64_t key) {
    if (key <= heap[0]) return;
    heap[0] = key;
    sink(heap, n);
}

static inline long columns_of(const picks *p, long block) {
    long left = p->n - block * BLOCK;
    return left < BLOCK ? left : BLOCK;
}

static inline int32_t highest_of(const float *x, long n) {
    ints most = ordered(load(x));
    for (long j = WIDTH; j < n; j += WIDTH) {
        ints value = ordered(load(x + j));
        most = choose(value > most, value, most);
    }
    int32_t found = most[0];
    for (int j = 1; j < WIDTH; j++) found = most[j] > found ? most[j] : found;
    return found;
}

// Keeps a heap of the best keys so far, the least first. The blocks' best columns enter first, so that most blocks are worse
// than the heap's least key and are skipped.
static void pick_row(const void *context, long i) {
    const picks *p = context;
    const float *logits = p->logits + i * p->ld;
    int64_t *heap = p->keys + i * p->width;
    for (long j = 0; j < p->width; j++) heap[j] = INT64_MIN;
    for (long b = 0; b * BLOCK < p->n; b++)
        offer(heap, p->width, key_of(highest_of(logits + b * BLOCK, columns_of(p, b)), b));
    int64_t least = (heap[0] >> 32) * (1L << 32); // the least key of the same value
    for (long j = 0; j < p->width; j++) heap[j] = INT64_MIN;
    for (long b = 0; b * BLOCK < p->n; b++) {
        int32_t top = highest_of(logits + b * BLOCK, columns_of(p, b));
        if (top < (int32_t)(least >> 32) || top <= (int32_t)(heap[0] >> 32)) continue;
        for (long j = b * BLOCK, end = j + columns_of(p, b); j < end; j += WIDTH) {
            ints values = ordered(load(logits + j));
            for (int k = 0; k < WIDTH; k++) {
                int64_t key = key_of(values[k], p->first_id + j + k);
                if (key >= least) offer(heap, p->width, key);
            }
        }
    }
}

// log(sum(exp(x)))
static void weigh_row(const void *context, long i) {
    const picks *p = context;
    const float *logits = p->logits + i * p->ld;
    vec highest = spread(-INFINITY), sum = spread(0.0f);
    for (long j = 0; j < p->n; j += WIDTH) highest = larger_of(load(logits + j), highest);
    float most = largest_of(highest);
    for (long j = 0; j < p->n; j += WIDTH) sum += exp2_of((load(logits + j) - spread(most)) * spread(1.44269504f));
    p->mass[i] = most == -INFINITY ? most : most + logf(total_of(sum));
}

// Writes the keys [m, width] of the best columns of logits [m, n], the least of a row first.
EXPORT void rz_pick(const float *logits, long ld, long m, long n, long first_id, long width, int64_t *keys) {
    picks p = {logits, ld, n, width, first_id, keys, 0};
    share(pick_row, &p, m);
}

// Writes the mass [m] of logits [m, n].
EXPORT void rz_weigh(const float *logits, long ld, long m, long n, float *mass) {
    picks p = {logits, ld, n, 0, 0, 0, mass};
    share(weigh_row, &p, m);
}
