// Attention over the paged cache with an online softmax (Milakov & Gimelshein, arXiv:1805.02867; Dao, arXiv:2205.14135).
//
// A tile holds 16 lanes, each one query head of one row. Scores stand as [key][lane], so that every lane has its own
// softmax in its own register lane, in blocks of 32 keys counted from the sequence's start. Masked keys add exact
// zeros. Hence a lane's bits depend neither on the other lanes nor on how rows are cut into steps.
#include "common.h"

#define KEYS 32           // per block: two tiles of scores, one step of the product with V
#define MAX_HEAD_DIM 256

typedef struct {
    const bf16 *q; // [rows, ldq]
    long ldq;
    bf16 *out; // [rows, ldo]
    long ldo;
    const bf16 *cache; // [slots, 2 * n_kv * head_dim], K then V
    long n_kv, group, head_dim, block_size;
    float scale, softcap; // 0: no cap
    long window;          // 0: all keys
} layer;

typedef struct {
    long lanes;
    long row[TILE], head[TILE];
    int32_t limit[TILE], low[TILE]; // keys [low, limit) are seen
    const bf16 *keys[2];            // of the block's two halves
} tile_of_lanes;

static void pack_queries(const layer *a, const tile_of_lanes *t, bf16 packed[][TILE][TILE][2]) {
    for (long step = 0; step < a->head_dim / TILE_K; step++)
        for (long lane = 0; lane < TILE; lane++) {
            const bf16 *q = a->q + t->row[lane] * a->ldq + t->head[lane] * a->head_dim + step * TILE_K;
            for (long pair = 0; pair < TILE; pair++)
                if (lane < t->lanes)
                    memcpy(packed[step][pair][lane], q + 2 * pair, 4);
                else
                    memset(packed[step][pair][lane], 0, 4);
        }
}

static void score(const layer *a, const tile_of_lanes *t, bf16 queries[][TILE][TILE][2], float scores[KEYS][TILE]) {
    long stride = 2 * a->n_kv * a->head_dim * sizeof(bf16);
    _tile_zero(0);
    _tile_zero(1);
    for (long step = 0; step < a->head_dim / TILE_K; step++) {
        _tile_loadd(4, queries[step], 64);
        _tile_loadd(5, t->keys[0] + step * TILE_K, stride);
        _tile_loadd(6, t->keys[1] + step * TILE_K, stride);
        _tile_dpbf16ps(0, 5, 4);
        _tile_dpbf16ps(1, 6, 4);
    }
    _tile_stored(0, scores[0], 64);
    _tile_stored(1, scores[TILE], 64);
}

typedef struct {
    __m512 top, total; // per lane: the largest score so far (base 2), and the sum of 2^(score - top)
} softmax;

// Turns scores into weights relative to the new top; returns by how much earlier sums shrink.
static __m512 weigh(const layer *a, const tile_of_lanes *t, long first_key, float scores[KEYS][TILE], softmax *state) {
    const __m512 log2e = _mm512_set1_ps(1.44269504f), none = _mm512_set1_ps(-INFINITY);
    __m512i limit = _mm512_loadu_si512(t->limit), low = _mm512_loadu_si512(t->low);
    __m512 scale = _mm512_set1_ps(a->softcap ? a->scale / a->softcap : a->scale * 1.44269504f), top = state->top;
    __m512 cap = _mm512_mul_ps(_mm512_set1_ps(a->softcap), log2e);
    for (long key = 0; key < KEYS; key++) {
        __m512i position = _mm512_set1_epi32((int)(first_key + key));
        __mmask16 seen = _mm512_cmplt_epi32_mask(position, limit) & _mm512_cmpge_epi32_mask(position, low);
        __m512 s = _mm512_mul_ps(_mm512_load_ps(scores[key]), scale);
        if (a->softcap) s = _mm512_mul_ps(tanh_of(s), cap);
        s = _mm512_mask_blend_ps(seen, none, s);
        top = _mm512_max_ps(top, s);
        _mm512_store_ps(scores[key], s);
    }
    __m512 base = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(top, none, _CMP_EQ_OQ), top, _mm512_setzero_ps());
    __m512 shrink = exp2_of(_mm512_sub_ps(state->top, base)), total = _mm512_mul_ps(state->total, shrink);
    for (long key = 0; key < KEYS; key++) {
        __m512 weight = exp2_of(_mm512_sub_ps(_mm512_load_ps(scores[key]), base));
        total = _mm512_add_ps(total, weight);
        _mm512_store_ps(scores[key], weight);
    }
    *state = (softmax){top, total};
    return shrink;
}

