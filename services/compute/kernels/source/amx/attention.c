// Attention over the paged cache with an online softmax (Milakov & Gimelshein, arXiv:1805.02867; Dao, arXiv:2205.14135).
//
// A tile holds 16 lanes; a lane is one query head of one row. A piece of work consists of tiles of one sequence, which process
// the same block of 32 keys one after another while the next block is fetched. Blocks are counted from the sequence's start.
// Every sum belongs to one lane and has a fixed order, and masked keys add exact zeros. So a lane's bits depend neither on the
// other lanes nor on how rows are divided into steps.
#include "tiles.h"

#define KEYS 32           // keys of a block: two tiles of scores, one step of the product with V
#define MAX_HEAD_DIM 256
#define TILES 8           // most tiles of a piece: their queries and sums stay in the second-level cache
#define FEW 4             // up to this many lanes, scores are read one by one

typedef struct {
    const bf16 *q; // [rows, ldq]
    long ldq;
    bf16 *out; // [rows, ldo]
    long ldo;
    const bf16 *cache; // [slots, 2 * n_kv * head_dim], K then V
    long n_kv, group, head_dim, block_tokens;
    float scale, softcap; // 0: no cap
    long window;          // 0: all keys
} layer;

typedef struct {
    long lanes, kv_head;
    long row[TILE], head[TILE];
    int32_t limit[TILE], low[TILE]; // a lane sees keys [low, limit)
    long first, last;               // some lane sees keys [first, last)
    long full_from, full_to;        // all lanes see keys [full_from, full_to)
    __m512 top, total; // per lane: the largest score so far (base 2), and the sum of 2^(score - top)
    _Alignas(64) bf16 queries[MAX_HEAD_DIM / TILE_K][TILE][TILE][2]; // pairs of values; lanes
    _Alignas(64) float found[TILE * MAX_HEAD_DIM]; // [lanes, head_dim], every 32 values in the order of `pack_values`
} tile;

typedef struct {
    const int64_t *blocks;
    long n_blocks, first, length; // first: first key that the last row sees; length: number of keys
    long head, heads;             // the piece's KV heads [head, head + heads)
} keys_of_piece;

static void pack_queries(const layer *a, tile *t) {
    for (long step = 0; step < a->head_dim / TILE_K; step++) {
        __m512i lanes[TILE];
        for (long lane = 0; lane < TILE; lane++) {
            const bf16 *q = a->q + t->row[lane] * a->ldq + t->head[lane] * a->head_dim + step * TILE_K;
            lanes[lane] = lane < t->lanes ? _mm512_loadu_si512(q) : _mm512_setzero_si512();
        }
        turn(lanes, (char *)t->queries[step], sizeof t->queries[0][0]);
    }
}

static void add_lane(const layer *a, tile *t, long row, long head, long limit) {
    long low = a->window && limit > a->window ? limit - a->window : 0, lane = t->lanes++;
    t->row[lane] = row;
    t->head[lane] = head;
    t->limit[lane] = (int32_t)limit;
    t->low[lane] = (int32_t)low;
    if (!lane || low < t->first) t->first = low;
    if (!lane || limit > t->last) t->last = limit;
    if (!lane || low > t->full_from) t->full_from = low;
    if (!lane || limit < t->full_to) t->full_to = limit;
}

static void begin(const layer *a, tile *t) {
    for (long lane = t->lanes; lane < TILE; lane++) t->row[lane] = t->head[lane] = t->limit[lane] = t->low[lane] = 0;
    pack_queries(a, t);
    t->top = _mm512_set1_ps(-INFINITY);
    t->total = _mm512_setzero_ps();
    memset(t->found, 0, t->lanes * a->head_dim * sizeof(float));
}

// Address of the 16 keys from `key` on; beyond the sequence's blocks that of the null block.
static const bf16 *find_keys(const layer *a, const keys_of_piece *s, long key) {
    long block = (uint32_t)key / (uint32_t)a->block_tokens;
    long slot = (block < s->n_blocks ? s->blocks[block] : 0) * a->block_tokens + key - block * a->block_tokens;
    return a->cache + slot * 2 * a->n_kv * a->head_dim;
}

// The prefetch of the block that a piece reads next, in the order of memory: for each position the keys of the piece's heads,
// then the values. It is spread over the work on the block before, because the CPU limits the outstanding lines and more
// prefetches would delay the loads behind them.
typedef struct {
    const char *at, *end; // the run that is being fetched
    const char *half[2];  // start of each half of the block
    long size, apart;     // bytes of a run; bytes from the start of a run to the next start
    long run, runs;       // the next run; runs of a half
    long pair, step, lanes, column; // lines to fetch per pair of keys, per step, and so on
} ahead;

