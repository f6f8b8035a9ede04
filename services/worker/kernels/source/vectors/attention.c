// Attention over the paged cache in float32, for CPUs with AVX2, with an online softmax (Milakov & Gimelshein,
// arXiv:1805.02867).
//
// A lane is one query head of one row. Keys are taken in blocks of 16 counted from the sequence's start, and whatever is
// summed for a lane is summed in an order of its own: over head_dim in eight partial sums, over keys one after the other.
// Masked keys add exact zeros. Hence a lane's bits depend neither on the other lanes nor on how rows are cut into steps.
#include "common.h"
#include "lanes.h"

#define KEYS 16

typedef struct {
    const tile_lanes *lanes;
    int half; // bfloat16, not float32
    float queries[LANES * MAX_HEAD_DIM], found[LANES * MAX_HEAD_DIM]; // [lanes, head_dim]
    float scores[LANES][KEYS];
    float top[LANES], total[LANES], shrink[LANES];
} tile;

typedef struct {
    const float *keys[KEYS], *values[KEYS];
    float wide[2][KEYS * MAX_HEAD_DIM]; // bfloat16 keys and values as float32
} block;

INLINE float max_of(__m256 x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

// Queries come scaled, to base 2 where nothing but the exponential follows.
static void take_queries(const layer *a, tile *t) {
    const tile_lanes *l = t->lanes;
    __m256 scale = _mm256_set1_ps(a->softcap ? a->scale / a->softcap : a->scale * 1.44269504f);
    for (long lane = 0; lane < l->n; lane++) {
        long at = l->row[lane] * a->ldq + l->head[lane] * a->head_dim;
        for (long j = 0; j < a->head_dim; j += WIDTH) {
            __m256 q = t->half ? load_bf16((const bf16 *)a->q + at + j) : _mm256_loadu_ps((const float *)a->q + at + j);
            _mm256_storeu_ps(t->queries + lane * a->head_dim + j, _mm256_mul_ps(q, scale));
        }
        t->top[lane] = -INFINITY;
        t->total[lane] = 0;
    }
    memset(t->found, 0, l->n * a->head_dim * sizeof(float));
}

INLINE void dots(const float *queries, const float *const *keys, long head_dim, int lanes, int n, float (*scores)[KEYS]) {
    __m256 sums[8];
    for (int i = 0; i < lanes * n; i++) sums[i] = _mm256_setzero_ps();
    for (long j = 0; j < head_dim; j += WIDTH)
        for (int key = 0; key < n; key++) {
            __m256 k = _mm256_loadu_ps(keys[key] + j);
            for (int lane = 0; lane < lanes; lane++)
                sums[lane * n + key] = _mm256_fmadd_ps(_mm256_loadu_ps(queries + lane * head_dim + j), k, sums[lane * n + key]);
        }
    for (int lane = 0; lane < lanes; lane++)
        for (int key = 0; key < n; key++) scores[lane][key] = total_of(sums[lane * n + key]);
}

static void score(const layer *a, tile *t, const block *b) {
    long lane = 0;
    for (; lane + 4 <= t->lanes->n; lane += 4)
        for (int key = 0; key < KEYS; key += 2)
            dots(t->queries + lane * a->head_dim, b->keys + key, a->head_dim, 4, 2, (float (*)[KEYS])(t->scores[lane] + key));
    for (; lane < t->lanes->n; lane++)
        for (int key = 0; key < KEYS; key += 8)
            dots(t->queries + lane * a->head_dim, b->keys + key, a->head_dim, 1, 8, (float (*)[KEYS])(t->scores[lane] + key));
}

// Turns a lane's scores into weights relative to its new top; earlier sums shrink to match.
static void weigh(const layer *a, tile *t, long lane, long first_key) {
    __m256 part[2], none = _mm256_set1_ps(-INFINITY), cap = _mm256_set1_ps(a->softcap * 1.44269504f);
    __m256i limit = _mm256_set1_epi32(t->lanes->limit[lane]), low = _mm256_set1_epi32(t->lanes->low[lane] - 1);
    for (int i = 0; i < 2; i++) {
        __m256i position = _mm256_add_epi32(_mm256_set1_epi32((int)first_key + i * WIDTH), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        __m256i seen = _mm256_and_si256(_mm256_cmpgt_epi32(limit, position), _mm256_cmpgt_epi32(position, low));
        __m256 s = _mm256_loadu_ps(t->scores[lane] + i * WIDTH);
        if (a->softcap) s = _mm256_mul_ps(tanh_of(s), cap);
        part[i] = _mm256_blendv_ps(none, s, _mm256_castsi256_ps(seen));
    }
    float top = fmaxf(t->top[lane], max_of(_mm256_max_ps(part[0], part[1])));
    float base = top == -INFINITY ? 0 : top; // nothing is seen yet
    float shrink = _mm256_cvtss_f32(exp2_of(_mm256_set1_ps(t->top[lane] - base)));
    for (int i = 0; i < 2; i++) {
        part[i] = exp2_of(_mm256_sub_ps(part[i], _mm256_set1_ps(base)));
        _mm256_storeu_ps(t->scores[lane] + i * WIDTH, part[i]);
    }
    t->top[lane] = top;
    t->total[lane] = t->total[lane] * shrink + total_of(_mm256_add_ps(part[0], part[1]));
    t->shrink[lane] = shrink;
}

INLINE void add(const float (*weights)[KEYS], const float *const *values, long keys, const float *shrink, long j, int lanes,
                int n, float *found, long head_dim) {
    __m256 sums[8];
    for (int lane = 0; lane < lanes; lane++)
        for (int i = 0; i < n; i++)
            sums[lane * n + i] = _mm256_mul_ps(_mm256_loadu_ps(found + lane * head_dim + j + i * WIDTH), _mm256_set1_ps(shrink[lane]));
    for (long key = 0; key < keys; key++)
        for (int i = 0; i < n; i++) {
            __m256 v = _mm256_loadu_ps(values[key] + j + i * WIDTH);
            for (int lane = 0; lane < lanes; lane++)
                sums[lane * n + i] = _mm256_fmadd_ps(_mm256_set1_ps(weights[lane][key]), v, sums[lane * n + i]);
        }
    for (int lane = 0; lane < lanes; lane++)
        for (int i = 0; i < n; i++) _mm256_storeu_ps(found + lane * head_dim + j + i * WIDTH, sums[lane * n + i]);
}

// found = found * shrink + weights V
static void accumulate(const layer *a, tile *t, const block *b, long keys) {
    long lane = 0, size = a->head_dim;
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
        for (; j + 8 * WIDTH <= size; j += 8 * WIDTH)
            add(weights, b->values, keys, t->shrink + lane, j, 1, 8, t->found + lane * size, size);
        for (; j < size; j += WIDTH) add(weights, b->values, keys, t->shrink + lane, j, 1, 1, t->found + lane * size, size);
    }
}

// Keys from `last` on are somebody's leftovers, perhaps NaN: they count as zero.
static void take_keys(const layer *a, const keys_of_sequence *s, long key, long last, int half, block *b) {
    static const float zeros[MAX_HEAD_DIM];
    long values = a->n_kv * a->head_dim;
    for (int i = 0; i < KEYS; i++) {
        if (key + i >= last) {
            b->keys[i] = b->values[i] = zeros;
            continue;
        }
        long at = find_key(a, s, key + i);
        if (!half) {
            b->keys[i] = (const float *)a->cache + at;
            b->values[i] = b->keys[i] + values;
            continue;
        }
        float *wide[2] = {b->wide[0] + i * a->head_dim, b->wide[1] + i * a->head_dim};
        for (long j = 0; j < a->head_dim; j += WIDTH) {
            _mm256_storeu_ps(wide[0] + j, load_bf16((const bf16 *)a->cache + at + j));
            _mm256_storeu_ps(wide[1] + j, load_bf16((const bf16 *)a->cache + at + values + j));
        }
        b->keys[i] = wide[0];
        b->values[i] = wide[1];
    }
}

static void give_results(const layer *a, const tile *t) {
    const tile_lanes *l = t->lanes;
    for (long lane = 0; lane < l->n; lane++) {
        __m256 factor = _mm256_set1_ps(1.0f / t->total[lane]);
        long to = l->row[lane] * a->ldo + l->head[lane] * a->head_dim;
        for (long j = 0; j < a->head_dim; j += WIDTH) {
            __m256 y = _mm256_mul_ps(_mm256_loadu_ps(t->found + lane * a->head_dim + j), factor);
            if (t->half)
                store_bf16((bf16 *)a->out + to + j, y);
            else
                _mm256_storeu_ps((float *)a->out + to + j, y);
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
        fetch_ahead(a, s, key, l->last, KEYS);
        take_keys(a, s, key, l->last, half, &b);
        score(a, &t, &b);
        for (long lane = 0; lane < l->n; lane++) weigh(a, &t, lane, key);
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
