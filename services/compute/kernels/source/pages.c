// Pages of long contexts: summaries of the keys of a block of the cache, and the choice of the blocks that a decode reads by the
// largest product of its query with one of their keys, as the summaries let it expect (torch/pages.py).
//
// A summary is [n_kv, 2, head_dim]: the least and the largest number of each dimension of a block's keys, not rotated. It is made
// when a block's last position is written. Sums have a fixed order, so a choice does not depend on the rest of the step.
#include "codes.h"
#include "order.h"

#define LAST 2 // pages at the end that are always read, as is the first one
#define MAX_HEAD_DIM 256
#define HEADS 4    // most query heads that a summary is multiplied with at once
#define PIECE 128  // pages that a task scores
#define BEYOND 32  // null blocks after the chosen ones: attention looks up to 31 keys beyond a sequence's end

typedef struct {
    const void *cache;
    bf16 *summaries;
    const int64_t *slots;
    long n_kv, head_dim, block_tokens;
    int coded;
} summary;

static float float_of(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

// Stores the key at `place` of a block as floats.
static void take_key(const summary *p, long block, long head, long place, float *key) {
    long size = p->head_dim;
    if (!p->coded) {
        const bf16 *from = (const bf16 *)p->cache + ((block * p->block_tokens + place) * 2 * p->n_kv + head) * size;
        for (long j = 0; j < size; j++) key[j] = float_of(from[j]);
        return;
    }
    const int8_t *codes = (const int8_t *)p->cache + (block * 2 * p->n_kv + head) * bytes_of_run(p->block_tokens, size);
    float scale = float_of(((const bf16 *)(codes + p->block_tokens * size))[place]);
    for (long j = 0; j < size; j++) key[j] = (float)codes[place * size + j] * scale;
    rotate_head(key, size);
}

static void summarize(const void *context, long row) {
    const summary *p = context;
    long block = p->slots[row] / p->block_tokens, size = p->head_dim;
    if (p->slots[row] % p->block_tokens != p->block_tokens - 1) return;
    for (long head = 0; head < p->n_kv; head++) {
        float key[MAX_HEAD_DIM], low[MAX_HEAD_DIM], high[MAX_HEAD_DIM];
        for (long place = 0; place < p->block_tokens; place++) {
            take_key(p, block, head, place, key);
            for (long j = 0; j < size; j++) {
                low[j] = place && low[j] < key[j] ? low[j] : key[j];
                high[j] = place && high[j] > key[j] ? high[j] : key[j];
            }
        }
        bf16 *to = p->summaries + (block * p->n_kv + head) * 2 * size;
        for (long j = 0; j < size; j += WIDTH) {
            lanes mask = first_lanes(size - j);
            store_bf16_tail(to + j, load_tail(low + j, mask), mask);
            store_bf16_tail(to + size + j, load_tail(high + j, mask), mask);
        }
    }
}

// Summarizes the blocks whose last position is in slots[m]; `cache` holds bfloat16, or with `coded` int8 (codes.h).
EXPORT void rz_summarize(const void *cache, bf16 *summaries, const int64_t *slots, long m, long n_kv, long head_dim,
                         long block_tokens, int coded) {
    summary p = {cache, summaries, slots, n_kv, head_dim, block_tokens, coded};
    share(summarize, &p, m);
}

typedef struct {
    const bf16 *q;
    const bf16 *summaries;
    const int64_t *starts, *lengths, *pages, *blocks;
    float *scores; // [sequences, query heads, room]
    int64_t *chosen, *chosen_lengths;
    long ldq, n_kv, group, head_dim, block_tokens, n_blocks, room, pieces; // pieces: tasks of a sequence that score
} choice;

static const bf16 *summary_of(const choice *p, int64_t block, long head) {
    return p->summaries + (block * p->n_kv + head) * 2 * p->head_dim;
}

// The number of pages that a sequence chooses among, 0 if it reads all of its pages.
static long count_candidates(const choice *p, long i) {
    long n = (p->lengths[i] + p->block_tokens - 1) / p->block_tokens;
    return p->pages[i] && n > p->pages[i] ? n - 1 - LAST : 0;
}

typedef float query[MAX_HEAD_DIM]; // zeros fill the last register

// Partial sums of the products of `n` queries with the rows of a summary, and of the squares of their differences, for page `i`.
// Callers pass a constant for `n`.
INLINE void multiply(const query *queries, const bf16 *low, long head_dim, int n, long i, vec (*products)[WIDTH], vec (*squares)[WIDTH]) {
    vec product[HEADS], square[HEADS];
#pragma GCC unroll 4
    for (int h = 0; h < n; h++) product[h] = square[h] = spread(0);
    for (long j = 0; j < head_dim; j += WIDTH) {
        lanes mask = first_lanes(head_dim - j);
        vec least = load_bf16_tail(low + j, mask), most = load_bf16_tail(low + head_dim + j, mask);
        vec both = least + most, apart = most - least;
#pragma GCC unroll 4
        for (int h = 0; h < n; h++) {
            vec x = load(queries[h] + j), span = x * apart;
            product[h] = fma_of(x, both, product[h]);
            square[h] = fma_of(span, span, square[h]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < n; h++) {
        products[h][i] = product[h];
        squares[h][i] = square[h];
    }
}

INLINE vec replace_after(vec x, long n, float others) { return (vec)choose(counted() < (int32_t)n, (ints)x, (ints)spread(others)); }

// Twice the largest product to expect of `n` query heads with a key, for the first WIDTH of the pages table[left]; -INFINITY where
// there are fewer. It prefetches what the next call for this KV head reads.
INLINE void expect_products(const choice *p, const bf16 *from, const int64_t *table, long left, long head, int n, float *expected) {
    query queries[HEADS];
    vec products[HEADS][WIDTH], squares[HEADS][WIDTH];
#pragma GCC unroll 4
    for (int h = 0; h < n; h++)
        for (long j = 0; j < p->head_dim; j += WIDTH)
            store(queries[h] + j, load_bf16_tail(from + h * p->head_dim + j, first_lanes(p->head_dim - j)));
    for (long i = 0; i < WIDTH; i++) {
        const char *next = (const char *)summary_of(p, i + WIDTH < left ? table[i + WIDTH] : 0, head);
        for (long at = 0; at < 4 * p->head_dim; at += 64) FETCH(next + at);
        multiply(queries, summary_of(p, i < left ? table[i] : 0, head), p->head_dim, n, i, products, squares);
    }
#pragma GCC unroll 4
    for (int h = 0; h < n; h++) {
        vec sums = totals_of(products[h]) + sqrt_of(totals_of(squares[h]));
        store(expected + h * p->room, left < WIDTH ? replace_after(sums, left, -INFINITY) : sums);
    }
}

// The pages of a task lie next to each other, and it reads their summaries once, for all heads.
static void expect_piece(const void *context, long index) {
    const choice *p = context;
    long i = index / p->pieces, first = index % p->pieces * PIECE, n = count_candidates(p, i), heads = p->n_kv * p->group;
    const int64_t *table = p->blocks + i * p->n_blocks + 1;
    const bf16 *q = p->q + p->starts[i] * p->ldq;
    for (long page = first; page < n && page < first + PIECE; page += WIDTH)
        for (long head = 0, end; head < heads; head = end) {
            long of = head / p->group;
            end = (of + 1) * p->group < head + HEADS ? (of + 1) * p->group : head + HEADS;
            const bf16 *from = q + head * p->head_dim;
            float *expected = p->scores + (i * heads + head) * p->room + page;
            switch (end - head) {
            case 1: expect_products(p, from, table + page, n - page, of, 1, expected); break;
            case 2: expect_products(p, from, table + page, n - page, of, 2, expected); break;
            case 3: expect_products(p, from, table + page, n - page, of, 3, expected); break;
            case 4: expect_products(p, from, table + page, n - page, of, 4, expected); break;
            }
        }
}

// Replaces the products of the first query head of a KV head by the keys (order.h) of the scores of n pages: how near the product of
// a head comes to that head's largest, for the nearest head.
static void score_pages(const choice *p, float *products, long n) {
    for (long h = 0; h < p->group; h++) {
        const float *own = products + h * p->room;
        vec most = load(own);
        for (long page = WIDTH; page < n; page += WIDTH) most = larger_of(load(own + page), most);
        vec top = spread(largest_of(most));
        for (long page = 0; page < n; page += WIDTH) {
            vec below = load(own + page) - top;
            store(products + page, h ? larger_of(below, load(products + page)) : below);
        }
    }
    for (long page = 0; page < n; page += WIDTH) {
        ints keys = ordered(load(products + page));
        store(products + page, (vec)choose(counted() + (int32_t)page < (int32_t)n, keys, spread_int(INT32_MIN)));
    }
}

static long count_from(const float *keys, long n, int32_t least) {
    ints counts = spread_int(0);
    for (long i = 0; i < n; i += WIDTH) counts -= (ints)load(keys + i) >= least;
    long total = 0;
    for (int j = 0; j < WIDTH; j++) total += counts[j];
    return total;
}

// The `rank`-th largest key, or a smaller number that just as many keys reach; bit by bit.
static int32_t find_threshold(const float *keys, long n, long rank) {
    uint32_t threshold = 1u << 31; // the least number
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        long count = count_from(keys, n, (int32_t)(threshold + bit));
        if (count >= rank) threshold += bit;
        if (count == rank) break;
    }
    return (int32_t)threshold;
}

// Writes the blocks of the `rank` of n pages with the largest keys; of equal ones the first.
static void take_pages(const float *keys, const int64_t *table, long n, long rank, int64_t *to) {
    int32_t threshold = find_threshold(keys, n, rank), key;
    long ties = rank - count_from(keys, n, threshold + 1);
    for (long page = 0; page < n; page++) {
        memcpy(&key, keys + page, sizeof key);
        *to = table[page]; // without a branch, which would often be predicted wrongly
        to += (key > threshold) | ((key == threshold) & (ties > 0));
        ties -= key == threshold;
    }
}

static void choose_pages(const void *context, long index) {
    const choice *p = context;
    long i = index / p->n_kv, head = index % p->n_kv, most = p->pages[i], n = count_candidates(p, i), length = p->lengths[i];
    const int64_t *table = p->blocks + i * p->n_blocks;
    int64_t *to = p->chosen + index * p->n_blocks, *end = to + p->n_blocks;
    if (n) {
        float *products = p->scores + index * p->group * p->room;
        score_pages(p, products, n);
        to[0] = table[0];
        take_pages(products, table + 1, n, most - 1 - LAST, to + 1);
        memcpy(to + most - LAST, table + 1 + n, LAST * sizeof *to);
        length -= (1 + n + LAST - most) * p->block_tokens;
    }
    long blocks = (length + p->block_tokens - 1) / p->block_tokens;
    if (!n) memcpy(to, table, blocks * sizeof *to);
    to += blocks;
    memset(to, 0, (end - to < BEYOND ? end - to : BEYOND) * sizeof *to);
    if (!head) p->chosen_lengths[i] = length;
}

// Chooses pages[i] blocks of sequence i for each KV head; 0: all. A sequence that chooses has one row. blocks: [sequences, n_blocks],
// chosen: [sequences, n_kv, n_blocks] in the order of positions, null blocks after the last one; scores: room for n_kv * group *
// (n_blocks rounded up to 16) of a sequence.
EXPORT void rz_choose_pages(const bf16 *q, long ldq, const bf16 *summaries, long n_kv, long group, long head_dim, long block_tokens,
                            const int64_t *starts, const int64_t *lengths, const int64_t *pages, const int64_t *blocks, long n_blocks,
                            float *scores, int64_t *chosen, int64_t *chosen_lengths, long sequences) {
    long room = (n_blocks + 15) & -16;
    choice p = {q, summaries, starts, lengths, pages, blocks, scores, chosen, chosen_lengths, ldq, n_kv, group, head_dim, block_tokens, n_blocks, room, 0};
    for (long i = 0; i < sequences; i++) {
        long own = (count_candidates(&p, i) + PIECE - 1) / PIECE;
        p.pieces = own > p.pieces ? own : p.pieces;
    }
    share_in_order(expect_piece, &p, sequences * p.pieces);
    share(choose_pages, &p, sequences * n_kv);
}
