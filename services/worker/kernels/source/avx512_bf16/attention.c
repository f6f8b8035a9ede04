// Attention over the paged cache in bfloat16 with float32 sums, for CPUs that multiply pairs of it, with an online softmax
// (Milakov & Gimelshein, arXiv:1805.02867).
//
// Keys are taken in blocks of 32 counted from the sequence's start. A block's keys are turned so that a register holds a pair
// of values of 16 of them, and its values so that it holds 16 values of a pair of keys: nothing is summed across a register but
// a lane's weights. What is summed for a lane is summed in an order of its own, and masked keys add exact zeros. Hence a lane's
// bits depend neither on the other lanes nor on how rows are cut into steps.
#include "common.h"
#include "lanes.h"

#define KEYS 32
#define HALF 16   // keys of a register of scores
#define CHUNK 32  // values of a register
#define AT_ONCE 8 // lanes, whose 16 sums and what they are multiplied with fill the registers

typedef struct {
    const tile_lanes *lanes;
    const bf16 *queries[LANES];
    float scores[LANES][KEYS], found[LANES * MAX_HEAD_DIM]; // [lanes, head_dim rounded up to CHUNK]
    bf16 weights[LANES][KEYS];
    float top[LANES], total[LANES], shrink[LANES];
} tile;

typedef struct {
    bf16 keys[MAX_HEAD_DIM / 2][2][HALF][2];             // pairs of values; halves of the keys
    bf16 values[MAX_HEAD_DIM / WIDTH][HALF][WIDTH][2]; // registers of values; pairs of keys
} block;

INLINE __mmask32 first_values(long n) { return n >= CHUNK ? 0xFFFFFFFF : (1u << n) - 1; }

static void take_keys(const layer *a, const bf16 *const *found, block *b) {
    for (int half = 0; half < 2; half++)
        for (long j = 0; j < a->head_dim; j += CHUNK) {
            __mmask32 mask = first_values(a->head_dim - j);
            __m512i rows[HALF];
#pragma GCC unroll 16
            for (int i = 0; i < HALF; i++) {
                const bf16 *k = found[half * HALF + i];
                rows[i] = k ? _mm512_maskz_loadu_epi16(mask, k + j) : _mm512_setzero_si512();
            }
            turn(rows, (char *)b->keys[j / 2][half], sizeof b->keys[0]);
        }
}

static void take_values(const layer *a, const bf16 *const *found, block *b) {
    static const uint16_t order[2][32] = {
        {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    __m512i low = _mm512_loadu_si512(order[0]), high = _mm512_loadu_si512(order[1]);
    long values = a->n_kv * a->head_dim;
    for (int pair = 0; pair < HALF; pair++) {
        const bf16 *even = found[2 * pair], *odd = found[2 * pair + 1];
        for (long j = 0; j < a->head_dim; j += CHUNK) {
            __mmask32 mask = first_values(a->head_dim - j);
            __m512i x = even ? _mm512_maskz_loadu_epi16(mask, even + values + j) : _mm512_setzero_si512();
            __m512i y = odd ? _mm512_maskz_loadu_epi16(mask, odd + values + j) : _mm512_setzero_si512();
            _mm512_storeu_si512(b->values[j / WIDTH][pair], _mm512_permutex2var_epi16(x, low, y));
            _mm512_storeu_si512(b->values[j / WIDTH + 1][pair], _mm512_permutex2var_epi16(x, high, y));
        }
    }
}

// Keys that are not the sequence's are somebody's leftovers, perhaps NaN: they count as zero.
static void take_block(const layer *a, const found_keys *f, const found_keys *next, block *b) {
    const bf16 *found[KEYS];
    for (int i = 0; i < KEYS; i++) found[i] = i < f->n ? (const bf16 *)a->cache + f->at[i] : 0;
    fetch(a, next, KEYS, 0, 4);
    take_keys(a, found, b);
    fetch(a, next, KEYS, 1, 4);
    take_values(a, found, b);
}

INLINE void score(const layer *a, tile *t, const block *b, long lane, int n) {
    __m512 sums[AT_ONCE][2];
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (long pair = 0; pair < a->head_dim / 2; pair++) {
        __m512bh low = (__m512bh)_mm512_loadu_si512(b->keys[pair][0]), high = (__m512bh)_mm512_loadu_si512(b->keys[pair][1]);
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            __m512bh query = spread_pair(t->queries[lane + i] + 2 * pair);
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], query, low);
            sums[i][1] = _mm512_dpbf16_ps(sums[i][1], query, high);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) {
        _mm512_storeu_ps(t->scores[lane + i], sums[i][0]);
        _mm512_storeu_ps(t->scores[lane + i] + HALF, sums[i][1]);
    }
}

