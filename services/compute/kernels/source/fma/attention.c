// Attention over the paged cache in float32, by multiply-add, for AVX2, AVX-512 and NEON, with an online softmax (Milakov &
// Gimelshein, arXiv:1805.02867).
//
// A lane is one query head of one row. Keys are processed in blocks of 16, counted from the sequence's start. Every sum belongs
// to one lane and has a fixed order: over head_dim in WIDTH partial sums, over keys one after the other. Masked keys add exact
// zeros. So a lane's bits depend neither on the other lanes nor on how rows are divided into steps.
//
// A register of bfloat16 becomes two registers of floats, the even and the odd numbers, with one instruction each; keeping the
// order would take two. Queries, keys, values and sums use this order; only the output is reordered.
#include "order.h"
#include "lanes.h"

#define KEYS 16
#define SUMS (WIDTH > 4 ? WIDTH : 16)   // sums of products of lanes and keys that are computed together
#define COLUMNS (WIDTH > 4 ? 2 : 4)     // registers of values that four lanes use together
#define FEW 8 // up to this many lanes, keys and values are read only once or twice and are not stored as floats
#define ALIGNED _Alignas(64) // a load that crosses a cache line takes twice as long

typedef struct {
    ALIGNED float queries[LANES * MAX_HEAD_DIM], found[LANES * MAX_HEAD_DIM]; // [lanes, padded head_dim]
    float scores[LANES][KEYS];
    float top[LANES], total[LANES], shrink[LANES];
    const tile_lanes *lanes;
    int half; // the cache holds bfloat16, not float32
} tile;

typedef struct {
    const void *keys[KEYS], *values[KEYS];      // rows of `wide` or of the cache
    ALIGNED float wide[2][KEYS * MAX_HEAD_DIM]; // bfloat16 keys and values as float32
} block;

// Number of floats that a head occupies: zeros fill the last register of the cache's numbers.
INLINE long padded(const layer *a) {
    long step = a->size == sizeof(bf16) ? 2 * WIDTH : WIDTH;
    return (a->head_dim + step - 1) & -step;
}

// Stores the numbers of a head as floats in y.
INLINE void take_head(const layer *a, const void *x, long at, int half, float *y) {
    const float *whole = (const float *)x + at;
    const bf16 *halves = (const bf16 *)x + at;
    long j = 0, step = half ? 2 * WIDTH : WIDTH, rest = a->head_dim % step;
    for (; j + step <= a->head_dim; j += step) {
        store(y + j, half ? load_part(halves + j, 0) : load(whole + j));
        if (half) store(y + j + WIDTH, load_part(halves + j, 1));
    }
    if (!rest) return;
    store(y + j, half ? load_part_tail(halves + j, 0, rest) : load_tail(whole + j, first_lanes(rest)));
    if (half) store(y + j + WIDTH, load_part_tail(halves + j, 1, rest));
}

// Loads scaled queries; the scale includes the change to base 2 unless a softcap follows.
static void take_queries(const layer *a, tile *t) {
    const tile_lanes *l = t->lanes;
    long size = padded(a);
    vec scale = spread(a->softcap ? a->scale / a->softcap : a->scale * 1.44269504f);
    for (long lane = 0; lane < l->n; lane++) {
        float *query = t->queries + lane * size;
        take_head(a, a->q, l->row[lane] * a->ldq + l->head[lane] * a->head_dim, t->half, query);
        for (long j = 0; j < size; j += WIDTH) store(query + j, load(query + j) * scale);
        t->top[lane] = -INFINITY;
        t->total[lane] = 0;
    }
    long filled = l->n % 4 == 3 ? l->n + 1 : l->n;
    if (filled > l->n) { // a fourth lane of zeros fills the group
        memset(t->queries + l->n * size, 0, size * sizeof(float));
        memset(t->scores[l->n], 0, sizeof t->scores[0]);
        t->shrink[l->n] = 0;
    }
    memset(t->found, 0, filled * size * sizeof(float));
}

// Register `i` of a row of floats, or of bfloat16 if `in_bf16`.
INLINE vec load_of(const void *row, long i, int in_bf16) {
    return in_bf16 ? load_part((const bf16 *)row + i / 2 * 2 * WIDTH, i % 2) : load((const float *)row + i * WIDTH);
}

// Adds the products of register `i` of queries and keys to sums[lane][key].
INLINE void multiply(const float *queries, const void *const *keys, long size, long i, int lanes, int in_bf16, vec *sums) {
    vec q[4];
    int n = SUMS / lanes;
#pragma GCC unroll 16
    for (int lane = 0; lane < lanes; lane++) q[lane] = load(queries + lane * size + i * WIDTH);
#pragma GCC unroll 16
    for (int key = 0; key < n; key++) {
        vec k = load_of(keys[key], i, in_bf16);
#pragma GCC unroll 16
        for (int lane = 0; lane < lanes; lane++) sums[lane * n + key] = fma_of(q[lane], k, sums[lane * n + key]);
    }
}

