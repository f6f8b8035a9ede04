// Linear layers whose weights stay integers, for all kinds of CPU; quantized.h describes weights and inputs.
//
// Products are added up in integers, exactly, block by block; blocks are added up in float32, in order. So a row's bits depend neither
// on the number of rows nor on other rows.
#include "integers.h"

#define ROWS (REGISTERS == 32 ? 6 : 4) // rows that a strip is multiplied with: their sums and the codes fill the registers
#define ROW_BLOCK 128          // rows whose inputs stay in a near cache while the weight streams past them
#define AHEAD 8192             // bytes that few rows prefetch ahead; the hardware's prefetcher stops at page ends
#define SCALES_AHEAD 1024      // bytes of scales

typedef uint16_t words __attribute__((vector_size(4 * WIDTH)));

#if defined(__AVX512F__)
typedef __m512i raw;
#elif defined(__AVX2__)
typedef __m256i raw;
#else
typedef int32x4_t raw;
#endif

// The first sums of a block: what the codes' CENTER adds. `sum`: of the block's inputs, negative.
INLINE ints first_sums(int32_t sum, int bits, int input_bits) {
    if (input_bits == 16) return spread_int(sum) << (bits - 1);
    return (ints)begin_bytes((raw)((words)spread_int(sum) << (bits - 1)));
}

INLINE vec last_sums(ints sums, int input_bits) {
    return __builtin_convertvector(input_bits == 16 ? sums : (ints)end_bytes((raw)sums), vec);
}

INLINE ints add_dots(ints codes, ints inputs, ints sums, int input_bits) {
    if (input_bits == 16) return (ints)add_dots_of((raw)codes, (raw)inputs, (raw)sums);
    return (ints)add_bytes_of((raw)codes, (raw)inputs, (raw)sums);
}

// Part `part` of the codes in each lane.
INLINE ints codes_of(words word, int part, int bits, int input_bits) {
    word >>= part * bits;
    if (input_bits == 8)
        word &= (uint16_t)(((1 << bits) - 1) * 0x101);
    else if ((part + 1) * bits < 16)
        word &= (uint16_t)((1 << bits) - 1);
    return (ints)word;
}

// Adds the products of a word of codes for each output. `n`: registers of outputs.
INLINE void add_products(const char *codes, const char *x, long stride, int rows, int n, int bits, int input_bits,
                         ints *sums) {
    const int parts = input_bits / bits;
    words w[ACROSS];
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) memcpy(w + r, codes + r * 4 * WIDTH, sizeof w[r]);
#pragma GCC unroll 8
    for (int p = 0; p < parts; p++) {
        ints c[ACROSS];
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) c[r] = codes_of(w[r], p, bits, input_bits);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            int32_t pair;
            memcpy(&pair, x + 4 * p + i * stride, sizeof pair);
            ints inputs = spread_int(pair);
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                sums[i * n + r] = add_dots(c[r], inputs, sums[i * n + r], input_bits);
                IN_ORDER(sums[i * n + r]);
            }
        }
    }
}

// Adds a block's sums of products to the totals. `half`: scales and offsets are float16.
INLINE void add_block(const char *facts, long stride, const char *scales, const char *offsets, int half, int rows, int n, int input_bits,
                      const ints *sums, vec *totals) {
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        vec scale = scale_at(scales, r * WIDTH, half);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            vec step = spread(((const block_facts *)(facts + i * stride))->step);
            totals[i * n + r] = fma_of(last_sums(sums[i * n + r], input_bits), scale * step, totals[i * n + r]);
        }
    }
    if (!offsets) return;
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        vec offset = scale_at(offsets, r * WIDTH, half);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const block_facts *of_row = (const block_facts *)(facts + i * stride);
            totals[i * n + r] = fma_of(spread(-(float)sum_of(of_row, input_bits) * of_row->step), offset, totals[i * n + r]);
        }
    }
}

