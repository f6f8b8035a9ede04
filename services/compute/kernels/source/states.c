// States that every token of a sequence changes, in float32: those of Mamba 2 and of gated delta rules. A task is a head of a
// sequence, whose state stays in the first-level cache from token to token; prompts and decodes take the same steps.
#include <math.h>

#include "common.h"
#include "pool.h"

typedef struct {
    float *states; // [rows, n_heads, height, width]
    const int64_t *rows;
    long length; // tokens of each sequence
    const float *inputs, *b, *c, *decay, *rate;
    float *y;
    long n_heads, height, width, decays; // `decays`: numbers of a head's decay, 1 or width
} scan;

// The decay of columns j and following: one for all of them, or each its own.
static inline vec decay_of(const float *decay, int own, long j, lanes mask) {
    return own ? load_tail(decay + j, mask) : spread(*decay);
}

// row = decay * row + input * b; returns sums of row * c
static inline vec decay_row(float *row, const float *decay, int own, float input, const float *b, const float *c, long n) {
    vec added = spread(input), sum = spread(0);
    for (long j = 0; j < n; j += WIDTH) {
        lanes mask = first_lanes(n - j);
        vec v = fma_of(added, load_tail(b + j, mask), decay_of(decay, own, j, mask) * load_tail(row + j, mask));
        store_tail(row + j, v, mask);
        sum = fma_of(v, load_tail(c + j, mask), sum);
    }
    return sum;
}

// row *= decay; returns the sum of row * b
static inline float recall(float *row, const float *decay, int own, const float *b, long n) {
    vec sum = spread(0);
    for (long j = 0; j < n; j += WIDTH) {
        lanes mask = first_lanes(n - j);
        vec v = decay_of(decay, own, j, mask) * load_tail(row + j, mask);
        store_tail(row + j, v, mask);
        sum = fma_of(v, load_tail(b + j, mask), sum);
    }
    return total_of(sum);
}

static inline void scan_tokens(const scan *p, long index, int own) {
    const float kept = 1.0f;
    long sequence = index / p->n_heads, head = index % p->n_heads;
    float *state = p->states + (p->rows[sequence] * p->n_heads + head) * p->height * p->width;
    for (long t = sequence * p->length, end = t + p->length; t < end; t++) {
        long at = t * p->n_heads + head;
        const float *b = p->b + at * p->width, *c = p->c + at * p->width, *inputs = p->inputs + at * p->height;
        const float *decay = p->decay + at * p->decays;
        float *y = p->y + at * p->height;
        for (long i = 0; i < p->height; i++) {
            float *row = state + i * p->width, input = inputs[i];
            if (p->rate) {
                input = (input - recall(row, decay, own, b, p->width)) * p->rate[at];
                y[i] = total_of(decay_row(row, &kept, 0, input, b, c, p->width));
            } else {
                y[i] = total_of(decay_row(row, decay, own, input, b, c, p->width));
            }
        }
    }
}

static void scan_head(const void *context, long index) {
    const scan *p = context;
    if (p->decays == 1)
        scan_tokens(p, index, 0);
    else
        scan_tokens(p, index, 1);
}

// For each of `sequences` sequences of `length` tokens, in order: the state of a head becomes decay * state + input (outer) b, and
// y is its product with c. With `rate` (null: none) the input is first corrected by what the decayed state has for b, and
// multiplied by the rate. states [rows, n_heads, height, width], `rows` [sequences] different ones; inputs and y [sequences * length, n_heads,
// height]; b and c [.., n_heads, width]; decay [.., n_heads, decays], where `decays` is 1 or width; rate [.., n_heads].
EXPORT void rz_scan(float *states, const int64_t *rows, long sequences, long length, const float *inputs, const float *b,
                    const float *c, const float *decay, long decays, const float *rate, float *y, long n_heads, long height,
                    long width) {
    scan p = {states, rows, length, inputs, b, c, decay, rate, y, n_heads, height, width, decays};
    share(scan_head, &p, sequences * n_heads);
}

typedef struct {
    const bf16 *x, *dt; // x [n_tokens, ldx]: the heads' inputs, b and c; dt [n_tokens, ldt]
    long ldx, ldt;
    const float *rate, *bias, *skip; // [n_heads]
    float least;
    float *states; // [rows, n_heads, height, width]
    const int64_t *rows;
    long length; // tokens of each sequence
    bf16 *y;     // [n_tokens, n_heads, height]
    long n_heads, height, groups, width;
} state_space;

static inline void widen_row(const bf16 *x, float *y, long n) {
    for (long j = 0; j < n; j += WIDTH) store(y + j, load_bf16_tail(x + j, first_lanes(n - j)));
}

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// One token of a head.
static void advance(const state_space *p, long token, long head, float *state, const float *b, const float *c) {
    float step = softplus(load_bf16_tail(p->dt + token * p->ldt + head, first_lanes(1))[0] + p->bias[head]);
    if (step < p->least) step = p->least;
    float decay = expf(step * p->rate[head]), inputs[WIDTH];
    const bf16 *x = p->x + token * p->ldx + head * p->height;
    bf16 *y = p->y + (token * p->n_heads + head) * p->height;
    for (long i = 0; i < p->height; i += WIDTH) {
        lanes mask = first_lanes(p->height - i);
        vec input = load_bf16_tail(x + i, mask), sums[WIDTH];
        store(inputs, input * spread(step));
        for (long r = 0; r < WIDTH; r++)
            sums[r] = i + r < p->height ? decay_row(state + (i + r) * p->width, &decay, 0, inputs[r], b, c, p->width) : spread(0);
        store_bf16_tail(y + i, fma_of(input, spread(p->skip[head]), totals_of(sums)), mask);
    }
}

static void advance_head(const void *context, long index) {
    const state_space *p = context;
    long sequence = index / p->n_heads, head = index % p->n_heads, group = head / (p->n_heads / p->groups);
    float *state = p->states + (p->rows[sequence] * p->n_heads + head) * p->height * p->width;
    float b[p->width + WIDTH], c[p->width + WIDTH];
    for (long t = sequence * p->length, end = t + p->length; t < end; t++) {
        const bf16 *of_group = p->x + t * p->ldx + p->n_heads * p->height + group * p->width;
        widen_row(of_group, b, p->width);
        widen_row(of_group + p->groups * p->width, c, p->width);
        advance(p, t, head, state, b, c);
    }
}

// Mamba 2. For each of `sequences` sequences of `length` tokens, in order: a head's step is softplus(dt + bias), but at least `least`; its
// state becomes exp(step * rate) * state + step * x (outer) b, and y is its product with c, plus skip * x. Rows of x: the heads' inputs
// [n_heads, height], then b and c [groups, width] each; heads of a group are neighbours. The other sizes are those of rz_scan.
EXPORT void rz_state_space(const bf16 *x, long ldx, const bf16 *dt, long ldt, const float *rate, const float *bias, const float *skip,
                           float least, float *states, const int64_t *rows, long sequences, long length, bf16 *y, long n_heads,
                           long height, long groups, long width) {
    state_space p = {x, dt, ldx, ldt, rate, bias, skip, least, states, rows, length, y, n_heads, height, groups, width};
    share(advance_head, &p, sequences * n_heads);
}
