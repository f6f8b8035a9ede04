// Linear layers whose weights stay integers, for all kinds of CPU: codes of 8, 4 or 2 bits with a scale and perhaps an
// offset for each group of inputs of an output, or one scale for all inputs.
//
// The inputs become fixed-point numbers of 16 bits: each block of a row has its own step, a power of two. So a bfloat16 number
// within 2^-7 of the largest of its block is exact, and a smaller one is off by at most 2^-16 of the largest. Products of pairs are
// added up in integers, exactly, block by block; blocks are added up in float32, in order. So a row's bits depend neither on the
// number of rows nor on other rows.
#include "order.h"
#include "product.h"

#define ACROSS 4               // registers of outputs in a packed strip
#define STRIP (ACROSS * WIDTH) // outputs of a packed strip
#define ROWS (REGISTERS == 32 ? 6 : 4) // rows that a strip is multiplied with: their sums and the codes fill the registers
#define ROW_BLOCK 128          // rows whose inputs stay in a near cache while the weight streams past them
#define CENTER(bits) (1 << ((bits) - 1)) // a code means code - CENTER
#define FIRST_EXPONENT 15      // blocks whose largest number has a smaller (biased) exponent count as zero
#define AHEAD 2048             // bytes that codes are prefetched ahead; the hardware's prefetcher stops at page ends
#define STEP_BITS 14           // the largest number of a block is 2^14 steps or more
#define MAGIC 12582912.0f      // 1.5 * 2^23: adding it rounds to an integer in the lower bits

typedef uint16_t words __attribute__((vector_size(4 * WIDTH)));
typedef int16_t narrow_ints __attribute__((vector_size(2 * WIDTH), aligned(2)));

#if defined(__AVX512F__)
typedef __m512i raw;
#elif defined(__AVX2__)
typedef __m256i raw;
#else
typedef int32x4_t raw;
#endif

INLINE ints add_dots(ints a, ints b, ints c) { return (ints)add_dots_of((raw)a, (raw)b, (raw)c); }

// A row of inputs: `k` fixed-point numbers, then for each block its step and the sum of its numbers.
static inline long blocks_of(long k, long block) { return (k + block - 1) / block; }

typedef struct {
    const bf16 *x;
    const int32_t *order;
    char *inputs;
    long ldx, n_in, k, block, stride;
} quantizing;

static float step_of(uint32_t exponent) { // 2^(exponent - 127 - STEP_BITS)
    uint32_t bits = (exponent - STEP_BITS) << 23;
    float step;
    memcpy(&step, &bits, sizeof step);
    return step;
}

// Writes the numbers of a block and returns their sum. `n` is a multiple of 16.
static int32_t quantize_block(const bf16 *x, long n, int16_t *to, float *step) {
    uint16_t top = 0;
    for (long i = 0; i < n; i++) {
        uint16_t size = x[i] & 0x7FFF;
        top = size > top ? size : top;
    }
    uint32_t exponent = top >> 7;
    *step = exponent == 0xFF ? NAN : exponent < FIRST_EXPONENT ? 0 : step_of(exponent);
    memset(to, 0, n * sizeof *to);
    if (exponent < FIRST_EXPONENT || exponent == 0xFF) return 0;
    vec inverse = spread(1 / *step), magic = spread(MAGIC);
    ints sum = spread_int(0);
    for (long i = 0; i < n; i += WIDTH) {
        ints number = (ints)fma_of(load_bf16(x + i), inverse, magic) - (ints)magic;
        sum += number;
        narrow_ints narrow = __builtin_convertvector(number, narrow_ints);
        memcpy(to + i, &narrow, sizeof narrow);
    }
    int32_t total = 0;
    for (int j = 0; j < WIDTH; j++) total += sum[j];
    return total;
}

static void quantize_row(const void *context, long row) {
    const quantizing *q = context;
    bf16 x[q->k];
    const bf16 *from = q->x + row * q->ldx;
    for (long i = 0; q->order && i < q->k; i++) x[i] = q->order[i] < 0 ? 0 : from[q->order[i]];
    if (!q->order) {
        memcpy(x, from, q->n_in * sizeof *x);
        memset(x + q->n_in, 0, (q->k - q->n_in) * sizeof *x);
    }
    int16_t *numbers = (int16_t *)(q->inputs + row * q->stride);
    float *steps = (float *)(numbers + q->k);
    int32_t *sums = (int32_t *)(steps + blocks_of(q->k, q->block));
    for (long i = 0, b = 0; i < q->k; i += q->block, b++)
        sums[b] = quantize_block(x + i, q->k - i < q->block ? q->k - i : q->block, numbers + i, steps + b);
}

