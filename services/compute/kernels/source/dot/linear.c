// Linear layers in bfloat16 for CPUs without tiles that multiply pairs of bfloat16 (AVX512-BF16, NEON with bfloat16). Every
// output is one float32 sum in the order of the pairs of k, so a row's bits depend neither on the number of rows nor on other
// rows.
#include "common.h"
#include "packed.h"
#include "product.h"

#define ACROSS 4     // registers of weights that a row is multiplied with: WIDTH outputs each
#define STRIP (ACROSS * WIDTH) // outputs of a packed strip
#define ROWS 6       // rows of a block: their 24 sums, the weights and an input fill the registers
#define DEPTH 1024   // k of a panel, which stays in the second-level cache while all rows are multiplied with it
#define SHALLOW 128  // k of a panel for three or four blocks, which compute about as long as the next panel takes to arrive
#define MAX_ROWS 384 // rows multiplied with a panel; more rows read the weight again
#define AHEAD 4096   // bytes that a lone block fetches ahead; the hardware's prefetcher stops at page ends
#define OWN (-1)     // in place of a number of lines: a block fetches what it reads next itself

// Weights are packed as [strips][k / 2][STRIP][2]; a register holds a pair of k for WIDTH outputs. n is padded with zeros.
EXPORT void rz_pack_weight(const bf16 *weight, long n, long k, bf16 *packed) {
    for (long strip = 0; strip < n; strip += STRIP)
        for (long i = 0; i < k; i += 2)
            for (long out = strip; out < strip + STRIP; out++, packed += 2) {
                packed[0] = out < n ? weight[out * k + i] : 0;
                packed[1] = out < n ? weight[out * k + i + 1] : 0;
            }
}

void unpack_row(const bf16 *packed, long row, long k, bf16 *y) {
    const bf16 *from = packed + row / STRIP * STRIP * k + row % STRIP * 2;
    for (long in = 0; in < k; in += 2, from += 2 * STRIP) memcpy(y + in, from, 4);
}

typedef struct {
    const bf16 *weights;
    long column, from, to; // the first output; k in [from, to)
    int lines;             // lines of the next panel that a block fetches for every pair of k, or OWN
} panel;

// `kept`: sums of the rows from `row` on, kept between the panels of a strip. `ahead`: this block's part of the next panel. For
// every pair of k one line is fetched into the first-level cache, or two into the second: two into the first would delay loads
// from the second.
INLINE void block(const product *p, const panel *w, long row, float (*kept)[STRIP], const char *ahead, int lines, int rows) {
    vec sums[ROWS][ACROSS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int r = 0; r < ACROSS; r++) sums[i][r] = w->from ? load(kept[i] + r * WIDTH) : spread(0);
    const bf16 *x = p->x + row * p->ldx, *weights = w->weights;
    for (long k = w->from; k < w->to; k += 2, weights += 2 * STRIP, ahead += lines == OWN ? 4 * STRIP : 64 * lines) {
        for (long at = 0; lines == OWN && at < 4 * STRIP; at += 64) FETCH(ahead + at);
        if (lines == 1) FETCH_NEAR(ahead);
        if (lines == 2) {
            FETCH(ahead);
            FETCH(ahead + 64);
        }
        pairs weight[ACROSS];
#pragma GCC unroll 8
        for (int r = 0; r < ACROSS; r++) weight[r] = load_pairs(weights + r * 2 * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            pairs input = spread_pair(x + i * p->ldx + k);
#pragma GCC unroll 8
            for (int r = 0; r < ACROSS; r++) sums[i][r] = dot_of(input, weight[r], sums[i][r]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int r = 0; r < ACROSS; r++)
            if (w->to < p->k)
                store(kept[i] + r * WIDTH, sums[i][r]);
            else
                store_sums(p, row + i, w->column + r * WIDTH, sums[i][r]);
}

static void multiply_rows(const product *p, const panel *w, long row, float (*kept)[STRIP], const char *ahead, int lines, long rows) {
#define CASE(n)                                                           \
    if (rows == n && lines == OWN) block(p, w, row, kept, ahead, OWN, n); \
    if (rows == n && lines == 0) block(p, w, row, kept, 0, 0, n);         \
    if (rows == n && lines == 1) block(p, w, row, kept, ahead, 1, n);     \
    if (rows == n && lines == 2) block(p, w, row, kept, ahead, 2, n);
    CASE(1)
    CASE(2)
    CASE(3)
    CASE(4)
    CASE(5)
    CASE(6)
#undef CASE
}

// Multiplies rows [first, last) with a panel. Each block after the first prefetches a part of the next panel.
static void multiply_panel(const product *p, const panel *w, long first, long last, float (*kept)[STRIP]) {
    if (w->lines == OWN) return multiply_rows(p, w, first, kept, (const char *)w->weights + AHEAD, OWN, last - first);
    long n_lines = (w->to - w->from) * STRIP * (long)sizeof(bf16) / 64, part = (w->to - w->from) / 2 * w->lines;
    const char *next = (const char *)(w->weights + (w->to - w->from) * STRIP);
    for (long row = first, line = -part; row < last; row += ROWS, line += part) {
        int lines = line >= 0 && line < n_lines ? w->lines : 0;
        multiply_rows(p, w, row, kept + (row - first), next + 64 * line, lines, last - row < ROWS ? last - row : ROWS);
    }
}

// Computes one share of the outputs.
static void multiply(const void *context, long index) {
    const product *p = context;
    long from = first_of_share(p, index), to = end_of_share(p, index);
    long times = (p->m + MAX_ROWS - 1) / MAX_ROWS, rows = ((p->m + times - 1) / times + ROWS - 1) / ROWS * ROWS;
    // Two blocks are limited by memory and are fastest without prefetches. Five blocks prefetch the whole next panel with one line per
    // pair of k, three or four blocks with two lines.
    long blocks = (p->m + ROWS - 1) / ROWS;
    int lines = blocks == 1 ? OWN : 0;
    if (blocks > 2) lines = blocks > 4 ? 1 : 2;
    long depth = lines == 2 ? SHALLOW : DEPTH;
    float kept[rows][STRIP];
    for (long first = 0; first < p->m; first += rows)
        for (long column = from; column < to; column += STRIP)
            for (long k = 0; k < p->k; k += depth) {
                panel w = {p->packed + column * p->k + k * STRIP, column, k, k + depth < p->k ? k + depth : p->k, lines};
                multiply_panel(p, &w, first, first + rows < p->m ? first + rows : p->m, kept);
            }
}

// y [m, n] = x [m, k] W^T + bias, y in bfloat16 or, `wide`, in float32. k: a multiple of 2. Only
// the AMX kernel uses `spare`.
EXPORT void rz_linear(const bf16 *x, long ldx, long m, long k, const bf16 *packed, const float *bias, long n, void *y,
                      long ldy, int wide, bf16 *spare) {
    (void)spare;
    product p = {x, packed, bias, y, ldx, ldy, m, k, n, 0, wide};
    share_product(&p, multiply, 1);
}
