// Products with integers in tiles of up to 16 rows, with the bits of quantized.c: sums of integers are exact, and blocks are added up in
// the same order. Inputs of 16 bits are multiplied as two halves, sum = 256 upper + lower.
#include "integers.h"
#include "tiles.h"

#define AHEAD 4096         // bytes that codes are prefetched ahead
#define FEWEST 12          // fewer rows are multiplied as fast in registers
#define LONGEST (1 << 15) // most inputs of a row: those of 16 rows lie on the stack

typedef struct {
    const quantized *q;
    long row, rows;
    const char *inputs;          // [k / unit][halves][rows][unit]
    const float *steps, *shifts; // [blocks][TILE]; shifts: negative sums of the inputs, for offsets
} row_tile;

// Inputs that a tile holds of each row: all of a block or a part.
static long unit_of(const quantized *q) {
    long both = q->block | q->p.k;
    return both % 64 == 0 ? 64 : both % 32 == 0 ? 32
                                                : 16;
}

static void configure(long rows, long unit) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 4; i++) config.row_bytes[i] = 64, config.rows[i] = rows; // sums
    for (int i = 4; i < 6; i++) config.row_bytes[i] = unit, config.rows[i] = rows; // inputs
    config.row_bytes[6] = 64;
    config.rows[6] = unit / 4; // codes
    _tile_loadconfig(&config);
}

// Bytes of 16 inputs in the order in which unpack_codes() has their codes: upper halves, then lower ones.
static __m256i order_of(int bits) {
    uint8_t at[32];
    for (int i = 0; i < 16; i++) {
        int k = bits == 4 ? i / 8 * 8 + i % 2 * 4 + i % 8 / 2 : i / 4 * 4 + i % 2 * 2 + i % 4 / 2;
        at[i] = 2 * k + 1;
        at[16 + i] = 2 * k;
    }
    return _mm256_loadu_si256((const __m256i *)at);
}

static void pack_inputs(const row_tile *t, char *to, int bits, int input_bits, long unit) {
    __m256i order = order_of(bits);
    long halves = input_bits / 8, k = t->q->p.k;
    for (long i = 0; i < t->rows; i++) {
        const char *x = t->q->inputs + (t->row + i) * t->q->stride;
        for (long at = 0; at < k; at += 16) {
            char *upper = to + (at / unit * halves * t->rows + i) * unit + at % unit;
            if (halves == 1) {
                memcpy(upper, x + at, 16);
                continue;
            }
            __m256i both = _mm256_permutexvar_epi8(order, _mm256_loadu_si256((const __m256i *)(x + 2 * at)));
            _mm_storeu_si128((__m128i *)upper, _mm256_castsi256_si128(both));
            _mm_storeu_si128((__m128i *)(upper + t->rows * unit), _mm256_extracti128_si256(both, 1));
        }
    }
}

static void pack_facts(const row_tile *t, float *steps, float *shifts, long blocks, int input_bits) {
    for (long i = 0; i < TILE; i++) {
        const block_facts *facts = (const block_facts *)(t->q->inputs + (t->row + i) * t->q->stride + t->q->p.k * input_bits / 8);
        for (long b = 0; b < blocks; b++) {
            steps[b * TILE + i] = i < t->rows ? facts[b].step : 0;
            shifts[b * TILE + i] = i < t->rows ? -(float)sum_of(facts + b, input_bits) * facts[b].step : 0;
        }
    }
}

// Turns the codes of `unit` inputs of 16 outputs into signed bytes: [unit / 4][16 outputs][4]. The first outputs of a strip prefetch
// codes for all of them.
INLINE void unpack_codes(const char *codes, int8_t *to, int bits, int unit, int first) {
    __m512i mask = _mm512_set1_epi8(15), center = _mm512_set1_epi8((char)CENTER(bits));
#pragma GCC unroll 16
    for (int word = 0; word < unit * bits / 32; word++, codes += 4 * STRIP) {
        __m512i w = _mm512_loadu_si512(codes);
        for (int line = 0; first && line < 4 * STRIP; line += 64) FETCH(codes + AHEAD + line);
        if (bits == 8) {
            _mm512_store_si512(to + 64 * word, _mm512_sub_epi8(w, center));
        } else {
            _mm512_store_si512(to + 128 * word, _mm512_sub_epi8(_mm512_and_si512(w, mask), center));
            _mm512_store_si512(to + 128 * word + 64, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi32(w, 4), mask), center));
        }
    }
}