// Turns rows x [m, n_in] into rows of inputs, `stride` bytes apart. `order` [k]: the place in x of each input, -1 for a zero; null:
// the same places, and zeros beyond n_in. k and block: multiples of 16.
EXPORT void rz_quantize_rows(const bf16 *x, long ldx, long m, long n_in, const int32_t *order, long k, long block, void *inputs,
                             long stride) {
    quantizing q = {x, order, inputs, ldx, n_in, k, block, stride};
    if (m < 8)
        for (long i = 0; i < m; i++) quantize_row(&q, i);
    else
        share(quantize_row, &q, m);
}

// Codes are packed as [strips][k / (32 / bits)][STRIP] words of 32 bits: part p of the lower and of the upper half of a word are the
// codes of k = 2 p and 2 p + 1. `codes` [n, k]: a byte each. Rows up to a multiple of GROUP are packed as zeros.
EXPORT void rz_pack_codes(const uint8_t *codes, long n, long k, int bits, void *packed) {
    uint32_t *word = packed;
    for (long strip = 0; strip < (n + GROUP - 1) / GROUP * GROUP; strip += STRIP)
        for (long i = 0; i < k; i += 32 / bits)
            for (long out = strip; out < strip + STRIP; out++, word++) {
                const uint8_t *from = codes + out * k + i;
                *word = 0;
                for (int p = 0; p < 16 / bits && out < n; p++)
                    *word |= ((uint32_t)from[2 * p] | (uint32_t)from[2 * p + 1] << 16) << p * bits;
            }
}

typedef struct {
    product p; // first, for share_product(); its x and packed are not used
    const char *inputs, *codes, *scales, *offsets;
    long stride, block, groups; // groups: of inputs that have a scale, 1 or as many as blocks
    int bits, half;             // half: scales and offsets are float16
} quantized;

// Scales and offsets are [n / GROUP][groups][GROUP].
INLINE vec scale_of(const quantized *q, const char *scales, long column, long b) {
    long at = (column / GROUP * q->groups + (q->groups > 1 ? b : 0)) * GROUP + column % GROUP;
    return q->half ? load_f16((const uint16_t *)scales + at) : load((const float *)scales + at);
}

// Adds the products of k in [from, to). `n`: registers of outputs.
INLINE void add_products(const char *codes, const int16_t *x, long stride, long from, long to, int rows, int n, int bits, ints *sums) {
    for (long k = from; k < to; k += 32 / bits) {
        words w[ACROSS];
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) {
            const char *at = codes + k * STRIP * bits / 8 + r * 4 * WIDTH;
            memcpy(w + r, at, sizeof w[r]);
            if (rows < 4 && r * 4 * WIDTH % 64 == 0) FETCH(at + AHEAD); // few rows wait for memory
        }
#pragma GCC unroll 8
        for (int p = 0; p < 16 / bits; p++) {
            words c[ACROSS];
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                c[r] = w[r] >> p * bits;
                if ((p + 1) * bits < 16) c[r] &= (uint16_t)((1 << bits) - 1);
            }
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                int32_t pair;
                memcpy(&pair, (const char *)(x + k + 2 * p) + i * stride, sizeof pair);
                ints input = spread_int(pair);
#pragma GCC unroll 8
                for (int r = 0; r < n; r++) {
                    sums[i * n + r] = add_dots((ints)c[r], input, sums[i * n + r]);
                    IN_ORDER(sums[i * n + r]);
                }
            }
        }
    }
}