static __attribute__((noinline)) void begin_run(ahead *f) {
    f->at = f->run < 2 * f->runs ? f->half[f->run / f->runs] + f->run % f->runs * f->apart : f->half[0];
    f->end = f->at + f->size;
    f->run++;
}

INLINE void fetch(ahead *f, long lines) {
    for (; lines > 0; lines--) {
        _mm_prefetch(f->at, _MM_HINT_T1);
        if ((f->at += 64) >= f->end) begin_run(f);
    }
}

static void begin_fetch(ahead *f, const layer *a, const keys_of_piece *s, long key, long tiles) {
    long all = s->heads == a->n_kv; // then the runs are contiguous
    f->size = s->heads * a->head_dim * sizeof(bf16) * (all ? 2 * TILE : 1);
    f->apart = a->n_kv * a->head_dim * sizeof(bf16);
    f->runs = all ? 1 : 2 * TILE;
    long lines = 2 * f->runs * f->size / (64 * tiles), steps = a->head_dim / TILE_K;
    f->pair = lines / (4 * TILE);
    f->step = lines / (8 * steps);
    f->lanes = lines / 6;
    f->column = lines / (4 * steps);
    for (int half = 0; half < 2; half++) f->half[half] = (const char *)(find_keys(a, s, key + half * TILE) + s->head * a->head_dim);
    f->run = 0;
    begin_run(f);
}

static void score(const layer *a, const tile *t, const bf16 *const keys[2], ahead *next, float scores[KEYS][TILE]) {
    long stride = 2 * a->n_kv * a->head_dim * sizeof(bf16);
    _tile_zero(0);
    _tile_zero(1);
    for (long step = 0; step < a->head_dim / TILE_K; step++) {
        _tile_loadd(4, t->queries[step], 64);
        _tile_loadd(5, keys[0] + t->kv_head * a->head_dim + step * TILE_K, stride);
        _tile_loadd(6, keys[1] + t->kv_head * a->head_dim + step * TILE_K, stride);
        fetch(next, next->step);
        _tile_dpbf16ps(0, 5, 4);
        _tile_dpbf16ps(1, 6, 4);
    }
    _tile_stored(0, scores[0], 64);
    _tile_stored(1, scores[TILE], 64);
}

// Caps the scores and masks keys that a lane does not see.
static void restrict_scores(const layer *a, const tile *t, long first_key, float scores[KEYS][TILE]) {
    __m512i limit = _mm512_loadu_si512(t->limit), low = _mm512_loadu_si512(t->low);
    __m512 down = _mm512_set1_ps(a->scale / a->softcap), up = _mm512_set1_ps(a->softcap);
    for (long key = 0; key < KEYS; key++) {
        __m512i position = _mm512_set1_epi32((int)(first_key + key));
        __mmask16 seen = _mm512_cmplt_epi32_mask(position, limit) & _mm512_cmpge_epi32_mask(position, low);
        __m512 s = _mm512_load_ps(scores[key]);
        if (a->softcap) s = _mm512_mul_ps(tanh_of(_mm512_mul_ps(s, down)), up);
        _mm512_store_ps(scores[key], _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), s));
    }
}

// [key][lane] -> [lane][key]
static void turn_scores(float scores[KEYS][TILE], long lanes, float turned[TILE][KEYS]) {
    if (lanes <= FEW) {
        __m512i at = _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 4);
        for (long lane = 0; lane < lanes; lane++)
            for (int half = 0; half < 2; half++)
                _mm512_store_ps(turned[lane] + half * TILE, _mm512_i32gather_ps(at, scores[half * TILE] + lane, 4));
        return;
    }
    for (int half = 0; half < 2; half++) {
        __m512i rows[TILE];
        for (int i = 0; i < TILE; i++) rows[i] = _mm512_load_si512(scores[half * TILE + i]);
        turn(rows, (char *)(turned[0] + half * TILE), sizeof turned[0]);
    }
}