// Adds a block's sums to the totals of each row.
INLINE void add_sums(int32_t sums[2][TILE][TILE], const float *steps, const float *shifts, vec scale, const vec *offset, int input_bits,
                     vec *totals) {
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++) {
        ints sum = (ints)_mm512_load_si512(sums[0][i]);
        if (input_bits == 16) sum = (sum << 8) + (ints)_mm512_load_si512(sums[1][i]);
        totals[i] = fma_of(__builtin_convertvector(sum, vec), scale * spread(steps[i]), totals[i]);
    }
    if (!offset) return;
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++) totals[i] = fma_of(spread(shifts[i]), *offset, totals[i]);
}

#define RING 4UL // blocks at most that are in the same or in neighbouring stages

// 16 outputs of a tile's rows.
typedef struct {
    const char *codes, *inputs, *scales, *offsets; // those of the next block of each stage
    const float *steps, *shifts;
    long left; // blocks that still have the scale
    _Alignas(64) int8_t unpacked[RING][16 * 128];
    _Alignas(64) int32_t sums[RING][2][TILE][TILE];
} columns;

static long inputs_of(const quantized *q, long block) {
    long left = q->p.k - block * q->block;
    return left < q->block ? left : q->block;
}

INLINE void unpack_block(const row_tile *t, columns *c, long block, int bits, int unit, int first) {
    int8_t *to = c->unpacked[block % RING];
    for (long n = inputs_of(t->q, block); n > 0; n -= unit, to += 16 * unit, c->codes += unit * STRIP * bits / 8)
        unpack_codes(c->codes, to, bits, unit, first);
}

#define MULTIPLY(upper, lower)                     \
    _tile_zero(upper);                             \
    _tile_zero(lower);                             \
    for (; n > 0; n -= unit, codes += 16 * unit) { \
        _tile_loadd(6, codes, 64);                 \
        _tile_loadd(4, c->inputs, unit);           \
        _tile_dpbssd(upper, 4, 6);                 \
        c->inputs += t->rows * unit;               \
        if (input_bits == 8) continue;             \
        _tile_loadd(5, c->inputs, unit);           \
        _tile_dpbusd(lower, 5, 6);                 \
        c->inputs += t->rows * unit;               \
    }

INLINE void multiply_block(const row_tile *t, columns *c, long block, int input_bits, int unit) {
    const int8_t *codes = c->unpacked[block % RING];
    long n = inputs_of(t->q, block);
    if (block & 1) {
        MULTIPLY(2, 3)
    } else {
        MULTIPLY(0, 1)
    }
}

INLINE void store_block(columns *c, long block, int input_bits) {
    int32_t (*sums)[TILE][TILE] = c->sums[block % RING];
    if (block & 1) {
        _tile_stored(2, sums[0], 64);
        if (input_bits == 16) _tile_stored(3, sums[1], 64);
    } else {
        _tile_stored(0, sums[0], 64);
        if (input_bits == 16) _tile_stored(1, sums[1], 64);
    }
}

INLINE void add_block(const row_tile *t, columns *c, long block, int input_bits, vec *totals) {
    const quantized *q = t->q;
    long bytes = q->half ? 2 : 4;
    vec scale = q->half ? scale_at(c->scales, 0, 1) : scale_at(c->scales, 0, 0);
    if (c->offsets) {
        vec offset = scale_at(c->offsets, 0, q->half);
        add_sums(c->sums[block % RING], c->steps, c->shifts, scale, &offset, input_bits, totals);
    } else {
        add_sums(c->sums[block % RING], c->steps, c->shifts, scale, 0, input_bits, totals);
    }
    c->steps += TILE;
    c->shifts += TILE;
    if (--c->left) return;
    c->left = q->common;
    c->scales += GROUP * bytes;
    if (c->offsets) c->offsets += GROUP * bytes;
}

