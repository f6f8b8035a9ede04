// Linear layers in bfloat16 for CPUs that multiply pairs of it (AVX512-BF16) and have no tiles. Every output is one float32
// sum in the order of the pairs of k: a row's bits depend neither on the number of rows nor on its neighbours.
#include "common.h"
#include "product.h"

#define REGISTERS 4  // of weights that a row is multiplied with: WIDTH outputs each
#define STRIP GROUP  // outputs of a packed strip: all these registers
#define ROWS 6       // rows that are multiplied at once: their 24 sums, the weights and an input fill the registers
#define DEPTH 1024   // of k in a panel, which stays in the second-level cache while all rows come by
#define MAX_ROWS 384 // that come by; more read the weight again

// Weights are packed as [strips][k / 2][64][2]: the pairs of k of 16 outputs are a register. n is padded with zeros.
EXPORT void rz_pack_weight(const bf16 *weight, long n, long k, bf16 *packed) {
    for (long strip = 0; strip < n; strip += STRIP)
        for (long i = 0; i < k; i += 2)
            for (long out = strip; out < strip + STRIP; out++, packed += 2) {
                packed[0] = out < n ? weight[out * k + i] : 0;
                packed[1] = out < n ? weight[out * k + i + 1] : 0;
            }
}

typedef struct {
    const bf16 *weights;
    long column, from, to; // of the outputs, the first; of k, [from, to)
} panel;

// `kept`: the sums of `row` and those below it, from one panel of a strip to the next. `ahead`: a quarter of the next panel,
// which a full block fetches; null: nothing. Fewer rows wait for the memory whatever is fetched, and do it best in order.
INLINE void block(const product *p, const panel *w, long row, float (*kept)[STRIP], const char *ahead, int rows) {
    __m512 sums[ROWS][REGISTERS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int r = 0; r < REGISTERS; r++) sums[i][r] = w->from ? _mm512_loadu_ps(kept[i] + r * WIDTH) : _mm512_setzero_ps();
    const bf16 *x = p->x + row * p->ldx, *weights = w->weights;
    const char *fetched = ahead ? ahead : (const char *)weights;
    for (long k = w->from; k < w->to; k += 2, weights += 2 * STRIP, fetched += ahead ? 64 : 0) {
        if (rows == ROWS) _mm_prefetch(fetched, _MM_HINT_T0);
        __m512bh pairs[REGISTERS];
#pragma GCC unroll 8
        for (int r = 0; r < REGISTERS; r++) pairs[r] = (__m512bh)_mm512_loadu_si512(weights + r * 2 * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            __m512bh input = spread_pair(x + i * p->ldx + k);
#pragma GCC unroll 8
            for (int r = 0; r < REGISTERS; r++) sums[i][r] = _mm512_dpbf16_ps(sums[i][r], input, pairs[r]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int r = 0; r < REGISTERS; r++)
            if (w->to < p->k)
                _mm512_storeu_ps(kept[i] + r * WIDTH, sums[i][r]);
            else
                store_sums(p, row + i, w->column + r * WIDTH, sums[i][r]);
}

// The rows that do not fill a block.
static void multiply_few(const product *p, const panel *w, long row, float (*kept)[STRIP], long rows) {
    if (rows == 1) block(p, w, row, kept, 0, 1);
    if (rows == 2) block(p, w, row, kept, 0, 2);
    if (rows == 3) block(p, w, row, kept, 0, 3);
    if (rows == 4) block(p, w, row, kept, 0, 4);
    if (rows == 5) block(p, w, row, kept, 0, 5);
}

// Rows [first, last). The first block waits for what the second to the fifth of the panel before did not fetch.
static void multiply_panel(const product *p, const panel *w, long first, long last, float (*kept)[STRIP]) {
    const char *next = (const char *)(w->weights + (w->to - w->from) * STRIP);
    long row = first, quarter = (w->to - w->from) / 2 * 64;
    for (; row + ROWS <= last; row += ROWS) {
        long turn = (row - first) / ROWS - 1;
        block(p, w, row, kept + (row - first), turn >= 0 && turn < 4 ? next + turn * quarter : 0, ROWS);
    }
    multiply_few(p, w, row, kept + (row - first), last - row);
}

// One thread's outputs: `share` strips.
static void multiply(const void *context, long index) {
    const product *p = context;
    long from = first_of_share(p, index), to = end_of_share(p, index);
    long times = (p->m + MAX_ROWS - 1) / MAX_ROWS, rows = ((p->m + times - 1) / times + ROWS - 1) / ROWS * ROWS;
    float kept[rows][STRIP];
    for (long first = 0; first < p->m; first += rows)
        for (long column = from; column < to; column += STRIP)
            for (long k = 0; k < p->k; k += DEPTH) {
                panel w = {p->packed + column * p->k + k * STRIP, column, k, k + DEPTH < p->k ? k + DEPTH : p->k};
                multiply_panel(p, &w, first, first + rows < p->m ? first + rows : p->m, kept);
            }
}

// y [m, n] = x [m, k] W^T + bias, y in bfloat16 or, `wide`, in float32. k: a multiple of 2. `spare` is for kernels that need it.
EXPORT void rz_linear(const bf16 *x, long ldx, long m, long k, const bf16 *packed, const float *bias, long n, void *y,
                      long ldy, int wide, bf16 *spare) {
    (void)spare;
    product p = {x, packed, bias, y, ldx, ldy, m, k, n, 0, wide};
    share_product(&p, multiply);
}
