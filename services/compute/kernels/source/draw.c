// Draws a token for every row of logits: the best of logit / temperature + noise, or the best logit at temperature 0.
// The noise is that of backends/noise.py, except for rounding; the keys are those of backends/keys.py.
#include "order.h"

typedef uint32_t words __attribute__((vector_size(4 * WIDTH)));

typedef struct {
    const float *logits; // [rows, ld]
    long ld, n;          // n: a multiple of 16
    int64_t first_id;    // token id of column 0
    const float *temperature;
    const uint64_t *seeds;
    const int64_t *positions;
    int64_t *keys;
} draws;

// log(1 + r) / r for 1 + r in [sqrt(1/2), sqrt(2)): a minimax polynomial, relative error 3e-8.
static inline vec log1p_ratio(vec r) {
    vec p = spread(8.7226301e-2f);
    p = fma_of(p, r, spread(-1.4367026e-1f));
    p = fma_of(p, r, spread(1.4952256e-1f));
    p = fma_of(p, r, spread(-1.6562369e-1f));
    p = fma_of(p, r, spread(1.9956832e-1f));
    p = fma_of(p, r, spread(-2.5002074e-1f));
    p = fma_of(p, r, spread(3.3334187e-1f));
    p = fma_of(p, r, spread(-4.9999988e-1f));
    return fma_of(p, r, spread(1.0f));
}

#define SQRT_HALF 0x3F3504F3 // bits of sqrt(1/2)

// log(x) of a positive normal x; where `near` is set (all bits or none), log(1 + r) instead, of which x is the rounded 1 + r.
static inline vec log_of(vec x, ints near, vec r) {
    ints from_half = (ints)x - SQRT_HALF;
    vec exponent = __builtin_convertvector(choose(near, spread_int(0), from_half >> 23), vec);
    vec mantissa = (vec)((from_half & 0x7FFFFF) + SQRT_HALF);
    r = (vec)choose(near, (ints)r, (ints)(mantissa - spread(1.0f)));
    return fma_of(exponent, spread(0.69314718f), r * log1p_ratio(r));
}

// -log(-log(1 - u)), where the uniform u is a hash of key and token id.
static inline vec gumbel(ints ids, uint64_t key) {
    words x = ((words)ids * 0x9E3779B1u) ^ (uint32_t)key;
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x += (uint32_t)(key >> 32);
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    x ^= x >> 16;
    vec uniform = (__builtin_convertvector((ints)(x & 0x7FFFFFFFu), vec) + spread(0.5f)) * spread(0x1p-31f);
    ints is_one = (ints)uniform == (ints)spread(1.0f);
    uniform = (vec)choose(is_one, (ints)spread(0x1.FFFFFEp-1f), (ints)uniform);
    // The winners have a small u, whose precision 1 - u would lose.
    ints small = (ints)uniform < (ints)spread(0.25f); // positive floats have the order of their bits
    vec exponential = -log_of(spread(1.0f) - uniform, small, -uniform);
    return -log_of(exponential, spread_int(0), spread(0.0f));
}

static inline uint64_t splitmix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static void draw_row(const void *context, long i) {
    const draws *d = context;
    const float *logits = d->logits + i * d->ld;
    float temperature = d->temperature[i];
    uint64_t key = splitmix(splitmix(d->seeds[i]) ^ (uint64_t)d->positions[i]);
    ints columns = counted(), best = spread_int(INT32_MIN), at = columns;
    for (long j = 0; j < d->n; j += WIDTH, columns += WIDTH) {
        vec score = load(logits + j);
        if (temperature > 0) score = score / spread(temperature) + gumbel(columns + (int32_t)d->first_id, key);
        ints value = ordered(score), better = value > best;
        best = choose(better, value, best);
        at = choose(better, columns, at);
    }
    int first = 0;
    for (int j = 1; j < WIDTH; j++)
        if (best[j] > best[first] || (best[j] == best[first] && at[j] < at[first])) first = j;
    d->keys[i] = key_of(best[first], d->first_id + at[first]);
}

// keys [m] of logits [m, n]; temperature, seeds and positions [m]
EXPORT void rz_draw(const float *logits, long ld, long m, long n, long first_id, const float *temperature,
                    const uint64_t *seeds, const int64_t *positions, int64_t *keys) {
    draws d = {logits, ld, n, first_id, temperature, seeds, positions, keys};
    share(draw_row, &d, m);
}
