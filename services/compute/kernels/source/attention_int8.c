// Attention over a paged cache of int8 codes (codes.h), for all kinds of CPU, with an online softmax (Milakov & Gimelshein,
// arXiv:1805.02867).
//
// A lane is one query head of one row. Its query is rounded to int16 with a step of its own, and so are its weights of a block
// of 16 keys, times the scales of the values. So all products are sums of integers, which are exact in any order. Blocks of keys
// are counted from the sequence's start, a lane's sums over them have one order, and masked keys add exact zeros. So a lane's
// bits depend neither on the other lanes nor on how rows are divided into steps.
#include "codes.h"
#include "lanes.h"
#include "order.h"
#include "shorts.h"

#define KEYS 16
#define CHUNK (2 * WIDTH)             // int16 of a register
#define SUMS (WIDTH > 4 ? WIDTH : 16) // sums of products of lanes and keys that are computed together
#define FEW 8                         // up to this many lanes, codes are read once or twice and are not stored as int16
#define LARGEST 32767.0f
#define LEAST 0x1p-100f // smaller weights count as zero
#define ALIGNED _Alignas(64)

typedef struct {
    ALIGNED int16_t queries[LANES * MAX_HEAD_DIM]; // [lanes, padded head_dim]
    ALIGNED float found[LANES * MAX_HEAD_DIM];
    ALIGNED float scores[LANES][KEYS];
    ALIGNED int16_t weights[LANES][KEYS];
    float step[LANES]; // of the query, times the scale of scores
    float unit[LANES]; // of the weights
    float top[LANES], total[LANES], shrink[LANES];
    const tile_lanes *lanes;
    long size; // padded head_dim
    int half;  // rows are bfloat16, not float32
} tile;

typedef struct { // up to KEYS keys of one block of the cache
    const int8_t *keys, *values; // [KEYS, head_dim]
    const bf16 *key_scales, *value_scales;
    long n;
} place;

typedef struct {
    const int8_t *keys, *values;                                   // as they lie in the cache
    ALIGNED int16_t wide_keys[KEYS * MAX_HEAD_DIM];                // [KEYS, padded head_dim]
    ALIGNED int16_t wide_values[KEYS / 2 * MAX_HEAD_DIM * 2];      // [pairs of keys, padded head_dim, 2]
    ALIGNED float key_scales[KEYS], value_scales[KEYS];            // 0 beyond the sequence
    float poison; // NaN if a scale of a value is not finite, else 0
} block;

// Looks up the keys from `key` on, a multiple of KEYS, and before `last`; keys beyond the sequence's blocks are in the null block.
INLINE place find_place(const layer *a, const keys_of_sequence *s, long key, long last) {
    long index = (uint32_t)key / (uint32_t)a->block_tokens, at = key - index * a->block_tokens;
    long run = bytes_of_run(a->block_tokens, a->head_dim), slot = index < s->n_blocks ? s->blocks[index] : 0;
    const int8_t *keys = (const int8_t *)a->cache + (slot * 2 * a->n_kv + s->kv_head) * run, *values = keys + a->n_kv * run;
    long codes = a->block_tokens * a->head_dim;
    return (place){keys + at * a->head_dim, values + at * a->head_dim, (const bf16 *)(keys + codes) + at,
                   (const bf16 *)(values + codes) + at, last - key < KEYS ? last - key : KEYS};
}

// The keys after those at `key`; after the sequence's last ones the first of `s->next`, or none.
INLINE place find_next_place(const layer *a, const keys_of_sequence *s, long key, long last) {
    key += KEYS;
    if (key >= last && s->next) {
        s = s->next;
        key = s->first / KEYS * KEYS;
        last = s->last;
    }
    return key < last ? find_place(a, s, key, last) : (place){0};
}

// Prefetches a part of four of what lies at `p`.
INLINE void fetch_place(const layer *a, const place *p, long part) {
    if (!p->n) return;
    long size = KEYS / 4 * a->head_dim;
    for (long at = part * size; at < (part + 1) * size; at += 64) {
        FETCH(p->keys + at);
        FETCH(p->values + at);
    }
    if (part == 0) FETCH(p->key_scales);
    if (part == 0) FETCH(p->value_scales);
}

