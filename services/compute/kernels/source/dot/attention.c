// Attention over the paged cache in bfloat16 with float32 sums, for CPUs that multiply pairs of bfloat16 (AVX512-BF16, NEON
// with bfloat16), with an online softmax (Milakov & Gimelshein, arXiv:1805.02867).
//
// Keys are processed in blocks of 32, counted from the sequence's start. A block's K is transposed so that a register holds one
// pair of dimensions of WIDTH keys, and its V so that a register holds WIDTH dimensions of one pair of keys; only a lane's
// weights are summed across a register. Every sum belongs to one lane and has a fixed order, and masked keys add exact zeros.
// So a lane's bits depend neither on the other lanes nor on how rows are divided into steps.
#include "order.h"
#include "lanes.h"

#define KEYS 32
#define CHUNK (2 * WIDTH) // bfloat16 values of a register
#define AT_ONCE 8 // lanes computed together; their 16 sums and the operands fill the registers

typedef struct {
    const tile_lanes *lanes;
    const bf16 *queries[LANES];
    float scores[LANES][KEYS], found[LANES * MAX_HEAD_DIM]; // [lanes, head_dim rounded up to CHUNK]
    bf16 weights[LANES][KEYS];
    float top[LANES], total[LANES], shrink[LANES];
} tile;

typedef struct {
    bf16 keys[MAX_HEAD_DIM / 2][KEYS / WIDTH][WIDTH][2];   // pairs of values; registers of keys
    bf16 values[MAX_HEAD_DIM / WIDTH][KEYS / 2][WIDTH][2]; // registers of values; pairs of keys
} block;

static void take_keys(const layer *a, const bf16 *const *found, block *b) {
    for (int part = 0; part < KEYS / WIDTH; part++)
        for (long j = 0; j < a->head_dim; j += CHUNK) {
            pairs rows[WIDTH];
            pair_lanes mask = first_pairs(a->head_dim - j);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) {
                const bf16 *k = found[part * WIDTH + i];
                rows[i] = k ? load_pairs_tail(k + j, mask) : (pairs){0};
            }
            turn(rows, (char *)b->keys[j / 2][part], sizeof b->keys[0]);
        }
}

static void take_values(const layer *a, const bf16 *const *found, block *b) {
    long values = a->n_kv * a->head_dim;
    for (int pair = 0; pair < KEYS / 2; pair++) {
        const bf16 *even = found[2 * pair], *odd = found[2 * pair + 1];
        for (long j = 0; j < a->head_dim; j += CHUNK) {
            pair_lanes mask = first_pairs(a->head_dim - j);
            pairs x = even ? load_pairs_tail(even + values + j, mask) : (pairs){0};
            pairs y = odd ? load_pairs_tail(odd + values + j, mask) : (pairs){0};
            store_pairs(b->values[j / WIDTH][pair][0], zip_of(x, y, 0));
            store_pairs(b->values[j / WIDTH + 1][pair][0], zip_of(x, y, 1));
        }
    }
}

// Keys beyond the sequence hold stale data, perhaps NaN, and are replaced by zeros.
static void take_block(const layer *a, const found_keys *f, const found_keys *next, block *b) {
    const bf16 *found[KEYS];
    for (int i = 0; i < KEYS; i++) found[i] = i < f->n ? (const bf16 *)a->cache + f->at[i] : 0;
    fetch(a, next, KEYS, 0, 4);
    take_keys(a, found, b);
    fetch(a, next, KEYS, 1, 4);
    take_values(a, found, b);
}

// The products of `n` lanes with two registers of keys.
INLINE void score_part(const layer *a, tile *t, const block *b, long lane, int n, int part) {
    vec sums[AT_ONCE][2];
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) sums[i][0] = sums[i][1] = spread(0);
    for (long pair = 0; pair < a->head_dim / 2; pair++) {
        pairs low = load_pairs(b->keys[pair][part][0]), high = load_pairs(b->keys[pair][part + 1][0]);
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            pairs query = spread_pair(t->queries[lane + i] + 2 * pair);
            sums[i][0] = dot_of(query, low, sums[i][0]);
            sums[i][1] = dot_of(query, high, sums[i][1]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) {
        store(t->scores[lane + i] + part * WIDTH, sums[i][0]);
        store(t->scores[lane + i] + (part + 1) * WIDTH, sums[i][1]);
    }
}