// Blocks pass through four stages in different iterations: what a stage stores can be loaded only when all instructions before the store
// are done, products in tiles included.
INLINE void multiply_tile(const row_tile *t, long column, int bits, int input_bits, int unit) {
    const quantized *q = t->q;
    long bytes = q->half ? 2 : 4, at = (column / GROUP * GROUP * q->groups + column % GROUP) * bytes, blocks = blocks_of(q->p.k, q->block);
    columns c;
    vec totals[TILE];
    memset(c.sums, 0, sizeof c.sums);
    c.codes = q->codes + column / STRIP * STRIP * q->p.k * bits / 8 + column % STRIP * 4;
    c.inputs = t->inputs;
    c.scales = q->scales + at;
    c.offsets = q->offsets ? q->offsets + at : 0;
    c.steps = t->steps;
    c.shifts = t->shifts;
    c.left = q->common;
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++) totals[i] = spread(0);
    for (long b = 0; b < blocks + 5; b++) {
        if (b >= 5) add_block(t, &c, b - 5, input_bits, totals);
        if (b >= 3 && b < blocks + 3) store_block(&c, b - 3, input_bits);
        if (b >= 2 && b < blocks + 2) multiply_block(t, &c, b - 2, input_bits, unit);
        if (b < blocks) unpack_block(t, &c, b, bits, unit, column % STRIP == 0);
        __asm__ volatile("" ::: "memory"); // codes are stored before they are loaded into tiles
    }
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++)
        if (i < t->rows) store_sums(&q->p, t->row + i, column, totals[i]);
}

INLINE void multiply_rows(const row_tile *t, long from, long to, int bits, int input_bits) {
    long unit = unit_of(t->q);
    for (long column = from; column < to; column += TILE)
        if (unit == 64)
            multiply_tile(t, column, bits, input_bits, 64);
        else if (unit == 32)
            multiply_tile(t, column, bits, input_bits, 32);
        else
            multiply_tile(t, column, bits, input_bits, 16);
}

INLINE void compute_share(const quantized *q, long index, int bits, int input_bits) {
    long k = q->p.k, blocks = blocks_of(k, q->block), unit = unit_of(q);
    char inputs[TILE * k * input_bits / 8];
    float steps[blocks * TILE], shifts[blocks * TILE];
    for (long row = 0; row < q->p.m; row += TILE) {
        row_tile t = {q, row, q->p.m - row < TILE ? q->p.m - row : TILE, inputs, steps, shifts};
        configure(t.rows, unit);
        pack_inputs(&t, inputs, bits, input_bits, unit);
        pack_facts(&t, steps, shifts, blocks, input_bits);
        multiply_rows(&t, first_of_share(&q->p, index), end_of_share(&q->p, index), bits, input_bits);
    }
    _tile_release();
}

static void multiply_bytes(const void *context, long index) { compute_share(context, index, 8, 16); }

static void multiply_nibbles(const void *context, long index) { compute_share(context, index, 4, 16); }

static void multiply_nibbles_with_bytes(const void *context, long index) { compute_share(context, index, 4, 8); }

long multiply_in_tiles(quantized *q, int bits, int input_bits) {
    long rest = q->p.m % TILE < FEWEST ? q->p.m % TILE : 0, shares = pool_threads() > 1 ? 2 * pool_threads() : 1;
    if (q->p.m == rest || bits == 2 || q->p.k > LONGEST) return 0;
    q->p.m -= rest;
    share_product(&q->p, bits == 8 ? multiply_bytes : input_bits == 8 ? multiply_nibbles_with_bytes
                                                                      : multiply_nibbles,
                  (groups_of(&q->p) + shares - 1) / shares);
    return q->p.m;
}