// Turns scores into weights relative to the new top; returns the factor for earlier sums.
static __m512 weigh(const layer *a, tile *t, long first_key, float scores[KEYS][TILE], ahead *next, bf16 weights[TILE][KEYS]) {
    _Alignas(64) float turned[TILE][KEYS], bases[TILE];
    __m512 scale = _mm512_set1_ps((a->softcap ? 1.0f : a->scale) * 1.44269504f), top = _mm512_set1_ps(-INFINITY);
    if (a->softcap || first_key < t->full_from || first_key + KEYS > t->full_to) restrict_scores(a, t, first_key, scores);
    for (long key = 0; key < KEYS; key++) top = _mm512_max_ps(top, _mm512_load_ps(scores[key]));
    top = _mm512_max_ps(t->top, _mm512_mul_ps(top, scale)); // rounding keeps the order
    __mmask16 nothing = _mm512_cmp_ps_mask(top, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ); // lanes that have seen no key yet
    __m512 base = _mm512_mask_blend_ps(nothing, top, _mm512_setzero_ps());
    __m512 shrink = exp2_of(_mm512_sub_ps(t->top, base)), sums[TILE];
    _mm512_store_ps(bases, base);
    fetch(next, next->lanes);
    turn_scores(scores, t->lanes, turned);
    fetch(next, next->lanes);
    for (long lane = 0; lane < TILE; lane++) sums[lane] = _mm512_setzero_ps();
    for (long lane = 0; lane < t->lanes; lane++) {
        __m512 from = _mm512_set1_ps(bases[lane]);
        __m512 low = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(turned[lane]), scale, from));
        __m512 high = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(turned[lane] + TILE), scale, from));
        sums[lane] = _mm512_add_ps(low, high);
        _mm512_store_si512(weights[lane], (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    t->total = _mm512_fmadd_ps(t->total, shrink, totals_of(sums));
    t->top = top;
    return shrink;
}

// Packs the block's V for the product: [head_dim / 16][16 pairs of keys][16 columns][2]. Of every 32 columns, those in the
// lower halves of 128 bits come first. Keys from `valid` on hold stale data, perhaps NaN, and are replaced by zeros.
static void pack_values(const layer *a, const bf16 *const keys[2], long kv_head, long valid, ahead *next, bf16 packed[][TILE][TILE][2]) {
    long stride = 2 * a->n_kv * a->head_dim, values = (a->n_kv + kv_head) * a->head_dim;
    for (long pair = 0; pair < TILE; pair++) {
        fetch(next, next->pair);
        const bf16 *even = keys[pair / 8] + values + pair % 8 * 2 * stride;
        __mmask32 first = 2 * pair < valid ? -1 : 0, second = 2 * pair + 1 < valid ? -1 : 0;
        for (long column = 0; column < a->head_dim; column += 32) {
            __m512i x = _mm512_maskz_loadu_epi16(first, even + column);
            __m512i y = _mm512_maskz_loadu_epi16(second, even + stride + column);
            _mm512_store_si512(packed[column / 16][pair], _mm512_unpacklo_epi16(x, y));
            _mm512_store_si512(packed[column / 16 + 1][pair], _mm512_unpackhi_epi16(x, y));
        }
    }
}

// found = found * shrink + weights V
static void accumulate(const layer *a, tile *t, bf16 weights[TILE][KEYS], bf16 values[][TILE][TILE][2], ahead *next, __m512 shrink) {
    _Alignas(64) float part[2][TILE][TILE], factors[TILE];
    _mm512_store_ps(factors, shrink);
    _tile_loadd(4, weights, 64);
    for (long column = 0; column < a->head_dim; column += 32) {
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(5, values[column / 16], 64);
        _tile_loadd(6, values[column / 16 + 1], 64);
        fetch(next, next->column);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 6);
        _tile_stored(2, part[0], 64);
        _tile_stored(3, part[1], 64);
        for (long lane = 0; lane < t->lanes; lane++) {
            __m512 factor = _mm512_set1_ps(factors[lane]);
            float *to = t->found + lane * a->head_dim + column;
            for (int i = 0; i < 2; i++)
                _mm512_store_ps(to + 16 * i, _mm512_fmadd_ps(_mm512_load_ps(to + 16 * i), factor, _mm512_load_ps(part[i][lane])));
        }
    }
}