// [key][lane] float32 -> [lane][key] bfloat16
static void turn_weights(float weights[KEYS][TILE], bf16 turned[TILE][KEYS]) {
    __m512i pairs[TILE]; // of keys side by side: one 32-bit element per lane
    for (int i = 0; i < TILE; i++) {
        __m512i even = _mm512_cvtepu16_epi32(narrow(_mm512_load_ps(weights[2 * i])));
        __m512i odd = _mm512_cvtepu16_epi32(narrow(_mm512_load_ps(weights[2 * i + 1])));
        pairs[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    }
    turn(pairs, (char *)turned, sizeof turned[0]);
}

// V of the block's keys as tiles: [head_dim / 16][16 pairs of keys][16 columns][2]
// Keys from `valid` on are somebody's leftovers, perhaps NaN: they count as zero.
static void pack_values(const layer *a, const tile_of_lanes *t, long valid, bf16 packed[][TILE][TILE][2]) {
    long stride = 2 * a->n_kv * a->head_dim, values = a->n_kv * a->head_dim;
    static const uint16_t order[2][32] = {
        {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    __m512i low = _mm512_loadu_si512(order[0]), high = _mm512_loadu_si512(order[1]);
    for (long pair = 0; pair < TILE; pair++) {
        const bf16 *even = t->keys[pair / 8] + values + pair % 8 * 2 * stride;
        for (long column = 0; column < a->head_dim; column += 32) {
            __m512i x = _mm512_maskz_loadu_epi16(2 * pair < valid ? -1 : 0, even + column);
            __m512i y = _mm512_maskz_loadu_epi16(2 * pair + 1 < valid ? -1 : 0, even + stride + column);
            _mm512_store_si512(packed[column / 16][pair], _mm512_permutex2var_epi16(x, low, y));
            _mm512_store_si512(packed[column / 16 + 1][pair], _mm512_permutex2var_epi16(x, high, y));
        }
    }
}

// found [16, head_dim] = found * shrink + weights V
static void accumulate(const layer *a, bf16 weights[TILE][KEYS], bf16 values[][TILE][TILE][2], const float *shrink,
                       long lanes, float found[TILE][MAX_HEAD_DIM]) {
    _Alignas(64) float part[2][TILE][TILE];
    _tile_loadd(4, weights, 64);
    for (long column = 0; column < a->head_dim; column += 32) {
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(5, values[column / 16], 64);
        _tile_loadd(6, values[column / 16 + 1], 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 6);
        _tile_stored(2, part[0], 64);
        _tile_stored(3, part[1], 64);
        for (long lane = 0; lane < lanes; lane++) {
            __m512 factor = _mm512_set1_ps(shrink[lane]);
            float *to = found[lane] + column;
            for (int i = 0; i < 2; i++)
                _mm512_store_ps(to + 16 * i, _mm512_fmadd_ps(_mm512_load_ps(to + 16 * i), factor,
                                                             _mm512_load_ps(part[i][lane])));
        }
    }
}

// Where the 16 keys from `key` on lie; beyond the sequence's blocks, in the null block.
static const bf16 *find_keys(const layer *a, const int64_t *blocks, long n_blocks, long key, long kv_head) {
    long block = key / a->block_size;
    long slot = (block < n_blocks ? blocks[block] : 0) * a->block_size + key % a->block_size;
    return a->cache + slot * 2 * a->n_kv * a->head_dim + kv_head * a->head_dim;
}

// Keys and values lie scattered: without this, a block would wait for memory before it could begin.
static void fetch_keys(const layer *a, const bf16 *keys) {
    for (long key = 0; key < TILE; key++, keys += 2 * a->n_kv * a->head_dim)
        for (long column = 0; column < a->head_dim; column += 32) {
            _mm_prefetch((const char *)(keys + column), _MM_HINT_T0);
            _mm_prefetch((const char *)(keys + a->n_kv * a->head_dim + column), _MM_HINT_T0);
        }
}

static void attend_tile(const layer *a, tile_of_lanes *t, const int64_t *blocks, long n_blocks, long kv_head) {
    _Alignas(64) bf16 queries[MAX_HEAD_DIM / TILE_K][TILE][TILE][2], values[MAX_HEAD_DIM / TILE][TILE][TILE][2];
    _Alignas(64) float scores[KEYS][TILE], found[TILE][MAX_HEAD_DIM], shrink[TILE];
    _Alignas(64) bf16 weights[TILE][KEYS];
    long last = 0, first = INT32_MAX;
    for (long lane = 0; lane < t->lanes; lane++) {
        if (t->limit[lane] > last) last = t->limit[lane];
        if (t->low[lane] < first) first = t->low[lane];
    }
    pack_queries(a, t, queries);
    softmax state = {_mm512_set1_ps(-INFINITY), _mm512_setzero_ps()};
    for (long lane = 0; lane < t->lanes; lane++) memset(found[lane], 0, a->head_dim * sizeof(float));
    for (long key = first / KEYS * KEYS; key < last; key += KEYS) {
        for (int half = 0; half < 2; half++) {
            long at = key + half * TILE;
            t->keys[half] = find_keys(a, blocks, n_blocks, at, kv_head);
            if (at + KEYS < last) fetch_keys(a, find_keys(a, blocks, n_blocks, at + KEYS, kv_head));
        }
        score(a, t, queries, scores);
        _mm512_store_ps(shrink, weigh(a, t, key, scores, &state));
        turn_weights(scores, weights);
        pack_values(a, t, last - key, values);
        accumulate(a, weights, values, shrink, t->lanes, found);
    }
    _Alignas(64) float totals[TILE];
    _mm512_store_ps(totals, state.total);
    for (long lane = 0; lane < t->lanes; lane++) {
        __m512 factor = _mm512_set1_ps(1.0f / totals[lane]);
        bf16 *to = a->out + t->row[lane] * a->ldo + t->head[lane] * a->head_dim;
        for (long j = 0; j < a->head_dim; j += 16)
            store_bf16(to + j, _mm512_mul_ps(_mm512_load_ps(found[lane] + j), factor));
    }
}

typedef struct {
    layer a;
    const int64_t *starts, *lengths, *blocks;
    long n_blocks;
} work;

// One sequence and one KV head.
static void attend_sequence(const void *context, long index) {
    const work *w = context;
    const layer *a = &w->a;
    long i = index / a->n_kv, kv_head = index % a->n_kv, end = w->starts[i + 1];
    long heads = a->group < TILE ? a->group : TILE, rows = TILE / heads;
    configure_tiles();
    for (long row = w->starts[i]; row < end; row += rows)
        for (long head = 0; head < a->group; head += heads) {
            tile_of_lanes t = {0};
            for (long r = row; r < row + rows && r < end; r++)
                for (long h = head; h < head + heads && h < a->group; h++, t.lanes++) {
                    long limit = w->lengths[i] - (end - 1 - r);
                    t.row[t.lanes] = r;
                    t.head[t.lanes] = kv_head * a->group + h;
                    t.limit[t.lanes] = (int32_t)limit;
                    t.low[t.lanes] = a->window && limit > a->window ? (int32_t)(limit - a->window) : 0;
                }
            attend_tile(a, &t, w->blocks + i * w->n_blocks, w->n_blocks, kv_head);
        }
    _tile_release();
}

// Rows [starts[i], starts[i + 1]) belong to sequence i and are its last before position lengths[i]. head_dim: a multiple
// of 32 up to 256; block_size: of 16; blocks: [sequences, n_blocks].
EXPORT void rz_attend(const bf16 *q, long ldq, bf16 *out, long ldo, const bf16 *cache, long n_kv, long group,
                      long head_dim, long block_size, float scale, float softcap, long window, const int64_t *starts,
                      const int64_t *lengths, const int64_t *blocks, long n_blocks, long sequences) {
    work w = {{q, ldq, out, ldo, cache, n_kv, group, head_dim, block_size, scale, softcap, window},
              starts, lengths, blocks, n_blocks};
    share(attend_sequence, &w, sequences * n_kv);
}