// found = found * shrink + weights V
INLINE void accumulate(const layer *a, tile *t, const block *b, long lane, int n) {
    long size = (a->head_dim + CHUNK - 1) / CHUNK * CHUNK;
    for (long j = 0; j < a->head_dim; j += CHUNK) {
        float *found = t->found + lane * size + j;
        __m512 sums[AT_ONCE][2];
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            __m512 shrink = _mm512_set1_ps(t->shrink[lane + i]);
            sums[i][0] = _mm512_mul_ps(_mm512_loadu_ps(found + i * size), shrink);
            sums[i][1] = _mm512_mul_ps(_mm512_loadu_ps(found + i * size + WIDTH), shrink);
        }
        for (int pair = 0; pair < HALF; pair++) {
            __m512bh low = (__m512bh)_mm512_loadu_si512(b->values[j / WIDTH][pair]);
            __m512bh high = (__m512bh)_mm512_loadu_si512(b->values[j / WIDTH + 1][pair]);
#pragma GCC unroll 8
            for (int i = 0; i < n; i++) {
                __m512bh weight = spread_pair(t->weights[lane + i] + 2 * pair);
                sums[i][0] = _mm512_dpbf16_ps(sums[i][0], weight, low);
                sums[i][1] = _mm512_dpbf16_ps(sums[i][1], weight, high);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            _mm512_storeu_ps(found + i * size, sums[i][0]);
            _mm512_storeu_ps(found + i * size + WIDTH, sums[i][1]);
        }
    }
}

// Turns a lane's scores into weights relative to its new top; earlier sums shrink to match.
static void weigh(const layer *a, tile *t, long lane, long first_key) {
    const __m512 none = _mm512_set1_ps(-INFINITY), cap = _mm512_set1_ps(a->softcap * 1.44269504f);
    const __m512 scale = _mm512_set1_ps(a->softcap ? a->scale / a->softcap : a->scale * 1.44269504f);
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i limit = _mm512_set1_epi32(t->lanes->limit[lane]), low = _mm512_set1_epi32(t->lanes->low[lane]);
    __m512 part[2];
    for (int i = 0; i < 2; i++) {
        __m512i position = _mm512_add_epi32(_mm512_set1_epi32((int)first_key + i * HALF), order);
        __mmask16 seen = _mm512_cmplt_epi32_mask(position, limit) & _mm512_cmpge_epi32_mask(position, low);
        __m512 s = _mm512_mul_ps(_mm512_loadu_ps(t->scores[lane] + i * HALF), scale);
        if (a->softcap) s = _mm512_mul_ps(tanh_of(s), cap);
        part[i] = _mm512_mask_blend_ps(seen, none, s);
    }
    float largest = largest_of(_mm512_max_ps(part[0], part[1]));
    float top = t->top[lane] > largest ? t->top[lane] : largest; // fmaxf would be a call
    float base = top == -INFINITY ? 0 : top; // nothing is seen yet
    for (int i = 0; i < 2; i++) {
        part[i] = exp2_of(_mm512_sub_ps(part[i], _mm512_set1_ps(base)));
        store_bf16(t->weights[lane] + i * HALF, part[i]);
    }
    float shrink = _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(t->top[lane] - base)));
    t->top[lane] = top;
    t->total[lane] = t->total[lane] * shrink + total_of(_mm512_add_ps(part[0], part[1]));
    t->shrink[lane] = shrink;
}

INLINE void attend_lanes(const layer *a, tile *t, const block *b, long key, long lane, int n) {
    score(a, t, b, lane, n);
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
    tile t; // too large to be cleared for every few lanes
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
        __m512 factor = _mm512_set1_ps(1.0f / t.total[lane]);
        bf16 *to = (bf16 *)a->out + l->row[lane] * a->ldo + l->head[lane] * a->head_dim;
        for (long j = 0; j < a->head_dim; j += WIDTH)
            store_bf16_tail(to + j, _mm512_mul_ps(_mm512_loadu_ps(t.found + lane * size + j), factor), first_lanes(a->head_dim - j));
    }
}

// Rows [starts[i], starts[i + 1]) belong to sequence i and are its last before position lengths[i]. head_dim: even, up to 256;
// blocks: [sequences, n_blocks].
EXPORT void rz_attend(const bf16 *q, long ldq, bf16 *out, long ldo, const bf16 *cache, long n_kv, long group, long head_dim,
                      long block_size, float scale, float softcap, long window, const int64_t *starts, const int64_t *lengths,
                      const int64_t *blocks, long n_blocks, long sequences) {
    share_attention((attention){{q, ldq, out, ldo, cache, n_kv, group, head_dim, block_size, scale, softcap, window, sizeof(bf16)},
                                starts, lengths, blocks, n_blocks, sequences, attend_tile, 0, 0});
}
