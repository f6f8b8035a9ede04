// States that every token of a sequence changes, in float32: those of Mamba 2 and of the gated delta rule. A task is a head of a
// sequence, whose state stays in the first-level cache from token to token; prompts and decodes take the same steps.
#include "common.h"
#include "pool.h"

typedef struct {
    float *states; // [rows, n_heads, height, width]
    const int64_t *rows;
    long length; // tokens of each sequence
    const float *inputs, *b, *c, *decay, *rate;
    float *y;
    long n_heads, height, width;
} scan;

// row = decay * row + input * b; returns the sum of row * c
static inline float decay_row(float *row, float decay, float input, const float *b, const float *c, long n) {
    vec keep = spread(decay), added = spread(input), sum = spread(0);
    for (long j = 0; j < n; j += WIDTH) {
        lanes mask = first_lanes(n - j);
        vec v = fma_of(added, load_tail(b + j, mask), keep * load_tail(row + j, mask));
        store_tail(row + j, v, mask);
        sum = fma_of(v, load_tail(c + j, mask), sum);
    }
    return total_of(sum);
}

// row *= decay; returns the sum of row * b
static inline float recall(float *row, float decay, const float *b, long n) {
    vec keep = spread(decay), sum = spread(0);
    for (long j = 0; j < n; j += WIDTH) {
        lanes mask = first_lanes(n - j);
        vec v = keep * load_tail(row + j, mask);
        store_tail(row + j, v, mask);
        sum = fma_of(v, load_tail(b + j, mask), sum);
    }
    return total_of(sum);
}

static void scan_head(const void *context, long index) {
    const scan *p = context;
    long sequence = index / p->n_heads, head = index % p->n_heads;
    float *state = p->states + (p->rows[sequence] * p->n_heads + head) * p->height * p->width;
    for (long t = sequence * p->length, end = t + p->length; t < end; t++) {
        long at = t * p->n_heads + head;
        const float *b = p->b + at * p->width, *c = p->c + at * p->width, *inputs = p->inputs + at * p->height;
        float decay = p->decay[at], *y = p->y + at * p->height;
        for (long i = 0; i < p->height; i++) {
            float *row = state + i * p->width, input = inputs[i];
            if (p->rate) {
                input = (input - recall(row, decay, b, p->width)) * p->rate[at];
                y[i] = decay_row(row, 1.0f, input, b, c, p->width);
            } else {
                y[i] = decay_row(row, decay, input, b, c, p->width);
            }
        }
    }
}

// For each of `sequences` sequences of `length` tokens, in order: the state of a head becomes decay * state + input (outer) b, and
// y is its product with c. With `rate` (null: none) the input is first corrected by what the decayed state has for b, and
// multiplied by the rate. states [rows, n_heads, height, width], `rows` [sequences] different ones; inputs and y [sequences * length, n_heads,
// height]; b and c [.., n_heads, width]; decay and rate [.., n_heads].
EXPORT void rz_scan(float *states, const int64_t *rows, long sequences, long length, const float *inputs, const float *b,
                    const float *c, const float *decay, const float *rate, float *y, long n_heads, long height, long width) {
    scan p = {states, rows, length, inputs, b, c, decay, rate, y, n_heads, height, width};
    share(scan_head, &p, sequences * n_heads);
}