// Rotates queries and rounds them to int16; a number that is not finite makes the lane's step and results NaN.
static void take_queries(const layer *a, tile *t) {
    const tile_lanes *l = t->lanes;
    ALIGNED float numbers[MAX_HEAD_DIM];
    float scale = a->softcap ? a->scale / a->softcap : a->scale * 1.44269504f; // base 2 unless a softcap follows
    for (long lane = 0; lane < l->n; lane++) {
        long from = l->row[lane] * a->ldq + l->head[lane] * a->head_dim;
        vec most = spread(0), poison = spread(0);
        for (long j = 0; j < t->size; j += WIDTH) {
            lanes mask = first_lanes(a->head_dim > j ? a->head_dim - j : 0);
            store(numbers + j, t->half ? load_bf16_tail((const bf16 *)a->q + from + j, mask)
                                       : load_tail((const float *)a->q + from + j, mask));
        }
        rotate_head(numbers, a->head_dim);
        for (long j = 0; j < t->size; j += WIDTH) {
            vec x = load(numbers + j);
            most = larger_of(larger_of(x, -x), most);
            poison += x * spread(0);
        }
        float largest = largest_of(most);
        vec codes = spread(largest >= LEAST ? LARGEST / largest : 0);
        for (long j = 0; j < t->size; j += WIDTH) store_rounded(t->queries + lane * t->size + j, load(numbers + j) * codes);
        t->step[lane] = largest / LARGEST * scale + total_of(poison);
        t->top[lane] = -INFINITY;
        t->total[lane] = 0;
    }
    long filled = (l->n + 3) & -4; // lanes of zeros fill the last group
    memset(t->queries + l->n * t->size, 0, (filled - l->n) * t->size * sizeof(int16_t));
    memset(t->found, 0, l->n * t->size * sizeof(float));
}

// Takes the scales of a block, and with `wide` its codes as int16.
INLINE void take_block(const layer *a, const place *p, long size, int wide, block *b) {
    vec poison = spread(0);
    ints index = counted();
    for (long i = 0; i < KEYS; i += WIDTH, index += WIDTH) { // beyond the sequence are stale scales, perhaps NaN
        ints valid = index < (int32_t)p->n;
        store(b->key_scales + i, (vec)((ints)load_bf16(p->key_scales + i) & valid));
        vec values = (vec)((ints)load_bf16(p->value_scales + i) & valid);
        store(b->value_scales + i, values);
        poison += values * spread(0);
    }
    b->poison = total_of(poison);
    b->keys = p->keys;
    b->values = p->values;
    if (!wide) return;
    long whole = a->head_dim / CHUNK * CHUNK, rest = a->head_dim - whole;
    int8_t ends[2][CHUNK] = {{0}};
    for (long i = 0; i < KEYS; i++) {
        const int8_t *key = p->keys + i * a->head_dim;
        for (long j = 0; j < whole; j += CHUNK) store_shorts(b->wide_keys + i * size + j, load_codes(key + j));
        if (!rest) continue;
        memcpy(ends[0], key + whole, rest);
        store_shorts(b->wide_keys + i * size + whole, load_codes(ends[0]));
    }
    for (long i = 0; i < KEYS; i += 2) {
        const int8_t *even = p->values + i * a->head_dim, *odd = even + a->head_dim;
        int16_t *to = b->wide_values + i * size;
        shorts pairs[2];
        for (long j = 0; j < size; j += CHUNK, even += CHUNK, odd += CHUNK) {
            if (j == whole) {
                memcpy(ends[0], even, rest);
                memcpy(ends[1], odd, rest);
                zip_codes(ends[0], ends[1], pairs);
            } else
                zip_codes(even, odd, pairs);
            store_shorts(to + 2 * j, pairs[0]);
            store_shorts(to + 2 * j + CHUNK, pairs[1]);
        }
    }
}

