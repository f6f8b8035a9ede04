// Packs codes for the products of quantized.c, and looks up rows of packed weights.
#include "quantized.h"
#include "product.h"

typedef struct {
    const uint8_t *codes; // [n, k]
    uint32_t *words;
    long n, k;
    int bits, input_bits;
} packing;

// Packs a strip; constant bits make a word a few shifts.
INLINE void pack_strip(const packing *p, long strip, int bits, int input_bits) {
    uint32_t *word = p->words + strip * STRIP * (p->k * bits / 32);
    for (long i = 0; i < p->k; i += 32 / bits)
        for (long out = strip * STRIP; out < (strip + 1) * STRIP; out++) {
            const uint8_t *codes = p->codes + out * p->k + i;
            uint32_t packed = 0;
            for (int j = 0; j < 32 / bits && out < p->n; j++) packed |= (uint32_t)codes[j] << PLACE(j, bits, input_bits);
            *word++ = packed;
        }
}

static void pack(const void *context, long strip) {
    const packing *p = context;
    switch (p->bits * 32 + p->input_bits) {
    case 2 * 32 + 8: return pack_strip(p, strip, 2, 8);
    case 4 * 32 + 8: return pack_strip(p, strip, 4, 8);
    case 8 * 32 + 8: return pack_strip(p, strip, 8, 8);
    case 2 * 32 + 16: return pack_strip(p, strip, 2, 16);
    case 4 * 32 + 16: return pack_strip(p, strip, 4, 16);
    case 8 * 32 + 16: return pack_strip(p, strip, 8, 16);
    }
}

// Codes are packed as [strips][k / (32 / bits)][STRIP] words of 32 bits (PLACE). `codes` [n, k]: a byte each. Rows up to a multiple of
// GROUP are packed as zeros.
EXPORT void rz_pack_codes(const uint8_t *codes, long n, long k, int bits, int input_bits, void *packed) {
    packing p = {codes, packed, n, k, bits, input_bits};
    share(pack, &p, (n + GROUP - 1) / GROUP * (GROUP / STRIP));
}

typedef struct {
    const char *codes, *scales, *offsets;
    const int64_t *rows;
    const int32_t *order;
    bf16 *y;
    long k, block, common, n_in;
    int bits, input_bits, half;
} lookup;

static float number_at(const char *scales, long at, int half) {
    if (!half) return ((const float *)scales)[at];
    return load_f16((const uint16_t *)scales + at / WIDTH * WIDTH)[at % WIDTH];
}

static int code_at(const lookup *l, long row, long k) {
    long step = 32 / l->bits;
    uint32_t word;
    memcpy(&word, l->codes + (row / STRIP * STRIP * (l->k / step) + k / step * STRIP + row % STRIP) * 4, sizeof word);
    return (int)(word >> PLACE(k, l->bits, l->input_bits) & ((1u << l->bits) - 1)) - CENTER(l->bits);
}

static void look_up(const void *context, long index) {
    const lookup *l = context;
    long row = l->rows[index], scales = blocks_of(blocks_of(l->k, l->block), l->common);
    float y[(l->n_in + WIDTH - 1) / WIDTH * WIDTH];
    for (long k = 0; k < l->k; k++) {
        long place = l->order ? l->order[k] : (k < l->n_in ? k : -1);
        if (place < 0) continue;
        long at = (row / GROUP * scales + k / l->block / l->common) * GROUP + row % GROUP;
        float number = (float)code_at(l, row, k) * number_at(l->scales, at, l->half);
        y[place] = l->offsets ? number + number_at(l->offsets, at, l->half) : number;
    }
    for (long i = 0; i < l->n_in; i += WIDTH) store_bf16_tail(l->y + index * l->n_in + i, load(y + i), first_lanes(l->n_in - i));
}

// y[i] = row rows[i] of a weight packed by rz_pack_codes, in the order of rz_quantize_rows, rounded to bfloat16: [m, n_in]
EXPORT void rz_look_up(const void *codes, int bits, int input_bits, const void *scales, const void *offsets, long common, int half, long k,
                       long block, const int32_t *order, long n_in, const int64_t *rows, bf16 *y, long m) {
    lookup l = {codes, scales, offsets, rows, order, y, k, block, common, n_in, bits, input_bits, half};
    share(look_up, &l, m);
}
