// Causal convolutions: a filter for each channel over its last inputs, the newest ones of which are a sequence's state. Prompts and
// decodes take the same steps.
#include "common.h"
#include "pool.h"

#define CHANNELS 256      // channels of a task
#define FEW (1 << 14)     // numbers of a sequence that are one task: fewer are not worth waking a thread

typedef struct {
    const bf16 *x; // [sequences * length, ldx]
    long ldx, n;
    int gated;
    const float *taps, *bias; // [kernel, n]; [n] or null
    long kernel;
    bf16 *state; // [rows, kernel - 1, n]
    const int64_t *rows;
    long length; // rows of x of each sequence
    bf16 *y;     // [sequences * length, n]
    long pieces, channels; // tasks of a sequence, and their channels
} convolution;

INLINE vec rounded(vec x) {
    bf16 y[WIDTH];
    store_bf16(y, x);
    return load_bf16(y);
}

INLINE vec filtered(const convolution *p, const vec *window, long j, lanes mask) {
    vec sum = window[0] * load_tail(p->taps + j, mask);
    for (long k = 1; k < p->kernel; k++) sum = fma_of(window[k], load_tail(p->taps + k * p->n + j, mask), sum);
    if (p->bias) sum += load_tail(p->bias + j, mask);
    return sum;
}

// Channels j and following of all rows of a sequence.
static void convolve_channels(const convolution *p, long sequence, long j, lanes mask) {
    long before = p->kernel - 1;
    vec window[p->kernel];
    bf16 *state = p->state + p->rows[sequence] * before * p->n + j;
    for (long k = 0; k < before; k++) window[k] = load_bf16_tail(state + k * p->n, mask);
    for (long t = sequence * p->length, end = t + p->length; t < end; t++) {
        const bf16 *x = p->x + t * p->ldx + j;
        vec y;
        window[before] = load_bf16_tail(x, mask);
        if (p->gated) {
            window[before] = rounded(window[before] * load_bf16_tail(x + 2 * p->n, mask));
            y = rounded(filtered(p, window, j, mask)) * load_bf16_tail(x + p->n, mask);
        } else {
            y = filtered(p, window, j, mask);
            y *= sigmoid_of(y);
        }
        store_bf16_tail(p->y + t * p->n + j, y, mask);
        for (long k = 0; k < before; k++) window[k] = window[k + 1];
    }
    for (long k = 0; k < before; k++) store_bf16_tail(state + k * p->n, window[k], mask);
}

static void convolve(const void *context, long index) {
    const convolution *p = context;
    long from = index % p->pieces * p->channels, to = from + p->channels < p->n ? from + p->channels : p->n;
    for (long j = from; j < to; j += WIDTH) convolve_channels(p, index / p->pieces, j, first_lanes(p->n - j));
}

// For each of `sequences` sequences of `length` rows, in order: y = silu(conv(x)) of rows x [.., n] or, `gated`, c * conv(b * x) of rows
// [.., 3 n] with b, c, x. conv: the sum of a channel's last `kernel` inputs times taps [kernel, n], oldest first, plus bias [n] (null: none).
// state [rows, kernel - 1, n]: the inputs before; `rows` [sequences] are different ones. y [sequences * length, n].
EXPORT void rz_convolve(const bf16 *x, long ldx, long n, int gated, const float *taps, const float *bias, long kernel, bf16 *state,
                        const int64_t *rows, long sequences, long length, bf16 *y) {
    long channels = length * n <= FEW
    ? n : CHANNELS, pieces = (n + channels - 1) / channels;
    convolution p = {x, ldx, n, gated, taps, bias, kernel, state, rows, length, y, pieces, channels};
    share(convolve, &p, sequences * pieces);
}