// Products of `lanes` queries and SUMS / lanes keys from `key` on.
INLINE void dots(tile *t, const block *b, long lane, long key, int lanes, int wide) {
    const int16_t *queries = t->queries + lane * t->size;
    const int16_t *wide_keys = b->wide_keys + key * t->size;
    const int8_t *keys = b->keys + key * t->size;
    sums products[SUMS];
    ALIGNED float totals[SUMS];
    int n = SUMS / lanes;
#pragma GCC unroll 16
    for (int i = 0; i < SUMS; i++) products[i] = no_sums();
    for (long j = 0; j < t->size; j += CHUNK) {
        shorts q[4];
#pragma GCC unroll 4
        for (int i = 0; i < lanes; i++) q[i] = load_shorts(queries + i * t->size + j);
#pragma GCC unroll 16
        for (int k = 0; k < n; k++) {
            shorts codes = wide ? load_shorts(wide_keys + k * t->size + j) : load_codes(keys + k * t->size + j);
#pragma GCC unroll 4
            for (int i = 0; i < lanes; i++) products[i * n + k] = add_products(q[i], codes, products[i * n + k]);
        }
    }
    for (int i = 0; i < SUMS; i += WIDTH) store(totals + i, totals_of_sums(products + i));
#pragma GCC unroll 4
    for (int i = 0; i < lanes; i++) memcpy(t->scores[lane + i] + key, totals + i * n, n * sizeof(float));
}

INLINE void score_lanes(tile *t, const block *b, long lane, int lanes, int wide) {
    for (long key = 0; key < KEYS; key += SUMS / lanes) dots(t, b, lane, key, lanes, wide);
}

INLINE void score(tile *t, const block *b, int wide) {
    long lane = 0, n = t->lanes->n;
    for (; lane + 3 <= n; lane += 4) score_lanes(t, b, lane, 4, wide); // a lane of zeros costs little
    if (lane + 2 == n) return score_lanes(t, b, lane, 2, wide);
    if (lane + 1 == n) score_lanes(t, b, lane, 1, wide);
}

// Turns a lane's scores into weights relative to its new top, times the scales of the values; earlier sums shrink to match.
static void weigh(const layer *a, tile *t, const block *b, long lane, long first_key) {
    vec part[KEYS / WIDTH], none = spread(-INFINITY), cap = spread(a->softcap * 1.44269504f), most = none, sum = spread(0);
    vec step = spread(t->step[lane]);
    ints position = counted() + (int32_t)first_key;
    for (int i = 0; i < KEYS / WIDTH; i++, position += WIDTH) {
        vec s = load(t->scores[lane] + i * WIDTH) * (load(b->key_scales + i * WIDTH) * step);
        if (a->softcap) s = tanh_of(s) * cap;
        part[i] = choose_within(position, t->lanes->low[lane], t->lanes->limit[lane], s, none);
        most = larger_of(part[i], most);
    }
    float largest = largest_of(most), top = t->top[lane] > largest ? t->top[lane] : largest; // fmaxf would be a function call
    float base = top == -INFINITY ? 0 : top; // -INFINITY: no key seen yet
    float shrink = exp2_of(spread(t->top[lane] - base))[0];
    most = spread(0);
    for (int i = 0; i < KEYS / WIDTH; i++) {
        part[i] = exp2_of(part[i] - spread(base));
        sum += part[i];
        part[i] *= load(b->value_scales + i * WIDTH);
        most = larger_of(part[i], most);
    }
    largest = largest_of(most);
    vec codes = spread(largest >= LEAST ? LARGEST / largest : 0);
    for (int i = 0; i < KEYS / WIDTH; i++) store_rounded(t->weights[lane] + i * WIDTH, part[i] * codes);
    t->unit[lane] = largest / LARGEST + b->poison;
    t->top[lane] = top;
    t->total[lane] = t->total[lane] * shrink + total_of(sum);
    t->shrink[lane] = shrink;
}

