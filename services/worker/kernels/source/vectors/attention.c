// Attention over the paged cache in float32, for CPUs with AVX2, with an online softmax (Milakov & Gimelshein,
// arXiv:1805.02867).
//
// A lane is one query head of one row. Keys are taken in blocks of 16 counted from the sequence's start, and whatever is
// summed for a lane is summed in an order of its own: over head_dim in eight partial sums, over keys one after the other.
// Masked keys add exact zeros. Hence a lane's bits depend neither on the other lanes nor on how rows are cut into steps.
#include "common.h"

#define KEYS 16
#define LANES 32
#define MAX_HEAD_DIM 256

typedef struct {
    const void *q; // [rows, ldq], bfloat16 or float32 like everything here
    long ldq;
    void *out; // [rows, ldo]
    long ldo;
    const void *cache; // [slots, 2 * n_kv * head_dim], K then V
    long n_kv, group, head_dim, block_size;
    float scale, softcap; // 0: no cap
    long window;          // 0: all keys
    int half;             // bfloat16
} layer;

typedef struct {
    long lanes;
    long row[LANES], head[LANES];
    int32_t limit[LANES], low[LANES]; // keys [low, limit) are seen
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
    __m256 scale = _mm256_set1_ps(a->softcap ? a->scale / a->softcap : a->scale * 1.44269504f);
    for (long lane = 0; lane < t->lanes; lane++) {
        long at = t->row[lane] * a->ldq + t->head[lane] * a->head_dim;
        for (long j = 0; j < a->head_dim; j += WIDTH) {
            __m256 q = a->half ? load_bf16((const bf16 *)a->q + at + j) : _mm256_loadu_ps((const float *)a->q + at + j);
            _mm256_storeu_ps(t->queries + lane * a->head_dim + j, _mm256_mul_ps(q, scale));
        }
        t->top[lane] = -INFINITY;
        t->total[lane] = 0;
    }
    memset(t->found, 0, t->lanes * a->head_dim * sizeof(float));
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
    for (; lane + 4 <= t->lanes; lane += 4)
        for (int key = 0; key < KEYS; key += 2)
            dots(t->queries + lane * a->head_dim, b->keys + key, a->head_dim, 4, 2, (float (*)[KEYS])(t->scores[lane] + key));
    for (; lane < t->lanes; lane++)
        for (int key = 0; key < KEYS; key += 8)
            dots(t->queries + lane * a->head_dim, b->keys + key, a->head_dim, 1, 8, (float (*)[KEYS])(t->scores[lane] + key));
}

// Turns a lane's scores into weights relative to its new top; earlier sums shrink to match.
static void weigh(const layer *a, tile *t, long lane, long first_key) {
    __m256 part[2], none = _mm256_set1_ps(-INFINITY), cap = _mm256_set1_ps(a->softcap * 1.44269504f);
    __m256i limit = _mm256_set1_epi32(t->limit[lane]), low = _mm256_set1_epi32(t->low[lane] - 1);
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
    for (; lane + 4 <= t->lanes; lane += 4) {
        const float(*weights)[KEYS] = (const float(*)[KEYS])t->scores[lane];
        long j = 0;
        for (; j + 2 * WIDTH <= size; j += 2 * WIDTH)
            add(weights, b->values, keys, t->shrink + lane, j, 4, 2, t->found + lane * size, size);
        if (j < size) add(weights, b->values, keys, t->shrink + lane, j, 4, 1, t->found + lane * size, size);
    }
    for (; lane < t->lanes; lane++) {
        const float(*weights)[KEYS] = (const float(*)[KEYS])t->scores[lane];
        long j = 0;
        for (; j + 8 * WIDTH <= size; j += 8 * WIDTH)
            add(weights, b->values, keys, t->shrink + lane, j, 1, 8, t->found + lane * size, size);
        for (; j < size; j += WIDTH) add(weights, b->values, keys, t->shrink + lane, j, 1, 1, t->found + lane * size, size);
    }
}

// Index in the cache of a key; beyond the sequence's blocks, in the null block.
INLINE long find_key(const layer *a, const int64_t *blocks, long n_blocks, long key, long kv_head) {
    long index = key / a->block_size;
    long slot = (index < n_blocks ? blocks[index] : 0) * a->block_size + key % a->block_size;
    return (slot * 2 * a->n_kv + kv_head) * a->head_dim;
}

