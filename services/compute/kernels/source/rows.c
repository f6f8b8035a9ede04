// Operations on single rows of activations: norms, rotary positions, gates, the cache. The operations that take long in a
// prompt's step are shared between threads.
#include <float.h>

#include "codes.h"
#include "packed.h"
#include "shorts.h"

#define PIECE 32           // rows of a task; fewer rows are not worth waking a thread
#define ELEMENTS (1 << 16) // elements of a task of an operation without rows

static inline void share_pieces(task work, const void *context, long n, long piece) {
    share(work, context, (n + piece - 1) / piece);
}

static inline long end_of_piece(long index, long n, long piece) {
    long end = (index + 1) * piece;
    return end < n ? end : n;
}

static inline float sum_of_squares(const bf16 *x, long n) {
    vec sum = spread(0);
    for (long j = 0; j < n; j += WIDTH) {
        vec v = load_bf16_tail(x + j, first_lanes(n - j));
        sum = fma_of(v, v, sum);
    }
    return total_of(sum);
}

typedef struct {
    const bf16 *x;
    bf16 *y;
    const float *weight;
    long ldx, ldy, groups, m, n;
    float eps;
} norm;

static void normalize(const void *context, long index) {
    const norm *p = context;
    for (long i = index * PIECE, end = end_of_piece(index, p->m, PIECE); i < end; i++)
        for (long g = 0; g < p->groups; g++) {
            const bf16 *from = p->x + i * p->ldx + g * p->n;
            const float *weight = p->weight + g * p->n;
            bf16 *to = p->y + i * p->ldy + g * p->n;
            vec scale = spread(1.0f / sqrtf(sum_of_squares(from, p->n) / (float)p->n + p->eps));
            for (long j = 0; j < p->n; j += WIDTH) {
                lanes mask = first_lanes(p->n - j);
                store_bf16_tail(to + j, load_bf16_tail(from + j, mask) * scale * load_tail(weight + j, mask), mask);
            }
        }
}

// y = x / sqrt(mean(x^2) + eps) * weight over the last dimension; weight [groups, n], row i uses group i % groups.
EXPORT void rz_rms_norm(const bf16 *x, long ldx, const float *weight, long groups, float eps, bf16 *y, long ldy, long m,
                        long n) {
    norm p = {x, y, weight, ldx, ldy, groups, m, n, eps};
    share_pieces(normalize, &p, m, PIECE);
}

typedef struct {
    bf16 *x;
    const bf16 *added;
    float scale;
    long count;
} addition;

static void add(const void *context, long index) {
    const addition *p = context;
    vec factor = spread(p->scale);
    for (long j = index * ELEMENTS, end = end_of_piece(index, p->count, ELEMENTS); j < end; j += WIDTH) {
        lanes mask = first_lanes(end - j);
        vec v = fma_of(load_bf16_tail(p->added + j, mask), factor, load_bf16_tail(p->x + j, mask));
        store_bf16_tail(p->x + j, v, mask);
    }
}

// x += scale * added, both [m, n]
EXPORT void rz_add(bf16 *x, const bf16 *added, float scale, long m, long n) {
    addition p = {x, added, scale, m * n};
    share_pieces(add, &p, p.count, ELEMENTS);
}

typedef struct {
    bf16 *x;
    const float *cos, *sin;
    const int64_t *positions;
    long ldx, heads, head_dim, half, m;
} rotation;

static void rotate(const void *context, long index) {
    const rotation *p = context;
    for (long i = index * PIECE, end = end_of_piece(index, p->m, PIECE); i < end; i++)
        for (long h = 0; h < p->heads; h++) {
            bf16 *a = p->x + i * p->ldx + h * p->head_dim, *b = a + p->half;
            const float *c = p->cos + p->positions[i] * p->half, *s = p->sin + p->positions[i] * p->half;
            for (long j = 0; j < p->half; j += WIDTH) {
                lanes mask = first_lanes(p->half - j);
                vec va = load_bf16_tail(a + j, mask), vb = load_bf16_tail(b + j, mask);
                vec vc = load_tail(c + j, mask), vs = load_tail(s + j, mask);
                store_bf16_tail(a + j, fma_of(-vb, vs, va * vc), mask);
                store_bf16_tail(b + j, fma_of(va, vs, vb * vc), mask);
            }
        }
}