static void finish(const layer *a, const tile *t) {
    static const int32_t order[2][TILE] = {{0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23},
                                           {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31}};
    _Alignas(64) float totals[TILE];
    _mm512_store_ps(totals, t->total);
    for (long lane = 0; lane < t->lanes; lane++) {
        __m512 factor = _mm512_set1_ps(1.0f / totals[lane]);
        bf16 *to = a->out + t->row[lane] * a->ldo + t->head[lane] * a->head_dim;
        const float *found = t->found + lane * a->head_dim;
        for (long j = 0; j < a->head_dim; j += 32)
            for (int half = 0; half < 2; half++) {
                __m512i at = _mm512_loadu_si512(order[half]);
                __m512 x = _mm512_permutex2var_ps(_mm512_load_ps(found + j), at, _mm512_load_ps(found + j + 16));
                store_bf16(to + j + 16 * half, _mm512_mul_ps(x, factor));
            }
    }
}

// `next`: the keys that this thread reads afterwards, or null.
static void attend_tiles(const layer *a, tile *tiles, long n, const keys_of_piece *s, const keys_of_piece *next) {
    _Alignas(64) bf16 values[MAX_HEAD_DIM / TILE][TILE][TILE][2], weights[TILE][KEYS] = {0};
    _Alignas(64) float scores[KEYS][TILE];
    long first = tiles[0].first, last = tiles[0].last;
    for (long i = 0; i < n; i++) {
        begin(a, tiles + i);
        if (tiles[i].first < first) first = tiles[i].first;
        if (tiles[i].last > last) last = tiles[i].last;
    }
    for (long key = first / KEYS * KEYS; key < last; key += KEYS) {
        const bf16 *keys[2] = {find_keys(a, s, key), find_keys(a, s, key + TILE)};
        ahead f = {0};
        if (key + KEYS < last)
            begin_fetch(&f, a, s, key + KEYS, n);
        else if (next)
            begin_fetch(&f, a, next, next->first / KEYS * KEYS, n);
        long packed = -1;
        for (long i = 0; i < n; i++) {
            tile *t = tiles + i;
            if (key >= t->last || key + KEYS <= t->first) continue;
            if (packed != t->kv_head) pack_values(a, keys, packed = t->kv_head, s->length - key, &f, values);
            score(a, t, keys, &f, scores);
            accumulate(a, t, weights, values, &f, weigh(a, t, key, scores, &f, weights));
        }
    }
    for (long i = 0; i < n; i++) finish(a, tiles + i);
}

typedef struct {
    layer a;
    const int64_t *starts, *lengths, *blocks;
    long n_blocks, tables, sequences; // tables: those of a sequence, 1 or one for each KV head
    const long *pieces;   // [sequences + 1]: number of pieces of divided sequences before each; these pieces come first
    long tiles;           // most tiles of such a piece
    long heads, together; // for the other sequences: heads of a unit, units of a piece
} work;

static long rows_of(const work *w, long i) { return w->starts[i + 1] - w->starts[i]; }

static keys_of_piece keys_of(const work *w, long i, long head, long heads) {
    long length = w->lengths[i], first = w->a.window && length > w->a.window ? length - w->a.window : 0;
    return (keys_of_piece){w->blocks + (w->tables > 1 ? i * w->a.n_kv + head : i) * w->n_blocks, w->n_blocks, first, length, head, heads};
}

static long heads_of_tile(const layer *a) { return a->group < TILE ? a->group : TILE; }

static long tiles_of(const layer *a, long rows) { // tiles of a KV head
    long heads = heads_of_tile(a), at_once = TILE / heads;
    return (rows + at_once - 1) / at_once * ((a->group + heads - 1) / heads);
}

// Whether the tiles of each KV head are divided into pieces: for a prompt, or when a row's heads need more than TILES tiles.
static int is_divided(const work *w, long i) { return rows_of(w, i) > 1 || tiles_of(&w->a, 1) > TILES; }

// Fills `t` with the tile `index` of a KV head of sequence `i`.
static void fill_tile(const work *w, tile *t, long i, long kv_head, long index) {
    const layer *a = &w->a;
    long heads = heads_of_tile(a), rows = TILE / heads, across = (a->group + heads - 1) / heads;
    long row = w->starts[i] + index / across * rows, end = w->starts[i + 1], head = index % across * heads;
    t->lanes = 0;
    t->kv_head = kv_head;
    for (long r = row; r < row + rows && r < end; r++)
        for (long h = head; h < head + heads && h < a->group; h++)
            add_lane(a, t, r, kv_head * a->group + h, w->lengths[i] - (end - 1 - r));
}