// found = found * shrink + weights V
INLINE void accumulate(const layer *a, tile *t, const block *b, long lane, int n) {
    long size = (a->head_dim + CHUNK - 1) / CHUNK * CHUNK;
    for (long j = 0; j < a->head_dim; j += CHUNK) {
        float *found = t->found + lane * size + j;
        vec sums[AT_ONCE][2];
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            vec shrink = spread(t->shrink[lane + i]);
            sums[i][0] = load(found + i * size) * shrink;
            sums[i][1] = load(found + i * size + WIDTH) * shrink;
        }
        for (int pair = 0; pair < KEYS / 2; pair++) {
            pairs low = load_pairs(b->values[j / WIDTH][pair][0]), high = load_pairs(b->values[j / WIDTH + 1][pair][0]);
#pragma GCC unroll 8
            for (int i = 0; i < n; i++) {
                pairs weight = spread_pair(t->weights[lane + i] + 2 * pair);
                sums[i][0] = dot_of(weight, low, sums[i][0]);
                sums[i][1] = dot_of(weight, high, sums[i][1]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            store(found + i * size, sums[i][0]);
            store(found + i * size + WIDTH, sums[i][1]);
        }
    }
}

// Turns a lane's scores into weights relative to its new top; earlier sums shrink to match.
static void weigh(const layer *a, tile *t, long lane, long first_key) {
    vec part[KEYS / WIDTH], none = spread(-INFINITY), cap = spread(a->softcap * 1.44269504f), most = none, sum = spread(0);
    vec scale = spread(a->softcap ? a->scale / a->softcap : a->scale * 1.44269504f);
    ints position = counted() + (int32_t)first_key;
    for (int i = 0; i < KEYS / WIDTH; i++, position += WIDTH) {
        vec s = load(t->scores[lane] + i * WIDTH) * scale;
        if (a->softcap) s = tanh_of(s) * cap;
        part[i] = choose_within(position, t->lanes->low[lane], t->lanes->limit[lane], s, none);
        most = larger_of(part[i], most);
    }
    float largest = largest_of(most), top = t->top[lane] > largest ? t->top[lane] : largest; // fmaxf would be a function call
    float base = top == -INFINITY ? 0 : top; // -INFINITY: no key seen yet
    for (int i = 0; i < KEYS / WIDTH; i++) {
        part[i] = exp2_of(part[i] - spread(base));
        store_bf16(t->weights[lane] + i * WIDTH, part[i]);
        sum += part[i];
    }
    float shrink = exp2_of(spread(t->top[lane] - base))[0];
    t->top[lane] = top;
    t->total[lane] = t->total[lane] * shrink + total_of(sum);
    t->shrink[lane] = shrink;
}

INLINE void attend_lanes(const layer *a, tile *t, const block *b, long key, long lane, int n) {
    for (int part = 0; part < KEYS / WIDTH; part += 2) score_part(a, t, b, lane, n, part);
    for (int i = 0; i < n; i++) weigh(a, t, lane + i, key);
    accumulate(a, t, b, lane, n);
}

static void attend_block(const layer *a, tile *t, const block *b, long key) {
    long lane = 0, n = t->lanes->n;
    for (; lane + AT_ONCE <= n; lane += AT_ONCE) attend_lanes(a, t, b, key, lane, AT_ONCE);
    switch (n - lane) {
    case 7: return attend_lanes(a, t, b, key, lane, 7);
    case 6: return attend_lanes(a, t, b, key, lane, 6);
    case 5: return attend_lanes(a, t, b, key, lane, 5);
    case 4: return attend_lanes(a, t, b, key, lane, 4);
    case 3: return attend_lanes(a, t, b, key, lane, 3);
    case 2: return attend_lanes(a, t, b, key, lane, 2);
    case 1: return attend_lanes(a, t, b, key, lane, 1);
    }
}

static void attend_tile(const layer *a, const tile_lanes *l, const keys_of_sequence *s) {
    long size = (a->head_dim + CHUNK - 1) / CHUNK * CHUNK;
    tile t; // not cleared: it is too large for that
    block b;
    t.lanes = l;
    for (long lane = 0; lane < l->n; lane++) {
        t.queries[lane] = (const bf16 *)a->q + l->row[lane] * a->ldq + l->head[lane] * a->head_dim;
        t.top[lane] = -INFINITY;
        t.total[lane] = 0;
    }
    memset(t.found, 0, l->n * size * sizeof(float));
    long key = l->first / KEYS * KEYS;
    found_keys found, next;
    find_keys(a, s, key, l->last, KEYS, &found);
    for (; key < l->last; key += KEYS, found = next) {
        find_next(a, s, key, l->last, KEYS, &next);
        take_block(a, &found, &next, &b);
        fetch(a, &next, KEYS, 2, 4);
        attend_block(a, &t, &b, key);
        fetch(a, &next, KEYS, 3, 4);
    }
    for (long lane = 0; lane < l->n; lane++) {
        vec factor = spread(1.0f / t.total[lane]);
        bf16 *to = (bf16 *)a->out + l->row[lane] * a->ldo + l->head[lane] * a->head_dim;
        for (long j = 0; j < a->head_dim; j += WIDTH)
            store_bf16_tail(to + j, load(t.found + lane * size + j) * factor, first_lanes(a->head_dim - j));
    }
}

// Rows [starts[i], starts[i + 1]) are the last rows of sequence i before position lengths[i]. head_dim is even, up to 256;
// blocks: [sequences, tables, n_blocks].
EXPORT void rz_attend(const bf16 *q, long ldq, bf16 *out, long ldo, const bf16 *cache, long n_kv, long group, long head_dim,
                      long block_tokens, float scale, float softcap, long window, const int64_t *starts, const int64_t *lengths,
                      const int64_t *blocks, long n_blocks, long tables, long sequences) {
    share_attention((attention){{q, ldq, out, ldo, cache, n_kv, group, head_dim, block_tokens, scale, softcap, window, sizeof(bf16)}, starts, lengths, blocks, n_blocks, tables, sequences, attend_tile, 1, 0, 0});
}