// Keys lie scattered: without this, a block would wait for memory before it could begin.
static void fetch(const layer *a, const int64_t *blocks, long n_blocks, long key, long last, long kv_head) {
    long size = a->half ? sizeof(bf16) : sizeof(float);
    for (long end = key + KEYS < last ? key + KEYS : last; key < end; key++) {
        const char *k = (const char *)a->cache + find_key(a, blocks, n_blocks, key, kv_head) * size;
        for (long at = 0; at < a->head_dim * size; at += 64) {
            _mm_prefetch(k + at, _MM_HINT_T0);
            _mm_prefetch(k + a->n_kv * a->head_dim * size + at, _MM_HINT_T0);
        }
    }
}

// Keys from `last` on are somebody's leftovers, perhaps NaN: they count as zero.
static void take_keys(const layer *a, const int64_t *blocks, long n_blocks, long key, long last, long kv_head, block *b) {
    static const float zeros[MAX_HEAD_DIM];
    long values = a->n_kv * a->head_dim;
    for (int i = 0; i < KEYS; i++) {
        if (key + i >= last) {
            b->keys[i] = b->values[i] = zeros;
            continue;
        }
        long at = find_key(a, blocks, n_blocks, key + i, kv_head);
        if (!a->half) {
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
    for (long lane = 0; lane < t->lanes; lane++) {
        __m256 factor = _mm256_set1_ps(1.0f / t->total[lane]);
        long to = t->row[lane] * a->ldo + t->head[lane] * a->head_dim;
        for (long j = 0; j < a->head_dim; j += WIDTH) {
            __m256 y = _mm256_mul_ps(_mm256_loadu_ps(t->found + lane * a->head_dim + j), factor);
            if (a->half)
                store_bf16((bf16 *)a->out + to + j, y);
            else
                _mm256_storeu_ps((float *)a->out + to + j, y);
        }
    }
}

static void attend_tile(const layer *a, tile *t, const int64_t *blocks, long n_blocks, long kv_head) {
    block b;
    long last = 0, first = INT32_MAX;
    for (long lane = 0; lane < t->lanes; lane++) {
        if (t->limit[lane] > last) last = t->limit[lane];
        if (t->low[lane] < first) first = t->low[lane];
    }
    take_queries(a, t);
    for (long key = first / KEYS * KEYS; key < last; key += KEYS) {
        fetch(a, blocks, n_blocks, key + KEYS, last, kv_head);
        take_keys(a, blocks, n_blocks, key, last, kv_head, &b);
        score(a, t, &b);
        for (long lane = 0; lane < t->lanes; lane++) weigh(a, t, lane, key);
        accumulate(a, t, &b, last - key < KEYS ? last - key : KEYS);
    }
    give_results(a, t);
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
    long heads = a->group < LANES ? a->group : LANES, rows = LANES / heads;
    for (long row = w->starts[i]; row < end; row += rows)
        for (long head = 0; head < a->group; head += heads) {
            tile t;
            t.lanes = 0;
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
}

static void attend(const layer *a, const int64_t *starts, const int64_t *lengths, const int64_t *blocks, long n_blocks,
                   long sequences) {
    work w = {*a, starts, lengths, blocks, n_blocks};
    share(attend_sequence, &w, sequences * a->n_kv);
}

// Rows [starts[i], starts[i + 1]) belong to sequence i and are its last before position lengths[i]. head_dim: a multiple
// of 8 up to 256; blocks: [sequences, n_blocks].
EXPORT void rz_attend(const bf16 *q, long ldq, bf16 *out, long ldo, const bf16 *cache, long n_kv, long group, long head_dim,
                      long block_size, float scale, float softcap, long window, const int64_t *starts, const int64_t *lengths,
                      const int64_t *blocks, long n_blocks, long sequences) {
    layer a = {q, ldq, out, ldo, cache, n_kv, group, head_dim, block_size, scale, softcap, window, 1};
    attend(&a, starts, lengths, blocks, n_blocks, sequences);
}

// The same in float32.
EXPORT void rz_attend_float(const float *q, long ldq, float *out, long ldo, const float *cache, long n_kv, long group,
                            long head_dim, long block_size, float scale, float softcap, long window, const int64_t *starts,
                            const int64_t *lengths, const int64_t *blocks, long n_blocks, long sequences) {
    layer a = {q, ldq, out, ldo, cache, n_kv, group, head_dim, block_size, scale, softcap, window, 0};
    attend(&a, starts, lengths, blocks, n_blocks, sequences);
}