INLINE void dots(const float *queries, const void *const *keys, long size, int lanes, int in_bf16, float (*scores)[KEYS]) {
    vec sums[SUMS], totals[SUMS / WIDTH];
    int n = SUMS / lanes;
    long i = 0;
#pragma GCC unroll 16
    for (int s = 0; s < SUMS; s++) sums[s] = spread(0);
    for (; i + 2 <= size / WIDTH; i += 2) {
        multiply(queries, keys, size, i, lanes, in_bf16, sums);
        multiply(queries, keys, size, i + 1, lanes, in_bf16, sums);
    }
    if (i < size / WIDTH) multiply(queries, keys, size, i, lanes, in_bf16, sums);
    for (int i = 0; i < SUMS / WIDTH; i++) totals[i] = totals_of(sums + i * WIDTH);
    for (int lane = 0; lane < lanes; lane++) memcpy(scores[lane], (float *)totals + lane * n, n * sizeof(float));
}

INLINE void score_lanes(tile *t, const block *b, long lane, long size, int lanes, int in_bf16) {
    for (int key = 0; key < KEYS; key += SUMS / lanes)
        dots(t->queries + lane * size, b->keys + key, size, lanes, in_bf16, (float (*)[KEYS])(t->scores[lane] + key));
}

INLINE void score(const layer *a, tile *t, const block *b, int in_bf16) {
    long lane = 0, size = padded(a), n = t->lanes->n;
    for (; lane + 3 <= n; lane += 4) score_lanes(t, b, lane, size, 4, in_bf16); // the lane of zeros costs little
    if (lane + 2 == n) return score_lanes(t, b, lane, size, 2, in_bf16);
    if (lane + 1 == n) score_lanes(t, b, lane, size, 1, in_bf16);
}

// Turns a lane's scores into weights relative to its new top; earlier sums shrink to match.
static void weigh(const layer *a, tile *t, long lane, long first_key) {
    vec part[KEYS / WIDTH], none = spread(-INFINITY), cap = spread(a->softcap * 1.44269504f), most = none, sum = spread(0);
    ints position = counted() + (int32_t)first_key;
    for (int i = 0; i < KEYS / WIDTH; i++, position += WIDTH) {
        ints seen = (position < t->lanes->limit[lane]) & (position >= t->lanes->low[lane]);
        vec s = load(t->scores[lane] + i * WIDTH);
        if (a->softcap) s = tanh_of(s) * cap;
        part[i] = (vec)choose(seen, (ints)s, (ints)none);
        most = larger_of(part[i], most);
    }
    float largest = largest_of(most), top = t->top[lane] > largest ? t->top[lane] : largest; // fmaxf would be a function call
    float base = top == -INFINITY ? 0 : top; // -INFINITY: no key seen yet
    float shrink = exp2_of(spread(t->top[lane] - base))[0];
    for (int i = 0; i < KEYS / WIDTH; i++) {
        part[i] = exp2_of(part[i] - spread(base));
        store(t->scores[lane] + i * WIDTH, part[i]);
        sum += part[i];
    }
    t->top[lane] = top;
    t->total[lane] = t->total[lane] * shrink + total_of(sum);
    t->shrink[lane] = shrink;
}

INLINE void add(const float (*weights)[KEYS], const void *const *values, long keys, const float *shrink, long j, int lanes,
                int n, int in_bf16, float *found, long size) {
    vec sums[4 * COLUMNS];
#pragma GCC unroll 4
    for (int lane = 0; lane < lanes; lane++)
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) sums[lane * n + i] = load(found + lane * size + j + i * WIDTH) * spread(shrink[lane]);
    for (long key = 0; key < keys; key++)
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) {
            vec v = load_of(values[key], j / WIDTH + i, in_bf16);
#pragma GCC unroll 4
            for (int lane = 0; lane < lanes; lane++)
                sums[lane * n + i] = fma_of(spread(weights[lane][key]), v, sums[lane * n + i]);
        }
#pragma GCC unroll 4
    for (int lane = 0; lane < lanes; lane++)
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) store(found + lane * size + j + i * WIDTH, sums[lane * n + i]);
}

INLINE void add_lanes(tile *t, const block *b, long keys, long lane, long size, int lanes, int n, int in_bf16) {
    const float (*weights)[KEYS] = (const float (*)[KEYS])t->scores[lane];
    float *found = t->found + lane * size;
    long j = 0;
    for (; j + n * WIDTH <= size; j += n * WIDTH)
        add(weights, b->values, keys, t->shrink + lane, j, lanes, n, in_bf16, found, size);
    for (; j < size; j += WIDTH) add(weights, b->values, keys, t->shrink + lane, j, lanes, 1, in_bf16, found, size);
}

// found = found * shrink + weights V
INLINE void accumulate(const layer *a, tile *t, const block *b, long keys, int in_bf16) {
    long lane = 0, size = padded(a), n = t->lanes->n;
    for (; lane + 3 <= n; lane += 4) add_lanes(t, b, keys, lane, size, 4, COLUMNS, in_bf16);
    if (lane + 2 == n) return add_lanes(t, b, keys, lane, size, 2, 4, in_bf16);
    if (lane + 1 == n) add_lanes(t, b, keys, lane, size, 1, 4, in_bf16);
}