static void attend_divided(const work *w, tile *tiles, long piece) {
    long i = 0;
    while (w->pieces[i + 1] <= piece) i++;
    long all = tiles_of(&w->a, rows_of(w, i)), per_head = (all + w->tiles - 1) / w->tiles;
    long kv_head = (piece - w->pieces[i]) / per_head, first = (piece - w->pieces[i]) % per_head * w->tiles, n = 0;
    for (; n < w->tiles && first + n < all; n++) fill_tile(w, tiles + n, i, kv_head, first + n);
    keys_of_piece s = keys_of(w, i, kv_head, 1);
    attend_tiles(&w->a, tiles, n, &s, 0);
}

// Finds a unit's sequence and KV heads; returns 0 for a divided sequence, whose tiles belong to other pieces.
static int find_unit(const work *w, long unit, long *i, keys_of_piece *s) {
    long units = (w->a.n_kv + w->heads - 1) / w->heads, head = unit % units * w->heads;
    *i = unit / units;
    *s = keys_of(w, *i, head, head + w->heads < w->a.n_kv ? w->heads : w->a.n_kv - head);
    return !is_divided(w, *i);
}

static void attend_units(const work *w, tile *tiles, long unit, long end) {
    for (; unit < end; unit++) {
        keys_of_piece s, next;
        long i, other;
        if (!find_unit(w, unit, &i, &s)) continue;
        int more = unit + 1 < end && find_unit(w, unit + 1, &other, &next);
        long across = tiles_of(&w->a, 1), n = 0;
        for (long head = 0; head < s.heads; head++)
            for (long index = 0; index < across; index++) fill_tile(w, tiles + n++, i, s.head + head, index);
        attend_tiles(&w->a, tiles, n, &s, more ? &next : 0);
    }
}

static void attend_piece(const void *context, long piece) {
    const work *w = context;
    tile tiles[TILES];
    long divided = w->pieces[w->sequences], unit = (piece - divided) * w->together;
    long units = w->sequences * ((w->a.n_kv + w->heads - 1) / w->heads);
    configure_tiles();
    if (piece < divided)
        attend_divided(w, tiles, piece);
    else
        attend_units(w, tiles, unit, unit + w->together < units ? unit + w->together : units);
    _tile_release();
}

#define PIECES 8 // per thread, if there are enough sequences

// Rows [starts[i], starts[i + 1]) are the last rows of sequence i before position lengths[i]. head_dim is a multiple of 32 up
// to 256, block_tokens a multiple of 16; blocks: [sequences, tables, n_blocks].
EXPORT void rz_attend(const bf16 *q, long ldq, bf16 *out, long ldo, const bf16 *cache, long n_kv, long group,
                      long head_dim, long block_tokens, float scale, float softcap, long window, const int64_t *starts,
                      const int64_t *lengths, const int64_t *blocks, long n_blocks, long tables, long sequences) {
    long pieces[sequences + 1], wanted = PIECES * pool_threads();
    work w = {{q, ldq, out, ldo, cache, n_kv, group, head_dim, block_tokens, scale, softcap, window}, starts, lengths, blocks, n_blocks, tables, sequences, pieces, TILES, 1, 1};
    long tiles = 0;
    for (long i = 0; i < sequences; i++) tiles += is_divided(&w, i) ? n_kv * tiles_of(&w.a, rows_of(&w, i)) : 0;
    tiles /= pool_threads(); // a piece packs its values once, so it has as many tiles as leave no thread idle
    w.tiles = tiles > TILES || pool_threads() == 1 ? TILES : (tiles < 1 ? 1 : tiles);
    pieces[0] = 0;
    for (long i = 0; i < sequences; i++) {
        long n = is_divided(&w, i) ? n_kv * ((tiles_of(&w.a, rows_of(&w, i)) + w.tiles - 1) / w.tiles) : 0;
        pieces[i + 1] = pieces[i] + n;
    }
    long most = TILES / tiles_of(&w.a, 1);
    // A lone sequence's heads are divided once: parts of memory that lie far apart take longer to read than the threads would wait.
    w.heads = sequences < pool_threads() ? (n_kv + pool_threads() - 1) / pool_threads() : sequences * n_kv / wanted;
    w.heads = tables > 1 ? 1 : w.heads > most ? most
                                              : w.heads; // the heads of a unit read the same keys
    w.heads = w.heads > n_kv ? n_kv : (w.heads < 1 ? 1 : w.heads);
    long units = sequences * ((n_kv + w.heads - 1) / w.heads);
    w.together = pool_threads() == 1 ? units : (units + wanted - 1) / wanted;
    share(attend_piece, &w, pieces[sequences] + (units + w.together - 1) / w.together);
}