// found = found * shrink + weights V, of the CHUNK columns from j on
INLINE void add(tile *t, const block *b, long lane, long j, int lanes, int wide) {
    sums products[4][2];
    float *found = t->found + lane * t->size + j;
#pragma GCC unroll 4
    for (int i = 0; i < lanes; i++) products[i][0] = products[i][1] = no_sums();
    for (long key = 0; key < KEYS; key += 2) {
        const int16_t *wide_values = b->wide_values + key * t->size + 2 * j;
        const int8_t *values = b->values + key * t->size + j;
        shorts pairs[2];
        if (wide)
            pairs[0] = load_shorts(wide_values), pairs[1] = load_shorts(wide_values + CHUNK);
        else
            zip_codes(values, values + t->size, pairs);
#pragma GCC unroll 4
        for (int i = 0; i < lanes; i++) {
            shorts weight = spread_shorts(t->weights[lane + i] + key);
            products[i][0] = add_products(weight, pairs[0], products[i][0]);
            products[i][1] = add_products(weight, pairs[1], products[i][1]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < lanes; i++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            float *to = found + i * t->size + half * WIDTH;
            store(to, fma_of(floats_of(products[i][half]), spread(t->unit[lane + i]), load(to) * spread(t->shrink[lane + i])));
        }
}

INLINE void add_lanes(tile *t, const block *b, long lane, int lanes, int wide) {
    for (long j = 0; j < t->size; j += CHUNK) add(t, b, lane, j, lanes, wide);
}

INLINE void accumulate(tile *t, const block *b, int wide) {
    long lane = 0, n = t->lanes->n;
    for (; lane + 4 <= n; lane += 4) add_lanes(t, b, lane, 4, wide);
    if (lane + 3 == n) return add_lanes(t, b, lane, 3, wide);
    if (lane + 2 == n) return add_lanes(t, b, lane, 2, wide);
    if (lane + 1 == n) add_lanes(t, b, lane, 1, wide);
}

static void give_results(const layer *a, const tile *t) {
    const tile_lanes *l = t->lanes;
    for (long lane = 0; lane < l->n; lane++) {
        vec factor = spread(1.0f / t->total[lane]);
        long to = l->row[lane] * a->ldo + l->head[lane] * a->head_dim;
        for (long j = 0; j < a->head_dim; j += WIDTH) {
            vec y = load(t->found + lane * t->size + j) * factor;
            lanes mask = first_lanes(a->head_dim - j);
            if (t->half)
                store_bf16_tail((bf16 *)a->out + to + j, y, mask);
            else
                store_tail((float *)a->out + to + j, y, mask);
        }
    }
}

INLINE void attend_keys(const layer *a, tile *t, const keys_of_sequence *s, int wide) {
    const tile_lanes *l = t->lanes;
    block b;
    long key = l->first / KEYS * KEYS;
    place now = find_place(a, s, key, l->last);
    for (; key < l->last; key += KEYS) {
        place next = find_next_place(a, s, key, l->last);
        fetch_place(a, &next, 0);
        take_block(a, &now, t->size, wide, &b);
        fetch_place(a, &next, 1);
        score(t, &b, wide);
        fetch_place(a, &next, 2);
        for (long lane = 0; lane < l->n; lane++) weigh(a, t, &b, lane, key);
        fetch_place(a, &next, 3);
        accumulate(t, &b, wide);
        now = next;
    }
}

INLINE void attend_tile(const layer *a, const tile_lanes *l, const keys_of_sequence *s, int half) {
    tile t; // not cleared: it is too large for that
    t.lanes = l;
    t.half = half;
    t.size = (a->head_dim + CHUNK - 1) & -CHUNK;
    take_queries(a, &t);
    if (t.size == a->head_dim && l->n <= FEW)
        attend_keys(a, &t, s, 0);
    else
        attend_keys(a, &t, s, 1);
    give_results(a, &t);
}

static void attend_half(const layer *a, const tile_lanes *l, const keys_of_sequence *s) { attend_tile(a, l, s, 1); }

static void attend_whole(const layer *a, const tile_lanes *l, const keys_of_sequence *s) { attend_tile(a, l, s, 0); }

// rz_attend over a cache as in codes.h. head_dim is a multiple of 8 up to 256, block_tokens a multiple of 16.
EXPORT void rz_attend_int8(const bf16 *q, long ldq, bf16 *out, long ldo, const int8_t *cache, long n_kv, long group, long head_dim,
                           long block_tokens, float scale, float softcap, long window, const int64_t *starts,
                           const int64_t *lengths, const int64_t *blocks, long n_blocks, long tables, long sequences) {
    share_attention((attention){{q, ldq, out, ldo, cache, n_kv, group, head_dim, block_tokens, scale, softcap, window, sizeof(bf16)}, starts, lengths, blocks, n_blocks, tables, sequences, attend_half, 1, 0, 0});
}

// rz_attend_int8 for rows of float32.
EXPORT void rz_attend_int8_float(const float *q, long ldq, float *out, long ldo, const int8_t *cache, long n_kv, long group,
                                 long head_dim, long block_tokens, float scale, float softcap, long window, const int64_t *starts,
                                 const int64_t *lengths, const int64_t *blocks, long n_blocks, long tables, long sequences) {
    share_attention((attention){{q, ldq, out, ldo, cache, n_kv, group, head_dim, block_tokens, scale, softcap, window, sizeof(float)}, starts, lengths, blocks, n_blocks, tables, sequences, attend_whole, 1, 0, 0});
}