// Collects a block's keys and values. Those beyond the sequence hold stale data, perhaps NaN, and are replaced by zeros.
// `as_they_are`: keep the cache's format.
static void take_keys(const layer *a, const found_keys *f, int half, int as_they_are, block *b) {
    static const float zeros[MAX_HEAD_DIM];
    long values = a->n_kv * a->head_dim, size = padded(a);
    for (int i = 0; i < KEYS; i++) {
        if (i >= f->n) {
            b->keys[i] = b->values[i] = zeros;
            continue;
        }
        if (as_they_are) {
            b->keys[i] = (const char *)a->cache + f->at[i] * a->size;
            b->values[i] = (const char *)b->keys[i] + values * a->size;
            continue;
        }
        float *wide[2] = {b->wide[0] + i * size, b->wide[1] + i * size};
        take_head(a, a->cache, f->at[i], half, wide[0]);
        take_head(a, a->cache, f->at[i] + values, half, wide[1]);
        b->keys[i] = wide[0];
        b->values[i] = wide[1];
    }
}

static void give_results(const layer *a, const tile *t) {
    const tile_lanes *l = t->lanes;
    for (long lane = 0; lane < l->n; lane++) {
        vec factor = spread(1.0f / t->total[lane]);
        const float *found = t->found + lane * padded(a);
        long to = l->row[lane] * a->ldo + l->head[lane] * a->head_dim, step = t->half ? 2 * WIDTH : WIDTH;
        for (long j = 0; j < a->head_dim; j += step) {
            vec y = load(found + j) * factor;
            if (t->half)
                store_parts((bf16 *)a->out + to + j, y, load(found + j + WIDTH) * factor, a->head_dim - j);
            else
                store_tail((float *)a->out + to + j, y, first_lanes(a->head_dim - j));
        }
    }
}

INLINE void attend_keys(const layer *a, tile *t, const keys_of_sequence *s, int as_they_are) {
    const tile_lanes *l = t->lanes;
    int in_bf16 = t->half && as_they_are;
    block b;
    found_keys found, next;
    long key = l->first / KEYS * KEYS;
    find_keys(a, s, key, l->last, KEYS, &found);
    for (; key < l->last; key += KEYS, found = next) {
        find_next(a, s, key, l->last, KEYS, &next);
        fetch(a, &next, KEYS, 0, 4);
        take_keys(a, &found, t->half, as_they_are, &b);
        fetch(a, &next, KEYS, 1, 4);
        score(a, t, &b, in_bf16);
        fetch(a, &next, KEYS, 2, 4);
        for (long lane = 0; lane < l->n; lane++) weigh(a, t, lane, key);
        fetch(a, &next, KEYS, 3, 4);
        accumulate(a, t, &b, found.n, in_bf16);
    }
}

INLINE void attend_tile(const layer *a, const tile_lanes *l, const keys_of_sequence *s, int half) {
    tile t; // not cleared: it is too large for that
    t.lanes = l;
    t.half = half;
    take_queries(a, &t);
    if (padded(a) == a->head_dim && (!half || l->n <= FEW))
        attend_keys(a, &t, s, 1);
    else
        attend_keys(a, &t, s, 0);
    give_results(a, &t);
}

static void attend_half(const layer *a, const tile_lanes *l, const keys_of_sequence *s) { attend_tile(a, l, s, 1); }

static void attend_whole(const layer *a, const tile_lanes *l, const keys_of_sequence *s) { attend_tile(a, l, s, 0); }

// Rows [starts[i], starts[i + 1]) are the last rows of sequence i before position lengths[i]. head_dim is a multiple of 8 up to
// 256; blocks: [sequences, tables, n_blocks].
EXPORT void rz_attend(const bf16 *q, long ldq, bf16 *out, long ldo, const bf16 *cache, long n_kv, long group, long head_dim,
                      long block_tokens, float scale, float softcap, long window, const int64_t *starts, const int64_t *lengths,
                      const int64_t *blocks, long n_blocks, long tables, long sequences) {
    share_attention((attention){{q, ldq, out, ldo, cache, n_kv, group, head_dim, block_tokens, scale, softcap, window, sizeof(bf16)}, starts, lengths, blocks, n_blocks, tables, sequences, attend_half, 1, 0, 0});
}

// rz_attend in float32.
EXPORT void rz_attend_float(const float *q, long ldq, float *out, long ldo, const float *cache, long n_kv, long group,
                            long head_dim, long block_tokens, float scale, float softcap, long window, const int64_t *starts,
                            const int64_t *lengths, const int64_t *blocks, long n_blocks, long tables, long sequences) {
    share_attention((attention){{q, ldq, out, ldo, cache, n_kv, group, head_dim, block_tokens, scale, softcap, window, sizeof(float)}, starts, lengths, blocks, n_blocks, tables, sequences, attend_whole, 1, 0, 0});
}
