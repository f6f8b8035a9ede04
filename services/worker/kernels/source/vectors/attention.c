// Attention over the paged cache in float32, for CPUs with AVX2 or AVX-512, with an online softmax (Milakov & Gimelshein,
// arXiv:1805.02867).
//
// A lane is one query head of one row. Keys are taken in blocks of 16 counted from the sequence's start, and whatever is
// summed for a lane is summed in an order of its own: over head_dim in WIDTH partial sums, over keys one after the other.
// Masked keys add exact zeros. Hence a lane's bits depend neither on the other lanes nor on how rows are cut into steps.
#include "order.h"
#include "lanes.h"

#define KEYS 16
#define ALIGNED _Alignas(64) // a register that lies in two lines of the cache takes twice as long

typedef struct {
    ALIGNED float queries[LANES * MAX_HEAD_DIM], found[LANES * MAX_HEAD_DIM]; // [lanes, padded head_dim]
    float scores[LANES][KEYS];
    float top[LANES], total[LANES], shrink[LANES];
    const tile_lanes *lanes;
    int half; // bfloat16, not float32
} tile;

typedef struct {
    ALIGNED float wide[2][KEYS * MAX_HEAD_DIM]; // bfloat16 keys and values as float32
    const float *keys[KEYS], *values[KEYS];
} block;

// Numbers of a head where they stand as floats: registers are filled up with zeros.
INLINE long padded(const layer *a) { return (a->head_dim + WIDTH - 1) / WIDTH * WIDTH; }

// The numbers of a head as floats.
INLINE void take_head(const layer *a, const void *x, long at, int half, float *y) {
    const float *whole = (const float *)x + at;
    const bf16 *halves = (const bf16 *)x + at;
    long j = 0;
    for (; j + WIDTH <= a->head_dim; j += WIDTH) store(y + j, half ? load_bf16(halves + j) : load(whole + j));
    if (j == a->head_dim) return;
    lanes rest = first_lanes(a->head_dim - j);
    store(y + j, half ? load_bf16_tail(halves + j, rest) : load_tail(whole + j, rest));
}

// Queries come scaled, to base 2 where nothing but the exponential follows.
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
    if (l->n % 4 == 3) memset(t->queries + l->n * size, 0, size * sizeof(float));
    memset(t->found, 0, l->n * size * sizeof(float));
}

INLINE void dots(const float *queries, const float *const *keys, long size, int lanes, float (*scores)[KEYS]) {
    vec sums[WIDTH];
    int n = WIDTH / lanes;
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i++) sums[i] = spread(0);
    for (long j = 0; j < size; j += WIDTH) {
        vec q[4];
#pragma GCC unroll 16
        for (int lane = 0; lane < lanes; lane++) q[lane] = load(queries + lane * size + j);
#pragma GCC unroll 16
        for (int key = 0; key < n; key++) {
            vec k = load(keys[key] + j);
#pragma GCC unroll 16
            for (int lane = 0; lane < lanes; lane++) sums[lane * n + key] = fma_of(q[lane], k, sums[lane * n + key]);
        }
    }
    vec totals = totals_of(sums);
    for (int lane = 0; lane < lanes; lane++) memcpy(scores[lane], (float *)&totals + lane * n, n * sizeof(float));
}

