// Linear layers in bfloat16 with float32 sums. A row's sums follow the order of k, so its bits depend neither on the
// number of rows nor on other rows.
#include "packed.h"
#include "tiles.h"

#define STRIP 64        // outputs computed together: four panels of a tile's width
#define ROW_BLOCK 256   // rows whose inputs stay in the second-level cache while the weight streams past them
#define AHEAD 4096      // distance in bytes of the prefetch; the hardware's prefetcher stops at page ends

// Weights are packed as [n / 16 panels][k / 32][16 pairs of k][16 outputs][2], the layout of a tile product; n is padded
// with zeros to a multiple of STRIP.
EXPORT void rz_pack_weight(const bf16 *weight, long n, long k, bf16 *packed) {
    long panels = (n + STRIP - 1) / STRIP * (STRIP / TILE);
    for (long panel = 0; panel < panels; panel++)
        for (long step = 0; step < k / TILE_K; step++)
            for (long pair = 0; pair < TILE; pair++)
                for (long column = 0; column < TILE; column++, packed += 2) {
                    long out = panel * TILE + column, in = step * TILE_K + 2 * pair;
                    if (out < n)
                        memcpy(packed, weight + out * k + in, 4);
                    else
                        memset(packed, 0, 4);
                }
}

void unpack_row(const bf16 *packed, long row, long k, bf16 *y) {
    const bf16 *from = packed + row / TILE * TILE * k + row % TILE * 2;
    for (long in = 0; in < k; in += 2, from += 2 * TILE) memcpy(y + in, from, 4);
}

typedef struct {
    const bf16 *packed;
    const float *bias; // [n] or null
    void *y;
    long ldy, n, k;
    int wide; // y is float32
} product;

// Stores two adjacent tiles of sums.
static void store_sums(const product *p, float left[TILE][TILE], float right[TILE][TILE], long row, long rows, long column) {
    long n = p->n - column;
    if (n <= 0) return;
    __mmask32 mask = first_bf16(n);
    __mmask16 low = (__mmask16)mask, high = (__mmask16)(mask >> TILE);
    __m512 bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (p->bias) {
        bias[0] = _mm512_maskz_loadu_ps(low, p->bias + column);
        bias[1] = _mm512_maskz_loadu_ps(high, p->bias + column + TILE);
    }
    for (long i = 0; i < rows; i++) {
        __m512 first = _mm512_add_ps(_mm512_load_ps(left[i]), bias[0]), second = _mm512_add_ps(_mm512_load_ps(right[i]), bias[1]);
        long at = (row + i) * p->ldy + column;
        if (p->wide) {
            _mm512_mask_storeu_ps((float *)p->y + at, low, first);
            _mm512_mask_storeu_ps((float *)p->y + at + TILE, high, second);
        } else {
            _mm512_mask_storeu_epi16((bf16 *)p->y + at, mask, (__m512i)_mm512_cvtne2ps_pbh(second, first));
        }
    }
}

static inline void fetch_tile(const char *from) {
    for (int at = 0; at < TILE_BYTES; at += 64) _mm_prefetch(from + at, _MM_HINT_T0);
}

// A tile's rows of inputs.
typedef struct {
    const bf16 *x;
    long ldx, rows;
} inputs;

// Computes 16 rows x 64 outputs, limited by reading the weight once from memory.
static void block_1x4(const product *p, inputs in, long row, long column) {
    const char *b = (const char *)(p->packed + column * p->k);
    long steps = p->k / TILE_K, panel = steps * TILE_BYTES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long s = 0; s < steps; s++, b += TILE_BYTES) {
        _tile_loadd(4, in.x + s * TILE_K, in.ldx * 2);
        fetch_tile(b + AHEAD);
        _tile_loadd(5, b, 64);
        _tile_dpbf16ps(0, 4, 5);
        fetch_tile(b + panel + AHEAD);
        _tile_loadd(6, b + panel, 64);
        _tile_dpbf16ps(1, 4, 6);
        fetch_tile(b + 2 * panel + AHEAD);
        _tile_loadd(7, b + 2 * panel, 64);
        _tile_dpbf16ps(2, 4, 7);
        fetch_tile(b + 3 * panel + AHEAD);
        _tile_loadd(5, b + 3 * panel, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _Alignas(64) float sums[4][TILE][TILE];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    store_sums(p, sums[0], sums[1], row, in.rows, column);
    store_sums(p, sums[2], sums[3], row, in.rows, column + 2 * TILE);
}

INLINE void fetch(const char *from, long bytes) {
    for (long at = 0; at < bytes; at += 64) _mm_prefetch(from + at, _MM_HINT_T1);
}

// The sums of 32 rows x 32 outputs, as four tiles, before they are stored.
typedef struct {
    _Alignas(64) float sums[4][TILE][TILE];
    long row, column; // of the first sum; row -1: no sums
    long below;       // rows of the lower tiles
} kept;

// Stores row `i` of the upper and of the lower tiles.
static void store_kept(const product *p, kept *k, long i) {
    if (k->row < 0) return;
    store_sums(p, k->sums[0] + i, k->sums[1] + i, k->row + i, 1, k->column);
    if (i < k->below) store_sums(p, k->sums[2] + i, k->sums[3] + i, k->row + TILE + i, 1, k->column);
}

// Computes 32 rows x 32 outputs; every loaded tile is used twice. Between the products it prefetches four times `part` bytes
// per step from `next`, in parts, because many prefetches at once delay the loads behind them. It also stores the sums that the
// block `before` has kept, a row at a time, because storing all of them between two blocks would stall the second block.
static void block_2x2(const product *p, inputs upper, inputs lower, kept *k, kept *before, const char *next, long part) {
    const char *b = (const char *)(p->packed + k->column * p->k);
    long steps = p->k / TILE_K, panel = steps * TILE_BYTES, stored = 0, due = 0;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long s = 0; s < steps; s++, b += TILE_BYTES, next += 4 * part) {
        _tile_loadd(4, upper.x + s * TILE_K, upper.ldx * 2);
        fetch(next, part);
        _tile_loadd(6, b, 64);
        fetch(next + part, part);
        _tile_loadd(7, b + panel, 64);
        fetch(next + 2 * part, part);
        _tile_loadd(5, lower.x + s * TILE_K, lower.ldx * 2);
        fetch(next + 3 * part, part);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        for (due += TILE; due >= steps; due -= steps, stored++) store_kept(p, before, stored);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, k->sums[0], 64);
    _tile_stored(1, k->sums[1], 64);
    _tile_stored(2, k->sums[2], 64);
    _tile_stored(3, k->sums[3], 64);
}

