// Loads and stores of the ends of rows, for registers without masks (AVX2, NEON).
#pragma once

typedef long lanes; // number of lanes, from the first lane on

INLINE lanes first_lanes(long n) { return n < WIDTH ? n : WIDTH; }

INLINE vec load_tail(const float *x, lanes n) {
    float values[WIDTH] = {0};
    if (n == WIDTH) return load(x);
    memcpy(values, x, n * sizeof(float));
    return load(values);
}

INLINE void store_tail(float *y, vec x, lanes n) {
    float values[WIDTH];
    if (n == WIDTH) return store(y, x);
    store(values, x);
    memcpy(y, values, n * sizeof(float));
}

INLINE vec load_bf16_tail(const bf16 *x, lanes n) {
    bf16 values[WIDTH] = {0};
    if (n == WIDTH) return load_bf16(x);
    memcpy(values, x, n * sizeof(bf16));
    return load_bf16(values);
}

INLINE void store_bf16_tail(bf16 *y, vec x, lanes n) {
    bf16 values[WIDTH];
    if (n == WIDTH) return store_bf16(y, x);
    store_bf16(values, x);
    memcpy(y, values, n * sizeof(bf16));
}

INLINE vec load_part_tail(const bf16 *x, int odd, long n) {
    bf16 values[2 * WIDTH] = {0};
    memcpy(values, x, n * sizeof(bf16));
    return load_part(values, odd);
}

INLINE void store_parts(bf16 *y, vec even, vec odd, long n) { // stores the first n
    bf16 values[2 * WIDTH];
    if (n >= 2 * WIDTH) return store_both(y, even, odd);
    store_both(values, even, odd);
    memcpy(y, values, n * sizeof(bf16));
}
