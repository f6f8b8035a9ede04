// States that every token of a sequence changes, in float32: those of Mamba and of gated delta rules. A task is a head of a
// sequence, or some channels, whose state stays in the first-level cache from token to token; prompts and decodes take the same steps.
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

// row *= decay; returns sums of row * b
static inline vec recall(float *row, const float *decay, int own, const float *b, long n) {
    vec sum = spread(0);
    for (long j = 0; j < n; j += WIDTH) {
        lanes mask = first_lanes(n - j);
        vec v = decay_of(decay, own, j, mask) * load_tail(row + j, mask);
        store_tail(row + j, v, mask);
        sum = fma_of(v, load_tail(b + j, mask), sum);
    }
    return sum;
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
                input = (input - total_of(recall(row, decay, own, b, p->width))) * p->rate[at];
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
    const bf16 *x, *b, *c, *dt; // [n_tokens, ld]: the inputs of heads or channels, b and c, dt
    long ldx, ldb, ldt;
    const float *rate, *bias, *skip; // of each head or channel
    float least;
    float *states; // [rows, n_heads, height, width], or [rows, n_heads, width] of channels
    const int64_t *rows;
    long length; // tokens of each sequence
    bf16 *y;     // [n_tokens, n_heads, height]
    long n_heads, height, groups, width;
} state_space;

static inline void widen_row(const bf16 *x, float *y, long n) {
    for (long j = 0; j < n; j += WIDTH) store(y + j, load_bf16_tail(x + j, first_lanes(n - j)));
}

static inline float number_of(const bf16 *x) { return load_bf16_tail(x, first_lanes(1))[0]; }

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// One token of a head.
static void advance(const state_space *p, long token, long head, float *state, const float *b, const float *c) {
    float step = softplus(number_of(p->dt + token * p->ldt + head) + p->bias[head]);
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
        widen_row(p->b + t * p->ldb + group * p->width, b, p->width);
        widen_row(p->c + t * p->ldb + group * p->width, c, p->width);
        advance(p, t, head, state, b, c);
    }
}

// Mamba 2. For each of `sequences` sequences of `length` tokens, in order: a head's step is softplus(dt + bias), but at least `least`; its
// state becomes exp(step * rate) * state + step * x (outer) b, and y is its product with c, plus skip * x. Rows of x: the heads' inputs
// [n_heads, height]; of b and c: [groups, width]; heads of a group are neighbours. The other sizes are those of rz_scan.
EXPORT void rz_state_space(const bf16 *x, long ldx, const bf16 *b, const bf16 *c, long ldb, const bf16 *dt, long ldt,
                           const float *rate, const float *bias, const float *skip, float least, float *states,
                           const int64_t *rows, long sequences, long length, bf16 *y, long n_heads, long height, long groups,
                           long width) {
    state_space p = {x, b, c, dt, ldx, ldb, ldt, rate, bias, skip, least, states, rows, length, y, n_heads, height, groups, width};
    share(advance_head, &p, sequences * n_heads);
}

// row = e^(step * rates) * row + input * b; returns sums of row * c
static inline vec decay_channel(float *row, const float *rates, float step, float input, const float *b, const float *c, long n) {
    vec exponent = spread(step * 1.44269504f), added = spread(input), sum = spread(0);
    for (long j = 0; j < n; j += WIDTH) {
        lanes mask = first_lanes(n - j);
        vec decay = exp2_of(exponent * load_tail(rates + j, mask));
        vec v = fma_of(added, load_tail(b + j, mask), decay * load_tail(row + j, mask));
        store_tail(row + j, v, mask);
        sum = fma_of(v, load_tail(c + j, mask), sum);
    }
    return sum;
}

// Channels i and following, as many as a register holds, by one token.
static void advance_channels(const state_space *p, long token, long i, float *states, const float *b, const float *c) {
    lanes mask = first_lanes(p->n_heads - i);
    float steps[WIDTH], inputs[WIDTH];
    vec x = load_bf16_tail(p->x + token * p->ldx + i, mask), sums[WIDTH];
    store(steps, load_bf16_tail(p->dt + token * p->ldt + i, mask) + load_tail(p->bias + i, mask));
    for (long r = 0; r < WIDTH; r++) steps[r] = softplus(steps[r]);
    store(inputs, x * load(steps));
    for (long r = 0; r < WIDTH; r++) {
        long at = (i + r) * p->width;
        sums[r] = i + r < p->n_heads ? decay_channel(states + at, p->rate + at, steps[r], inputs[r], b, c, p->width) : spread(0);
    }
    store_bf16_tail(p->y + token * p->n_heads + i, fma_of(x, load_tail(p->skip + i, mask), totals_of(sums)), mask);
}

#define CHANNELS 128 // channels of a task

static void advance_piece(const void *context, long index) {
    const state_space *p = context;
    long pieces = (p->n_heads + CHANNELS - 1) / CHANNELS, sequence = index / pieces, from = index % pieces * CHANNELS;
    long to = from + CHANNELS < p->n_heads ? from + CHANNELS : p->n_heads;
    float *states = p->states + p->rows[sequence] * p->n_heads * p->width;
    float b[p->width + WIDTH], c[p->width + WIDTH];
    for (long t = sequence * p->length, end = t + p->length; t < end; t++) {
        widen_row(p->b + t * p->ldb, b, p->width);
        widen_row(p->c + t * p->ldb, c, p->width);
        for (long i = from; i < to; i += WIDTH) advance_channels(p, t, i, states, b, c);
    }
}

