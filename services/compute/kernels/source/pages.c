// Pages of long contexts: summaries of the keys of a block of the cache, and the choice of the blocks that a decode reads by the
// largest product of its query with one of their keys, as the summaries let it expect (torch/pages.py).
//
// A summary is [n_kv, 2, head_dim]: the least and the largest number of each dimension of a block's keys, not rotated. It is made
// when a block's last position is written. Sums have a fixed order, so a choice does not depend on the rest of the step.
#include "codes.h"
#include "common.h"

#define LAST 2 // pages at the end that are always read, as is the first one
#define MAX_HEAD_DIM 256

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
    float *scores;
    int64_t *chosen, *chosen_lengths;
    long ldq, n_kv, group, head_dim, block_tokens, n_blocks;
} choice;

// Partial sums of the products of a query with both rows of a summary, and of the squares of their differences.
INLINE void multiply(const bf16 *query, const bf16 *low, long head_dim, vec *products, vec *squares) {
    *products = *squares = spread(0);
    for (long j = 0; j < head_dim; j += WIDTH) {
        lanes mask = first_lanes(head_dim - j);
        vec q = load_bf16_tail(query + j, mask);
        vec least = q * load_bf16_tail(low + j, mask), most = q * load_bf16_tail(low + head_dim + j, mask);
        *products += least + most;
        *squares = fma_of(most - least, most - least, *squares);
    }
}

// Twice the largest product to expect of a query with a key, for each of the pages table[n]; WIDTH of them are added up together.
static void expect_products(const choice *p, const bf16 *query, const int64_t *table, long n, long head, float *expected) {
    for (long page = 0; page < n; page += WIDTH) {
        vec products[WIDTH], squares[WIDTH];
        for (long i = 0; i < WIDTH; i++) {
            int64_t block = page + i < n ? table[page + i] : 0;
            multiply(query, p->summaries + (block * p->n_kv + head) * 2 * p->head_dim, p->head_dim, products + i, squares + i);
        }
        vec sums = totals_of(products), spans = totals_of(squares);
        for (long i = 0; i < WIDTH; i++) sums[i] += sqrtf(spans[i]);
        store_tail(expected + page, sums, first_lanes(n - page));
    }
}

// An integer of the same order.
static uint32_t order_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

// Finds the order of the `*rank`-th largest score; `*rank` becomes the number of scores of this order to take.
static uint32_t find_threshold(const float *scores, long n, long *rank) {
    uint32_t found = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        long counts[256] = {0}, digit = 255;
        for (long i = 0; i < n; i++) {
            uint32_t order = order_of(scores[i]);
            if ((order & mask) == found) counts[order >> shift & 255]++;
        }
        for (; counts[digit] < *rank; digit--) *rank -= counts[digit];
        found |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    return found;
}

// Scores the pages table[n] for one KV head: how near the product of a query head comes to that head's largest, for the nearest head.
static void score_pages(const choice *p, const bf16 *queries, const int64_t *table, long n, long head, float *scores) {
    for (long i = 0; i < p->group; i++) expect_products(p, queries + i * p->head_dim, table, n, head, scores + i * p->n_blocks);
    for (long i = 0; i < p->group; i++) {
        float *own = scores + i * p->n_blocks, top = own[0];
        for (long page = 1; page < n; page++) top = own[page] > top ? own[page] : top;
        for (long page = 0; page < n; page++) {
            float below = own[page] - top;
            scores[page] = i && scores[page] > below ? scores[page] : below;
        }
    }
}

// Names the null block up to `end`: attention may look up more keys than a sequence has.
static void clear(int64_t *from, const int64_t *end) { memset(from, 0, (end - from) * sizeof *from); }

static void choose_pages(const void *context, long index) {
    const choice *p = context;
    long i = index / p->n_kv, head = index % p->n_kv, length = p->lengths[i], most = p->pages[i];
    long n = (length + p->block_tokens - 1) / p->block_tokens, rank = most - 1 - LAST;
    const int64_t *table = p->blocks + i * p->n_blocks;
    int64_t *to = p->chosen + index * p->n_blocks, *end = to + p->n_blocks;
    if (!most || n <= most) {
        memcpy(to, table, n * sizeof *to);
        clear(to + n, end);
        if (!head) p->chosen_lengths[i] = length;
        return;
    }
    float *scores = p->scores + index * p->group * p->n_blocks;
    score_pages(p, p->q + p->starts[i] * p->ldq + head * p->group * p->head_dim, table + 1, n - 1 - LAST, head, scores);
    uint32_t threshold = find_threshold(scores, n - 1 - LAST, &rank);
    *to++ = table[0];
    for (long page = 1; page < n - LAST; page++) {
        uint32_t order = order_of(scores[page - 1]);
        if (order > threshold || (order == threshold && rank-- > 0)) *to++ = table[page];
    }
    memcpy(to, table + n - LAST, LAST * sizeof *to);
    clear(to + LAST, end);
    if (!head) p->chosen_lengths[i] = length - (n - most) * p->block_tokens;
}

// Chooses pages[i] blocks of sequence i for each KV head; 0: all. A sequence that chooses has one row. blocks: [sequences, n_blocks],
// chosen: [sequences, n_kv, n_blocks] in the order of positions; scores: room for n_kv * group * n_blocks of a sequence.
EXPORT void rz_choose_pages(const bf16 *q, long ldq, const bf16 *summaries, long n_kv, long group, long head_dim, long block_tokens,
                            const int64_t *starts, const int64_t *lengths, const int64_t *pages, const int64_t *blocks, long n_blocks,
                            float *scores, int64_t *chosen, int64_t *chosen_lengths, long sequences) {
    choice p = {q, summaries, starts, lengths, pages, blocks, scores, chosen, chosen_lengths, ldq, n_kv, group, head_dim, block_tokens, n_blocks};
    share(choose_pages, &p, sequences * n_kv);
}
