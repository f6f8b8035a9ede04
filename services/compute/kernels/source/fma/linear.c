// Linear layers with bfloat16 weights and float32 arithmetic, by multiply-add, for AVX2, AVX-512 and NEON. Every output is one
// sum in the order of k, so a row's bits depend neither on the number of rows nor on other rows.
#include "order.h"
#include "packed.h"
#include "product.h"

#define STRIP (2 * WIDTH)           // outputs of a packed strip: two registers
#define AT_ONCE (GROUP / STRIP)     // strips of a group
#define ROWS (REGISTERS == 32 ? 12 : 6) // rows that a strip is multiplied with: their sums and the weights fill the registers
#define LINE (WIDTH == 4 ? 4 : 1)   // number of k whose weights of a strip fill at most one cache line
#define INPUT_BYTES (512 << 10)     // inputs that stay in a near cache while the weight streams past them

// Distance between rows of inputs. Rows a multiple of 4 KiB apart would compete for the same lines of the first-level cache.
#define STRIDE(k) ((k) + 16)

// Number of strips that a block of `rows` rows computes together: fewer rows take more strips, to have enough independent sums.
#define STRIPS_OF(rows) (2 * ROWS / 3 / (rows) > AT_ONCE ? AT_ONCE : (2 * ROWS / 3 / (rows) > 0 ? 2 * ROWS / 3 / (rows) : 1))

// Weights are packed as [strips][k][WIDTH][2]: outputs i and i + WIDTH of a strip share 32 bits, low half first. n is padded
// with zeros.
EXPORT void rz_pack_weight(const bf16 *weight, long n, long k, bf16 *packed) {
    long strips = (n + GROUP - 1) / GROUP * AT_ONCE;
    for (long strip = 0; strip < strips; strip++)
        for (long i = 0; i < k; i++)
            for (long j = 0; j < STRIP; j++) {
                long out = strip * STRIP + j % 2 * WIDTH + j / 2;
                *packed++ = out < n ? weight[out * k + i] : 0;
            }
}

void unpack_row(const bf16 *packed, long row, long k, bf16 *y) {
    long place = row % STRIP; // the strip's second half of outputs is interleaved with the first
    const bf16 *from = packed + row / STRIP * STRIP * k + place % WIDTH * 2 + place / WIDTH;
    for (long in = 0; in < k; in++) y[in] = from[in * STRIP];
}

// `x`: the inputs of the rows from `row` on, STRIDE(k) apart. `ahead`: prefetch the next group of strips; the first block of rows
// does. Callers pass constants from `rows` on, for which the inlined code is specialised.
INLINE void block(const product *p, const float *x, long row, long strip, int rows, int strips, int ahead) {
    vec sums[ROWS][2 * AT_ONCE], inputs[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int s = 0; s < 2 * strips; s++) sums[i][s] = spread(0);
    const bf16 *w = p->packed + strip * STRIP * p->k;
    long stride = STRIDE(p->k);
    for (long k = 0; k < p->k; k++) {
#pragma GCC unroll 16
        for (int i = 0; i < rows && strips > 1; i++) inputs[i] = spread(x[i * stride + k]);
#pragma GCC unroll 16
        for (int s = 0; s < strips; s++) {
            if (ahead && k % LINE == 0) FETCH(w + ((s + AT_ONCE) * p->k + k) * STRIP);
            ints pairs;
            memcpy(&pairs, w + (s * p->k + k) * STRIP, sizeof pairs);
            vec low = (vec)(pairs << 16), high = (vec)(pairs & spread_int((int)0xFFFF0000));
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) {
                if (strips == 1) inputs[i] = spread(x[i * stride + k]); // no register is left to keep the inputs
                sums[i][2 * s] = fma_of(inputs[i], low, sums[i][2 * s]);
                sums[i][2 * s + 1] = fma_of(inputs[i], high, sums[i][2 * s + 1]);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int r = 0; r < 2 * strips; r++) store_sums(p, row + i, strip * STRIP + r * WIDTH, sums[i][r]);
}

// Computes the rows that do not fill a block, for a group of strips.
static void multiply_few(const product *p, const float *x, long row, long rows, long strip) {
#define FEW(n)     \
    if (rows == n) \
        for (long s = strip; s < strip + AT_ONCE; s += STRIPS_OF(n)) block(p, x, row, s, n, STRIPS_OF(n), 1);
    FEW(1)
    FEW(2)
    FEW(3)
    FEW(4)
    FEW(5)
#if REGISTERS == 32
    FEW(6)
    FEW(7)
    FEW(8)
    FEW(9)
    FEW(10)
    FEW(11)
#endif
#undef FEW
}

static void widen_rows(const product *p, long first, long last, float *x) {
    for (long row = first; row < last; row++, x += STRIDE(p->k))
        for (long k = 0; k < p->k; k += WIDTH) store(x + k, load_bf16(p->x + row * p->ldx + k));
}

// Computes one share of the outputs.
static void multiply(const void *context, long index) {
    const product *p = context;
    long from = first_of_share(p, index) / STRIP, to = (end_of_share(p, index) + STRIP - 1) / STRIP;
    long most = INPUT_BYTES / (long)sizeof(float) / p->k + 1, times = (p->m + most - 1) / most;
    long at_once = times > 1 ? ((p->m + times - 1) / times + ROWS - 1) / ROWS * ROWS : p->m;
    float inputs[at_once * STRIDE(p->k)];
    for (long first = 0; first < p->m; first += at_once) {
        long last = first + at_once < p->m ? first + at_once : p->m, full = first + (last - first) / ROWS * ROWS;
        widen_rows(p, first, last, inputs);
        for (long strip = from; strip < to; strip += AT_ONCE) {
            for (long s = strip; s < strip + AT_ONCE && s < to && first < full; s++) {
                block(p, inputs, first, s, ROWS, 1, 1);
                for (long row = first + ROWS; row < full; row += ROWS)
                    block(p, inputs + (row - first) * STRIDE(p->k), row, s, ROWS, 1, 0);
            }
            multiply_few(p, inputs + (full - first) * STRIDE(p->k), full, last - full, strip);
        }
    }
}

// y [m, n] = x [m, k] W^T + bias, y in bfloat16 or, `wide`, in float32. k: a multiple of 16. Only
// the AMX kernel uses `spare`.
EXPORT void rz_linear(const bf16 *x, long ldx, long m, long k, const bf16 *packed, const float *bias, long n, void *y,
                      long ldy, int wide, bf16 *spare) {
    (void)spare;
    product p = {x, packed, bias, y, ldx, ldy, m, k, n, 0, wide};
    // Each share converts the inputs again, but more shares than threads make a delayed thread cost less.
    long shares = pool_threads() > 1 ? 8 * pool_threads() : 1;
    share_product(&p, multiply, (groups_of(&p) + shares - 1) / shares);
}