// Computes `rows` rows from `row` on for `n` registers of outputs from `column` on, and prefetches codes `ahead` bytes ahead. Callers
// pass constants for `rows`, `n`, `bits` and `input_bits`, for which the inlined code is specialised.
INLINE void compute(const quantized *q, long row, long column, int rows, int n, int bits, int input_bits, long ahead) {
    vec totals[ROWS * ACROSS];
    ints sums[ROWS * ACROSS];
    long k = q->p.k, stride = q->stride, block = q->block * STRIP * bits / 8, left = q->common;
    long scale_bytes = q->half ? 2 : 4, at = column / GROUP * GROUP * q->groups + column % GROUP;
    const char *x = q->inputs + row * stride, *facts = x + k * input_bits / 8;
    const char *codes = q->codes + column / STRIP * STRIP * k * bits / 8 + column % STRIP * 4, *last = codes + k * STRIP * bits / 8;
    const char *scales = q->scales + at * scale_bytes, *offsets = q->offsets ? q->offsets + at * scale_bytes : 0;
#pragma GCC unroll 32
    for (int i = 0; i < rows * n; i++) totals[i] = spread(0);
    while (codes < last) {
        const char *end = last - codes < block ? last : codes + block;
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) sums[i * n + r] = first_sums(((const block_facts *)(facts + i * stride))->sum, bits, input_bits);
        for (; codes < end; codes += 4 * STRIP, x += 4 * (input_bits / bits)) {
#pragma GCC unroll 8
            for (int line = 0; line < n * 4 * WIDTH; line += 64) FETCH(codes + ahead + line);
            add_products(codes, x, stride, rows, n, bits, input_bits, sums);
        }
        if (q->half)
            add_block(facts, stride, scales, offsets, 1, rows, n, input_bits, sums, totals);
        else
            add_block(facts, stride, scales, offsets, 0, rows, n, input_bits, sums, totals);
        facts += sizeof(block_facts);
        if (--left) continue;
        left = q->common;
        scales += GROUP * scale_bytes;
        if (offsets) offsets += GROUP * scale_bytes;
        for (long line = 0; ahead && line < n * WIDTH * scale_bytes; line += 64) FETCH(scales + SCALES_AHEAD + line);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) store_sums(&q->p, row + i, column + r * WIDTH, totals[i * n + r]);
}

#define AT_ONCE(rows) (REGISTERS == 32 || (rows) < 4 ? ACROSS : 2) // registers of outputs that `rows` rows compute together

INLINE void compute_rows(const quantized *q, long row, long column, long rows, int bits, int input_bits, long ahead) {
#define CASE(m)    \
    if (rows == m) \
        for (long c = column; c < column + STRIP; c += AT_ONCE(m) * WIDTH) compute(q, row, c, m, AT_ONCE(m), bits, input_bits, ahead);
    CASE(1)
    CASE(2)
    CASE(3)
    CASE(4)
#if REGISTERS == 32
    CASE(5)
    CASE(6)
#endif
#undef CASE
}

INLINE void compute_share(const quantized *q, long index, int bits, int input_bits) {
    long from = first_of_share(&q->p, index), to = end_of_share(&q->p, index);
    for (long first = 0; first < q->p.m; first += ROW_BLOCK) {
        long last = first + ROW_BLOCK < q->p.m ? first + ROW_BLOCK : q->p.m;
        for (long column = from; column < to; column += STRIP)
            for (long row = first; row < last; row += ROWS)
                compute_rows(q, row, column, last - row < ROWS ? last - row : ROWS, bits, input_bits, row == first ? AHEAD : 0);
    }
}

static void multiply_bytes(const void *context, long index) { compute_share(context, index, 8, 16); }

static void multiply_nibbles(const void *context, long index) { compute_share(context, index, 4, 16); }

static void multiply_nibbles_with_bytes(const void *context, long index) { compute_share(context, index, 4, 8); }

static void multiply_two_bits(const void *context, long index) { compute_share(context, index, 2, 16); }

// y [m, n] = x W^T + bias of rows of inputs and codes of `bits` bits; `common` blocks of an output have a scale in common; `offsets`
// may be null. Inputs of 8 bits: only with codes of 4 bits.
EXPORT void rz_quantized_linear(const void *inputs, long stride, long m, long k, long block, const void *codes, int bits,
                                int input_bits, const void *scales, const void *offsets, long common, int half, const float *bias,
                                long n, void *y, long ldy, int wide) {
    quantized q = {{0, 0, bias, y, 0, ldy, m, k, n, 0, wide}, inputs, codes, scales, offsets, stride, block, common, blocks_of(blocks_of(k, block), common), half};
#ifdef __AMX_INT8__
    long done = multiply_in_tiles(&q, bits, input_bits);
    q.inputs += done * stride;
    q.p.y = (char *)y + done * ldy * (wide ? 4 : 2);
    q.p.m = m - done;
    if (!q.p.m) return;
#endif
    task multiply = bits == 8         ? multiply_bytes
                    : bits == 2       ? multiply_two_bits
                    : input_bits == 8 ? multiply_nibbles_with_bytes
                                      : multiply_nibbles;
    long shares = pool_threads() > 1 ? 8 * pool_threads() : 1;
    share_product(&q.p, multiply, (groups_of(&q.p) + shares - 1) / shares);
}