// Computes `rows` rows from `row` on for `n` registers of outputs from `column` on. Callers pass constants for `rows`, `n` and
// `bits`, for which the inlined code is specialised.
INLINE void compute(const quantized *q, long row, long column, int rows, int n, int bits) {
    vec totals[ROWS * ACROSS];
    ints sums[ROWS * ACROSS];
    long k = q->p.k, blocks = blocks_of(k, q->block);
    const int16_t *x = (const int16_t *)(q->inputs + row * q->stride);
    const char *codes = q->codes + column / STRIP * STRIP * k * bits / 8 + column % STRIP * 4;
#pragma GCC unroll 32
    for (int i = 0; i < rows * n; i++) totals[i] = spread(0);
    for (long b = 0; b < blocks; b++) {
        long from = b * q->block, to = from + q->block < k ? from + q->block : k;
        const float *steps = (const float *)(x + k) + b;
        const int32_t *added = (const int32_t *)(steps + blocks);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
            for (int r = 0; r < n; r++)
                sums[i * n + r] = spread_int(-CENTER(bits) * *(const int32_t *)((const char *)added + i * q->stride));
        add_products(codes, x, q->stride, from, to, rows, n, bits, sums);
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) {
            vec scale = scale_of(q, q->scales, column + r * WIDTH, b);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                vec step = spread(*(const float *)((const char *)steps + i * q->stride));
                totals[i * n + r] = fma_of(__builtin_convertvector(sums[i * n + r], vec), scale * step, totals[i * n + r]);
            }
        }
        if (!q->offsets) continue;
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) {
            vec offset = scale_of(q, q->offsets, column + r * WIDTH, b);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                float step = *(const float *)((const char *)steps + i * q->stride);
                float sum = step * (float)*(const int32_t *)((const char *)added + i * q->stride);
                totals[i * n + r] = fma_of(spread(sum), offset, totals[i * n + r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) store_sums(&q->p, row + i, column + r * WIDTH, totals[i * n + r]);
}

#define AT_ONCE(rows) (REGISTERS == 32 || (rows) < 4 ? ACROSS : 2) // registers of outputs that `rows` rows compute together

INLINE void compute_rows(const quantized *q, long row, long column, long rows, int bits) {
#define CASE(m)    \
    if (rows == m) \
        for (long c = column; c < column + STRIP; c += AT_ONCE(m) * WIDTH) compute(q, row, c, m, AT_ONCE(m), bits);
    CASE(1) CASE(2) CASE(3) CASE(4)
#if REGISTERS == 32
    CASE(5) CASE(6)
#endif
#undef CASE
}

INLINE void compute_share(const quantized *q, long index, int bits) {
    long from = first_of_share(&q->p, index), to = end_of_share(&q->p, index);
    for (long first = 0; first < q->p.m; first += ROW_BLOCK) {
        long last = first + ROW_BLOCK < q->p.m ? first + ROW_BLOCK : q->p.m;
        for (long column = from; column < to; column += STRIP)
            for (long row = first; row < last; row += ROWS)
                compute_rows(q, row, column, last - row < ROWS ? last - row : ROWS, bits);
    }
}

static void multiply_bytes(const void *context, long index) { compute_share(context, index, 8); }

static void multiply_nibbles(const void *context, long index) { compute_share(context, index, 4); }

static void multiply_two_bits(const void *context, long index) { compute_share(context, index, 2); }

// y [m, n] = x W^T + bias of rows of inputs and codes of `bits` bits; `groups`: scales of an output, 1 or k / block rounded up;
// `offsets` may be null.
EXPORT void rz_quantized_linear(const void *inputs, long stride, long m, long k, long block, const void *codes, int bits,
                                const void *scales, const void *offsets, long groups, int half, const float *bias, long n, void *y,
                                long ldy, int wide) {
    quantized q = {{0, 0, bias, y, 0, ldy, m, k, n, 0, wide}, inputs, codes, scales, offsets, stride, block, groups, bits, half};
    long shares = pool_threads() > 1 ? 8 * pool_threads() : 1;
    share_product(&q.p, bits == 8 ? multiply_bytes : bits == 4 ? multiply_nibbles : multiply_two_bits, (groups_of(&q.p) + shares - 1) / shares);
}

typedef struct {
    quantized q;
    const int64_t *rows;
    const int32_t *order;
    bf16 *y;
    long n_in;
} lookup;

static float number_at(const char *scales, long at, int half) {
    if (!half) return ((const float *)scales)[at];
    return load_f16((const uint16_t *)scales + at / WIDTH * WIDTH)[at % WIDTH];
}

static int code_at(const quantized *q, long row, long k) {
    int bits = q->bits, step = 32 / bits;
    uint32_t word;
    memcpy(&word, q->codes + (row / STRIP * STRIP * (q->p.k / step) + k / step * STRIP + row % STRIP) * 4, sizeof word);
    return (int)(word >> (k % 2 * 16 + k % step / 2 * bits) & ((1u << bits) - 1)) - CENTER(bits);
}

static void look_up(const void *context, long index) {
    const lookup *l = context;
    const quantized *q = &l->q;
    long row = l->rows[index];
    float y[(l->n_in + WIDTH - 1) / WIDTH * WIDTH];
    for (long k = 0; k < q->p.k; k++) {
        long place = l->order ? l->order[k] : k < l->n_in ? k : -1;
        if (place < 0) continue;
        long at = (row / GROUP * q->groups + (q->groups > 1 ? k / q->block : 0)) * GROUP + row % GROUP;
        float number = (float)code_at(q, row, k) * number_at(q->scales, at, q->half);
        y[place] = q->offsets ? number + number_at(q->offsets, at, q->half) : number;
    }
    for (long i = 0; i < l->n_in; i += WIDTH) store_bf16_tail(l->y + index * l->n_in + i, load(y + i), first_lanes(l->n_in - i));
}

// y[i] = row rows[i] of a weight packed by rz_pack_codes, in the order of rz_quantize_rows, rounded to bfloat16: [m, n_in]
EXPORT void rz_look_up(const void *codes, int bits, const void *scales, const void *offsets, long groups, int half, long k,
                       long block, const int32_t *order, long n_in, const int64_t *rows, bf16 *y, long m) {
    lookup l = {{{.k = k}, 0, codes, scales, offsets, 0, block, groups, bits, half}, rows, order, y, n_in};
    share(look_up, &l, m);
}