typedef struct {
    product p;
    const bf16 *x, *spare;
    long ldx, m, full, share;
} division;

// The inputs of the 16 rows from `row` on, or of the rest of the rows.
static inputs inputs_at(const division *d, long row) {
    if (row < d->full) return (inputs){d->x + row * d->ldx, d->ldx, TILE};
    return (inputs){d->spare, d->p.k, d->m - d->full};
}

// Computes one share of the outputs: `share` strips.
static void multiply(const void *context, long index) {
    const division *d = context;
    const product *p = &d->p;
    long from = index * d->share * STRIP, to = from + d->share * STRIP < p->n ? from + d->share * STRIP : p->n;
    kept blocks[2];
    blocks[0].row = blocks[1].row = -1;
    int turn = 0;
    configure_tiles();
    for (long first = 0; first < d->m; first += ROW_BLOCK) {
        long last = first + ROW_BLOCK < d->m ? first + ROW_BLOCK : d->m, tiles = (last - first + TILE - 1) / TILE, pairs = tiles / 2;
        // Each block of rows prefetches a part of the next outputs' two panels.
        long part = pairs ? (TILE_BYTES / 2 / pairs + 63) / 64 * 64 : 0, ahead = 4 * part * (p->k / TILE_K);
        for (long column = from; column < to; column += STRIP) {
            for (long half = column; half < column + STRIP; half += STRIP / 2)
                for (long i = 0; i < pairs; i++, turn = !turn) {
                    const char *next = (const char *)(p->packed + (half + STRIP / 2) * p->k);
                    kept *k = blocks + turn;
                    inputs upper = inputs_at(d, first + 2 * i * TILE), lower = inputs_at(d, first + (2 * i + 1) * TILE);
                    k->row = first + 2 * i * TILE;
                    k->column = half;
                    k->below = lower.rows;
                    block_2x2(p, upper, lower, k, blocks + !turn, next + i * ahead, part);
                }
            long row = first + pairs * 2 * TILE;
            if (tiles % 2) block_1x4(p, inputs_at(d, row), row, column);
        }
    }
    for (long i = 0; i < TILE; i++) store_kept(p, blocks + !turn, i);
    _tile_release();
}

// y [m, n] = x [m, k] W^T + bias. k: a multiple of 32. `spare`: [16, k], for the rows beyond the last full tile.
EXPORT void rz_linear(const bf16 *x, long ldx, long m, long k, const bf16 *packed, const float *bias, long n, void *y,
                      long ldy, int wide, bf16 *spare) {
    long full = m / TILE * TILE, tail = m - full, strips = (n + STRIP - 1) / STRIP;
    for (long i = 0; i < tail; i++) memcpy(spare + i * k, x + (full + i) * ldx, k * sizeof(bf16));
    if (tail) memset(spare + tail * k, 0, (TILE - tail) * k * sizeof(bf16));
    // Twice as many pieces as threads, so that a delayed thread costs less.
    long pieces = pool_threads() > 1 ? 2 * pool_threads() : 1, share_of_strips = (strips + pieces - 1) / pieces;
    division d = {{packed, bias, y, ldy, n, k, wide}, x, spare, ldx, m, full, share_of_strips};
    share(multiply, &d, (strips + share_of_strips - 1) / share_of_strips);
}