// Rotates the first 2 * half elements of every head in place: (a, b) -> (a cos - b sin, b cos + a sin).
// cos, sin: [positions, half] float32; row i uses their row positions[i].
EXPORT void rz_rotate(bf16 *x, long ldx, long heads, long head_dim, const float *cos, const float *sin, long half,
                      const int64_t *positions, long m) {
    rotation p = {x, cos, sin, positions, ldx, heads, head_dim, half, m};
    share_pieces(rotate, &p, m, PIECE);
}

// cache[slots[i]] = x[i], rows of `width` elements
EXPORT void rz_write_rows(bf16 *cache, const int64_t *slots, const bf16 *x, long ldx, long width, long m) {
    for (long i = 0; i < m; i++) memcpy(cache + slots[i] * width, x + i * ldx, width * sizeof(bf16));
}

typedef struct {
    int8_t *cache;
    const int64_t *slots;
    const bf16 *x;
    long ldx, heads, head_dim, block_tokens, m;
} coding;

// The scale of numbers whose largest size has the bits `bits`; where it is subnormal it is zero, where a number is not finite it
// is not.
static inline bf16 scale_of(uint32_t bits, float *scale) {
    memcpy(scale, &bits, sizeof bits);
    *scale *= 1.0f / LARGEST_CODE;
    memcpy(&bits, scale, sizeof bits);
    bits = *scale < FLT_MIN ? 0 : (bits + (bits >> 16 & 1) + 0x7FFF) & 0xFFFF0000; // rounded like round_bf16
    memcpy(scale, &bits, sizeof bits);
    return bits >> 16;
}

static inline void code_head(const bf16 *x, long n, int is_key, int8_t *codes, bf16 *scale) {
    float numbers[LONGEST_HEAD + WIDTH], step;
    uint32_t largest = 0, size; // sizes of floats are in the order of their bits; NaN is the largest
    for (long j = 0; j < n; j += WIDTH) store(numbers + j, load_bf16_tail(x + j, first_lanes(n - j)));
    if (is_key) rotate_head(numbers, n);
    for (long j = 0; j < n; j++) {
        memcpy(&size, numbers + j, sizeof size);
        largest = (size & 0x7FFFFFFF) > largest ? size & 0x7FFFFFFF : largest;
    }
    *scale = scale_of(largest, &step);
    if (!(step > 0 && step <= FLT_MAX)) {
        memset(codes, 0, n);
        return;
    }
    vec inverse = spread(1.0f / step);
    for (long j = 0; j < n; j += WIDTH) {
        int8_t part[WIDTH];
        store_codes(part, load(numbers + j) * inverse);
        memcpy(codes + j, part, n - j < WIDTH ? n - j : WIDTH);
    }
}

static void code_rows(const void *context, long index) {
    const coding *p = context;
    long run = bytes_of_run(p->block_tokens, p->head_dim);
    for (long i = index * PIECE, end = end_of_piece(index, p->m, PIECE); i < end; i++) {
        long block = p->slots[i] / p->block_tokens, place = p->slots[i] - block * p->block_tokens;
        int8_t *to = p->cache + block * p->heads * run;
        for (long h = 0; h < p->heads; h++, to += run)
            code_head(p->x + i * p->ldx + h * p->head_dim, p->head_dim, h < p->heads / 2, to + place * p->head_dim,
                      (bf16 *)(to + p->block_tokens * p->head_dim) + place);
    }
}

// Writes rows x [m, heads * head_dim], keys, then values, to the positions `slots` [m] of a cache as in codes.h; head_dim is at most 256,
// block_tokens even.
EXPORT void rz_write_int8(int8_t *cache, const int64_t *slots, const bf16 *x, long ldx, long heads, long head_dim,
                          long block_tokens, long m) {
    coding p = {cache, slots, x, ldx, heads, head_dim, block_tokens, m};
    share_pieces(code_rows, &p, m, PIECE);
}

typedef struct {
    const bf16 *packed;
    const int64_t *rows;
    bf16 *y;
    long k, m;
} lookup;

static void look_up(const void *context, long index) {
    const lookup *p = context;
    for (long i = index * PIECE, end = end_of_piece(index, p->m, PIECE); i < end; i++)
        unpack_row(p->packed, p->rows[i], p->k, p->y + i * p->k);
}