static void score(const layer *a, tile *t, const block *b) {
    long lane = 0, size = padded(a);
    for (; lane + 3 <= t->lanes->n; lane += 4) // a fourth lane that is none costs less than three by themselves
        for (int key = 0; key < KEYS; key += WIDTH / 4)
            dots(t->queries + lane * size, b->keys + key, size, 4, (float (*)[KEYS])(t->scores[lane] + key));
    for (; lane < t->lanes->n; lane++)
        for (int key = 0; key < KEYS; key += WIDTH)
            dots(t->queries + lane * size, b->keys + key, size, 1, (float (*)[KEYS])(t->scores[lane] + key));
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
    float top = fmaxf(t->top[lane], largest_of(most));
    float base = top == -INFINITY ? 0 : top; // nothing is seen yet
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

INLINE void add(const float (*weights)[KEYS], const float *const *values, long keys, const float *shrink, long j, int lanes,
                int n, float *found, long size) {
    vec sums[8];
    for (int lane = 0; lane < lanes; lane++)
        for (int i = 0; i < n; i++) sums[lane * n + i] = load(found + lane * size + j + i * WIDTH) * spread(shrink[lane]);
    for (long key = 0; key < keys; key++)
        for (int i = 0; i < n; i++) {
            vec v = load(values[key] + j + i * WIDTH);
            for (int lane = 0; lane < lanes; lane++)
                sums[lane * n + i] = fma_of(spread(weights[lane][key]), v, sums[lane * n + i]);
        }
    for (int lane = 0; lane < lanes; lane++)
        for (int i = 0; i < n; i++) store(found + lane * size + j + i * WIDTH, sums[lane * n + i]);
}

// found = found * shrink + weights V
static void accumulate(const layer *a, tile *t, const block *b, long keys) {
    long lane = 0, size = padded(a);
    for (; lane + 4 <= t->lanes->n; lane += 4) {
        const float(*weights)[KEYS] = (const float(*)[KEYS])t->scores[lane];
        long j = 0;
        for (; j + 2 * WIDTH <= size; j += 2 * WIDTH)
            add(weights, b->values, keys, t->shrink + lane, j, 4, 2, t->found + lane * size, size);
        if (j < size) add(weights, b->values, keys, t->shrink + lane, j, 4, 1, t->found + lane * size, size);
    }
    for (; lane < t->lanes->n; lane++) {
        const float(*weights)[KEYS] = (const float(*)[KEYS])t->scores[lane];
        long j = 0;
        for (; j + 64 <= size; j += 64)
            add(weights, b->values, keys, t->shrink + lane, j, 1, 64 / WIDTH, t->found + lane * size, size);
        for (; j < size; j += WIDTH) add(weights, b->values, keys, t->shrink + lane, j, 1, 1, t->found + lane * size, size);
    }
}

// Keys from `last` on are somebody's leftovers, perhaps NaN: they count as zero.
static void take_keys(const layer *a, const keys_of_sequence *s, long key, long last, int half, block *b) {
    static const float zeros[MAX_HEAD_DIM];
    long values = a->n_kv * a->head_dim, size = padded(a), found[KEYS];
    find_keys(a, s, key, KEYS, found);
    for (int i = 0; i < KEYS; i++) {
        if (key + i >= last) {
            b->keys[i] = b->values[i] = zeros;
            continue;
        }
        long at = found[i];
        if (!half && size == a->head_dim) {
            b->keys[i] = (const float *)a->cache + at;
            b->values[i] = b->keys[i] + values;
            continue;
        }
        float *wide[2] = {b->wide[0] + i * size, b->wide[1] + i * size};
        take_head(a, a->cache, at, half, wide[0]);
        take_head(a, a->cache, at + values, half, wide[1]);
        b->keys[i] = wide[0];
        b->values[i] = wide[1];
    }
}

static void give_results(const layer *a, const tile *t) {
    const tile_lanes *l = t->lanes;
    for (long lane = 0; lane < l->n; lane++) {
        vec factor = spread(1.0f / t->total[lane]);
        long to = l->row[lane] * a->ldo + l->head[lane] * a->head_dim;
        for (long j = 0; j < a->head_dim; j += WIDTH) {
            lanes mask = first_lanes(a->head_dim - j);
            vec y = load(t->found + lane * padded(a) + j) * factor;
            if (t->half)
                store_bf16_tail((bf16 *)a->out + to + j, y, mask);
            else
                store_tail((float *)a->out + to + j, y, mask);
        }
    }
}

INLINE void attend_tile(const layer *a, const tile_lanes *l, const keys_of_sequence *s, int half) {
    tile t; // too large to be cleared for every few lanes
    block b;
    t.lanes = l;
    t.half = half;
    take_queries(a, &t);
    for (long key = l->first / KEYS * KEYS; key < l->last; key += KEYS) {
        long next = key + KEYS, end = next < l->last ? next : l->last;
        fetch_ahead(a, s, key, l->last, KEYS, 0, 4);
        take_keys(a, s, key, l->last, half, &b);
        fetch_ahead(a, s, key, l->last, KEYS, 1, 4);
        score(a, &t, &b);
        fetch_ahead(a, s, key, l->last, KEYS, 2, 4);
        for (long lane = 0; lane < l->n; lane++) weigh(a, &t, lane, key);
        fetch_ahead(a, s, key, l->last, KEYS, 3, 4);
        accumulate(a, &t, &b, end - key);
    }
    give_results(a, &t);
}

static void attend_half(const layer *a, const tile_lanes *l, const keys_of_sequence *s) { attend_tile(a, l, s, 1); }

static void attend_whole(const layer *a, const tile_lanes *l, const keys_of_sequence *s) { attend_tile(a, l, s, 0); }

// Rows [starts[i], starts[i + 1]) belong to sequence i and are its last before position lengths[i]. head_dim: a multiple
// of 8 up to 256; blocks: [sequences, n_blocks].
EXPORT void rz_attend(const bf16 *q, long ldq, bf16 *out, long ldo, const bf16 *cache, long n_kv, long group, long head_dim,
                      long block_size, float scale, float softcap, long window, const int64_t *starts, const int64_t *lengths,
                      const int64_t *blocks, long n_blocks, long sequences) {
    attention w = {{q, ldq, out, ldo, cache, n_kv, group, head_dim, block_size, scale, softcap, window, sizeof(bf16)},
                   starts, lengths, blocks, n_blocks, sequences, attend_half};
    share(attend_sequence, &w, sequences * n_kv);
}

// The same in float32.
EXPORT void rz_attend_float(const float *q, long ldq, float *out, long ldo, const float *cache, long n_kv, long group,
                            long head_dim, long block_size, float scale, float softcap, long window, const int64_t *starts,
                            const int64_t *lengths, const int64_t *blocks, long n_blocks, long sequences) {
    attention w = {{q, ldq, out, ldo, cache, n_kv, group, head_dim, block_size, scale, softcap, window, sizeof(float)},
                   starts, lengths, blocks, n_blocks, sequences, attend_whole};
    share(attend_sequence, &w, sequences * n_kv);
}
