// Linear layers with bfloat16 weights and float32 arithmetic, for CPUs with AVX2. Every output is one sum in the order of k:
// a row's bits depend neither on the number of rows nor on its neighbours.
#include "common.h"

#define STRIP 16                // outputs of a packed strip: two registers
#define AT_ONCE 4               // strips that a single row is multiplied with, so that sums do not wait for each other
#define ROWS 6                  // rows that a strip is multiplied with: their 12 sums and the weights fill the registers
#define INPUT_BYTES (192 << 10) // of inputs that stay in the second-level cache while the weight streams past them

// Weights are packed as [strips][k][8][2]: outputs i and i + 8 of a strip share 32 bits, low half first. n is padded with
// zeros to a multiple of AT_ONCE strips.
EXPORT void rz_pack_weight(const bf16 *weight, long n, long k, bf16 *packed) {
    long strips = (n + AT_ONCE * STRIP - 1) / (AT_ONCE * STRIP) * AT_ONCE;
    for (long strip = 0; strip < strips; strip++)
        for (long i = 0; i < k; i++)
            for (long j = 0; j < STRIP; j++) {
                long out = strip * STRIP + j % 2 * WIDTH + j / 2;
                *packed++ = out < n ? weight[out * k + i] : 0;
            }
}

typedef struct {
    const bf16 *x, *packed; // x [m, ldx]
    const float *bias;      // [n] or null
    void *y;                // [m, ldy]
    long ldx, ldy, m, k, n, share;
    int wide; // y is float32
} product;

static void store(const product *p, long row, long column, __m256 low, __m256 high) {
    float sums[STRIP];
    _mm256_storeu_ps(sums, low);
    _mm256_storeu_ps(sums + WIDTH, high);
    long n = p->n - column < STRIP ? p->n - column : STRIP;
    for (long i = 0; i < n && p->bias; i++) sums[i] += p->bias[column + i];
    if (p->wide) {
        memcpy((float *)p->y + row * p->ldy + column, sums, n > 0 ? n * sizeof(float) : 0);
        return;
    }
    bf16 rounded[STRIP];
    store_bf16(rounded, _mm256_loadu_ps(sums));
    store_bf16(rounded + WIDTH, _mm256_loadu_ps(sums + WIDTH));
    memcpy((bf16 *)p->y + row * p->ldy + column, rounded, n > 0 ? n * sizeof(bf16) : 0);
}

// `x`: the inputs of `row` and those below it, [rows, k]. Few rows wait for the memory, which is why theirs asks for the strips
// that are next in their place; where sums take longer than that, it only costs.
INLINE void block(const product *p, const float *x, long row, long strip, int rows, int strips) {
    __m256 sums[ROWS][2 * AT_ONCE], inputs[ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int s = 0; s < 2 * strips; s++) sums[i][s] = _mm256_setzero_ps();
    const bf16 *w = p->packed + strip * STRIP * p->k;
    for (long k = 0; k < p->k; k++) {
#pragma GCC unroll 8
        for (int i = 0; i < rows && strips > 1; i++) inputs[i] = _mm256_broadcast_ss(x + i * p->k + k);
#pragma GCC unroll 8
        for (int s = 0; s < strips; s++) {
            if (rows < ROWS) _mm_prefetch(w + ((s + AT_ONCE) * p->k + k) * STRIP, _MM_HINT_T1);
            __m256i pairs = _mm256_loadu_si256((const __m256i *)(w + (s * p->k + k) * STRIP));
            __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
            __m256 high = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xFFFF0000)));
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                if (strips == 1) inputs[i] = _mm256_broadcast_ss(x + i * p->k + k); // no register is left to keep them
                sums[i][2 * s] = _mm256_fmadd_ps(inputs[i], low, sums[i][2 * s]);
                sums[i][2 * s + 1] = _mm256_fmadd_ps(inputs[i], high, sums[i][2 * s + 1]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int s = 0; s < strips; s++)
            store(p, row + i, (strip + s) * STRIP, sums[i][2 * s], sums[i][2 * s + 1]);
}

// The rows that do not fill a block, with AT_ONCE strips.
static void multiply_few(const product *p, const float *x, long row, long rows, long strip) {
    if (rows == 1) block(p, x, row, strip, 1, 4);
    for (long s = strip; s < strip + AT_ONCE && rows == 2; s += 2) block(p, x, row, s, 2, 2);
    for (long s = strip; s < strip + AT_ONCE; s++) {
        if (rows == 3) block(p, x, row, s, 3, 1);
        if (rows == 4) block(p, x, row, s, 4, 1);
        if (rows == 5) block(p, x, row, s, 5, 1);
    }
}

static void widen(const product *p, long first, long last, float *x) {
    for (long row = first; row < last; row++, x += p->k)
        for (long k = 0; k < p->k; k += WIDTH) _mm256_storeu_ps(x + k, load_bf16(p->x + row * p->ldx + k));
}

// One thread's outputs: `share` groups of AT_ONCE strips.
static void multiply(const void *context, long index) {
    const product *p = context;
    long strips = (p->n + STRIP - 1) / STRIP, from = index * p->share * AT_ONCE, to = from + p->share * AT_ONCE;
    if (to > strips) to = strips;
    long at_once = INPUT_BYTES / (long)sizeof(float) / p->k / ROWS * ROWS;
    if (at_once < ROWS) at_once = ROWS;
    if (at_once > p->m) at_once = p->m;
    float inputs[at_once * p->k];
    for (long first = 0; first < p->m; first += at_once) {
        long last = first + at_once < p->m ? first + at_once : p->m, full = first + (last - first) / ROWS * ROWS;
        widen(p, first, last, inputs);
        for (long strip = from; strip < to; strip += AT_ONCE) {
            for (long s = strip; s < strip + AT_ONCE && s < to; s++)
                for (long row = first; row < full; row += ROWS)
                    block(p, inputs + (row - first) * p->k, row, s, ROWS, 1);
            multiply_few(p, inputs + (full - first) * p->k, full, last - full, strip);
        }
    }
}

// y [m, n] = x [m, k] W^T + bias, y in bfloat16 or, `wide`, in float32. k: a multiple of 8. `spare` is for kernels that need it.
EXPORT void rz_linear(const bf16 *x, long ldx, long m, long k, const bf16 *packed, const float *bias, long n, void *y,
                      long ldy, int wide, bf16 *spare) {
    (void)spare;
    long groups = (n + AT_ONCE * STRIP - 1) / (AT_ONCE * STRIP);
    // Twice as many pieces as threads: one that is held up costs less.
    long pieces = pool_threads() > 1 ? 2 * pool_threads() : 1, share_of_groups = (groups + pieces - 1) / pieces;
    product p = {x, packed, bias, y, ldx, ldy, m, k, n, share_of_groups, wide};
    share(multiply, &p, (groups + share_of_groups - 1) / share_of_groups);
}