// y[i] = row rows[i] of a weight packed by rz_pack_weight: [m, k]
EXPORT void rz_unpack_rows(const bf16 *packed, long k, const int64_t *rows, bf16 *y, long m) {
    lookup p = {packed, rows, y, k, m};
    share_pieces(look_up, &p, m, PIECE);
}

static inline vec silu(vec x) { return x * sigmoid_of(x); }

static inline vec gelu_tanh(vec x) { // x (1 + tanh(u)) / 2 = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
    vec cubic = fma_of(x * x, spread(0.044715f), spread(1.0f));
    vec u2 = x * cubic * spread(1.59576912f);
    return x * sigmoid_of(u2);
}

typedef struct {
    const bf16 *x;
    bf16 *y;
    long m, n, piece;
    int tanh;
} gating;

static void gate(const void *context, long index) {
    const gating *p = context;
    for (long i = index * p->piece, end = end_of_piece(index, p->m, p->piece); i < end; i++)
        for (long j = 0; j < p->n; j += WIDTH) {
            lanes mask = first_lanes(p->n - j);
            const bf16 *x = p->x + i * 2 * p->n + j;
            vec g = load_bf16_tail(x, mask), up = load_bf16_tail(x + p->n, mask);
            store_bf16_tail(p->y + i * p->n + j, (p->tanh ? gelu_tanh(g) : silu(g)) * up, mask);
        }
}

// y [m, n] = act(gate) * up of x [m, 2 n] = (gate, up); `tanh`: gelu_tanh instead of silu
EXPORT void rz_gate(const bf16 *x, bf16 *y, long m, long n, int tanh) {
    long piece = m * n < ELEMENTS / 2 ? PIECE : 4; // long rows are worth it when they are few
    gating p = {x, y, m, n, piece, tanh};
    share_pieces(gate, &p, m, piece);
}

typedef struct {
    const bf16 *x, *z;
    const float *weight;
    bf16 *y;
    long ldx, ldz, groups, n, m;
    float eps;
    int outside, sigmoid;
} gated_norm;

static inline vec curve(const gated_norm *p, vec z) { return p->sigmoid ? sigmoid_of(z) : silu(z); }

static void normalize_gated(const gated_norm *p, const bf16 *x, const bf16 *z, const float *weight, bf16 *y) {
    float rows[p->n + WIDTH];
    vec squares = spread(0);
    for (long j = 0; j < p->n; j += WIDTH) {
        lanes mask = first_lanes(p->n - j);
        vec v = load_bf16_tail(x + j, mask);
        if (!p->outside) v *= curve(p, load_bf16_tail(z + j, mask));
        squares = fma_of(v, v, squares);
        store(rows + j, v);
    }
    vec scale = spread(weight ? 1.0f / sqrtf(total_of(squares) / (float)p->n + p->eps) : 1.0f);
    for (long j = 0; j < p->n; j += WIDTH) {
        lanes mask = first_lanes(p->n - j);
        vec v = load(rows + j) * scale;
        if (weight) v *= load_tail(weight + j, mask);
        if (p->outside) v *= curve(p, load_bf16_tail(z + j, mask));
        store_bf16_tail(y + j, v, mask);
    }
}

static void gate_norm(const void *context, long index) {
    const gated_norm *p = context;
    for (long i = index * PIECE, end = end_of_piece(index, p->m, PIECE); i < end; i++)
        for (long g = 0; g < p->groups; g++) {
            long at = g * p->n;
            normalize_gated(p, p->x + i * p->ldx + at, p->z + i * p->ldz + at, p->weight ? p->weight + at : 0, p->y + i * p->groups * p->n + at);
        }
}

// y = norm(x * silu(z)) or, `outside`, norm(x) * silu(z), of x, y and z [m, groups * n]. norm: rz_rms_norm's of each group, with weight
// [groups * n]; without a weight (null), there is none. `sigmoid`: that of z takes the place of silu.
EXPORT void rz_gated_norm(const bf16 *x, long ldx, const bf16 *z, long ldz, const float *weight, long groups, float eps, int outside,
                          int sigmoid, bf16 *y, long m, long n) {
    gated_norm p = {x, z, weight, y, ldx, ldz, groups, n, m, eps, outside, sigmoid};
    share_pieces(gate_norm, &p, m, PIECE);
}