// Mamba: the same of channels, whose numbers have a rate each. x, dt and y [.., n_channels], b and c [.., width], rates and a row of the
// states [n_channels, width].
EXPORT void rz_channel_space(const bf16 *x, long ldx, const bf16 *b, const bf16 *c, long ldb, const bf16 *dt, long ldt,
                             const float *rates, const float *bias, const float *skip, float *states, const int64_t *rows,
                             long sequences, long length, bf16 *y, long n_channels, long width) {
    state_space p = {x, b, c, dt, ldx, ldb, ldt, rates, bias, skip, 0, states, rows, length, y, n_channels, 1, 1, width};
    share(advance_piece, &p, sequences * ((n_channels + CHANNELS - 1) / CHANNELS));
}

typedef struct {
    const bf16 *x, *dt, *corrected; // x [n_tokens, ldx]: queries and keys of key heads, values of heads; [n_tokens, ldt]
    long ldx, ldt;
    const float *rate, *bias; // [n_heads]
    float *states;            // [rows, n_heads, height, width]
    const int64_t *rows;
    long length; // tokens of each sequence
    bf16 *y;     // [n_tokens, n_heads, height]
    long n_heads, group, height, width;
} delta_rule;

// y = x with the length `length`
static inline void scale_row(const bf16 *x, float *y, long n, float length) {
    vec squares = spread(0);
    for (long j = 0; j < n; j += WIDTH) {
        vec v = load_bf16_tail(x + j, first_lanes(n - j));
        squares = fma_of(v, v, squares);
        store(y + j, v);
    }
    vec scale = spread(length / sqrtf(total_of(squares) + 1e-6f));
    for (long j = 0; j < n; j += WIDTH) store(y + j, load(y + j) * scale);
}

// One token of a head: its values [height] are corrected by what the decayed state has for key k.
static void correct(const delta_rule *p, float *state, float decay, float rate, const bf16 *values, const float *k, const float *q,
                    bf16 *y) {
    const float kept = 1.0f;
    for (long i = 0; i < p->height; i += WIDTH) {
        long n = p->height - i < WIDTH ? p->height - i : WIDTH;
        lanes mask = first_lanes(n);
        float *rows = state + i * p->width, inputs[WIDTH];
        vec sums[WIDTH];
        for (long r = 0; r < WIDTH; r++) sums[r] = r < n ? recall(rows + r * p->width, &decay, 0, k, p->width) : spread(0);
        store(inputs, (load_bf16_tail(values + i, mask) - totals_of(sums)) * spread(rate));
        for (long r = 0; r < WIDTH; r++)
            sums[r] = r < n ? decay_row(rows + r * p->width, &kept, 0, inputs[r], k, q, p->width) : spread(0);
        store_bf16_tail(y + i, totals_of(sums), mask);
    }
}

static void correct_head(const void *context, long index) {
    const delta_rule *p = context;
    long sequence = index / p->n_heads, head = index % p->n_heads, n_keys = p->n_heads / p->group * p->width;
    float *state = p->states + (p->rows[sequence] * p->n_heads + head) * p->height * p->width;
    float q[p->width + WIDTH], k[p->width + WIDTH];
    for (long t = sequence * p->length, end = t + p->length; t < end; t++) {
        const bf16 *x = p->x + t * p->ldx, *query = x + head / p->group * p->width;
        float step = softplus(number_of(p->dt + t * p->ldt + head) + p->bias[head]);
        float rate = 1.0f / (1.0f + expf(-number_of(p->corrected + t * p->ldt + head)));
        scale_row(query, q, p->width, 1.0f / sqrtf((float)p->width));
        scale_row(query + n_keys, k, p->width, 1.0f);
        const bf16 *values = x + 2 * n_keys + head * p->height;
        bf16 *y = p->y + (t * p->n_heads + head) * p->height;
        correct(p, state, expf(step * p->rate[head]), rate, values, k, q, y);
    }
}

// The gated delta rule. For each of `sequences` sequences of `length` tokens, in order: a head's state decays by exp(rate * softplus(dt +
// bias)); a share sigmoid(corrected) of its value, less what the state has for its key, is added (outer) its key; y is the state's product
// with its query. Keys have the length 1, queries width^-0.5. Rows of x: queries and keys [n_heads / group, width] each, values [n_heads,
// height]; those of dt and corrected: [n_heads].
EXPORT void rz_delta_rule(const bf16 *x, long ldx, const bf16 *dt, const bf16 *corrected, long ldt, const float *rate,
                          const float *bias, float *states, const int64_t *rows, long sequences, long length, bf16 *y,
                          long n_heads, long group, long height, long width) {
    delta_rule p = {x, dt, corrected, ldx, ldt, rate, bias, states, rows, length, y, n_heads, group, height, width};
    share(correct_head, &p, sequences * n_heads);
}
