// Turns rows of inputs into integers for products with integers (quantized.h).
//
// 16 bits: a block's step is a power of two. So a bfloat16 number within 2^-7 of the largest of its block is exact, and a smaller one
// is off by at most 2^-16 of the largest. 8 bits: the largest number of a block is 127 steps, and every number is off by at most
// half a step.
#include "quantized.h"

#define FIRST_EXPONENT 15 // blocks whose largest number has a smaller (biased) exponent count as zero
#define STEP_BITS 14      // with 16 bits, the largest number of a block is 2^14 steps or more
#define MOST 127.0f       // with 8 bits, the largest number of a block is MOST steps
#define MAGIC 12582912.0f // 1.5 * 2^23: adding it rounds to an integer in the lower bits

typedef int16_t narrow_ints __attribute__((vector_size(2 * WIDTH)));
typedef int8_t byte_ints __attribute__((vector_size(WIDTH)));

typedef struct {
    const bf16 *x;
    const int32_t *order;
    char *inputs;
    long ldx, n_in, k, block, stride;
    int bits;
} quantizing;

static float step_of(uint16_t top, int bits) {
    uint32_t number = bits == 16 ? (uint32_t)((top >> 7) - STEP_BITS) << 23 : (uint32_t)top << 16;
    float step;
    memcpy(&step, &number, sizeof step);
    return bits == 16 ? step : step / MOST;
}

// Writes the integers of a block, its step and its sum. `n` is a multiple of 16. Callers pass a constant for `bits`.
INLINE void quantize_block(const bf16 *x, long n, int bits, char *to, block_facts *facts) {
    uint16_t top = 0;
    for (long i = 0; i < n; i++) {
        uint16_t size = x[i] & 0x7FFF;
        top = size > top ? size : top;
    }
    uint32_t exponent = top >> 7;
    *facts = (block_facts){exponent == 0xFF ? NAN : 0, 0};
    if (exponent < FIRST_EXPONENT || exponent == 0xFF) {
        memset(to, 0, (size_t)n * (size_t)bits / 8);
        return;
    }
    facts->step = step_of(top, bits);
    vec inverse = spread(1 / facts->step), magic = spread(MAGIC);
    ints sums = spread_int(0);
    for (long i = 0; i < n; i += WIDTH) {
        ints number = (ints)fma_of(load_bf16(x + i), inverse, magic) - (ints)magic;
        sums += number;
        if (bits == 16) {
            narrow_ints narrow = __builtin_convertvector(number, narrow_ints);
            memcpy(to + 2 * i, &narrow, sizeof narrow);
        } else {
            byte_ints narrow = __builtin_convertvector(number, byte_ints);
            memcpy(to + i, &narrow, sizeof narrow);
        }
    }
    if (bits == 16) { // floats hold a block's sum exactly
        facts->sum = -(int32_t)total_of(__builtin_convertvector(sums, vec));
        return;
    }
    int32_t parts[2] = {0};
    for (int j = 0; j < WIDTH; j++) parts[j % 4 / 2] += sums[j];
    facts->sum = (int32_t)((uint16_t)-parts[0] | (uint32_t)-parts[1] << 16);
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
    char *to = q->inputs + row * q->stride;
    block_facts *facts = (block_facts *)(to + q->k * q->bits / 8);
    for (long i = 0; i < q->k; i += q->block, facts++) {
        long n = q->k - i < q->block ? q->k - i : q->block;
        if (q->bits == 16)
            quantize_block(x + i, n, 16, to + 2 * i, facts);
        else
            quantize_block(x + i, n, 8, to + i, facts);
    }
}

// Turns rows x [m, n_in] into rows of inputs of `bits` bits, `stride` bytes apart. `order` [k]: the place in x of each input, -1 for
// a zero; null: the same places, and zeros beyond n_in. k and block: multiples of 16;
// of 8 bits, a block has at most 64.
EXPORT void rz_quantize_rows(const bf16 *x, long ldx, long m, long n_in, const int32_t *order, long k, long block, int bits,
                             void *inputs, long stride) {
    quantizing q = {x, order, inputs, ldx, n_in, k, block, stride, bits};
    if (m < 8)
        for (long i = 0; i < m; i++) quantize_row(&q, i);
    else
        share(quantize_row, &q, m);
}
