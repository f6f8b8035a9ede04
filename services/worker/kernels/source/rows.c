// Everything that is done to each row of activations by itself: norms, rotary positions, gates, the cache.
#include "common.h"

static inline float sum_of_squares(const bf16 *x, long n) {
    vec sum = spread(0);
    for (long j = 0; j < n; j += WIDTH) {
        vec v = load_bf16_tail(x + j, first_lanes(n - j));
        sum = fma_of(v, v, sum);
    }
    return total_of(sum);
}

// y = x / sqrt(mean(x^2) + eps) * weight over the last dimension; weight [groups, n], row i uses group i % groups.
EXPORT void rz_rms_norm(const bf16 *x, long ldx, const float *weight, long groups, float eps, bf16 *y, long ldy, long m,
                        long n) {
    for (long i = 0; i < m; i++)
        for (long g = 0; g < groups; g++) {
            const bf16 *from = x + i * ldx + g * n;
            bf16 *to = y + i * ldy + g * n;
            vec scale = spread(1.0f / sqrtf(sum_of_squares(from, n) / (float)n + eps));
            for (long j = 0; j < n; j += WIDTH) {
                lanes mask = first_lanes(n - j);
                vec w = load_tail(weight + g * n + j, mask);
                vec v = load_bf16_tail(from + j, mask) * scale * w;
                store_bf16_tail(to + j, v, mask);
            }
        }
}

// x += scale * added, both [count]
EXPORT void rz_add(bf16 *x, const bf16 *added, float scale, long count) {
    vec factor = spread(scale);
    for (long j = 0; j < count; j += WIDTH) {
        lanes mask = first_lanes(count - j);
        vec v = fma_of(load_bf16_tail(added + j, mask), factor, load_bf16_tail(x + j, mask));
        store_bf16_tail(x + j, v, mask);
    }
}

// Rotates the first 2 * half elements of every head in place: (a, b) -> (a cos - b sin, b cos + a sin).
// cos, sin: [positions, half] float32, of which row i uses positions[i].
EXPORT void rz_rotate(bf16 *x, long ldx, long heads, long head_dim, const float *cos, const float *sin, long half,
                      const int64_t *positions, long m) {
    for (long i = 0; i < m; i++)
        for (long h = 0; h < heads; h++) {
            bf16 *a = x + i * ldx + h * head_dim, *b = a + half;
            const float *c = cos + positions[i] * half, *s = sin + positions[i] * half;
            for (long j = 0; j < half; j += WIDTH) {
                lanes mask = first_lanes(half - j);
                vec va = load_bf16_tail(a + j, mask), vb = load_bf16_tail(b + j, mask);
                vec vc = load_tail(c + j, mask), vs = load_tail(s + j, mask);
                store_bf16_tail(a + j, fma_of(-vb, vs, va * vc), mask);
                store_bf16_tail(b + j, fma_of(va, vs, vb * vc), mask);
            }
        }
}

// cache[slots[i]] = x[i], rows of `width` elements
EXPORT void rz_write_rows(bf16 *cache, const int64_t *slots, const bf16 *x, long ldx, long width, long m) {
    for (long i = 0; i < m; i++) memcpy(cache + slots[i] * width, x + i * ldx, width * sizeof(bf16));
}

static inline vec silu(vec x) { return x * sigmoid_of(x); }

static inline vec gelu_tanh(vec x) { // x (1 + tanh(u)) / 2 = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
    vec cubic = fma_of(x * x, spread(0.044715f), spread(1.0f));
    vec u2 = x * cubic * spread(1.59576912f);
    return x * sigmoid_of(u2);
}

// y [m, n] = act(gate) * up of x [m, 2 n] = (gate, up); `tanh`: gelu_tanh instead of silu
EXPORT void rz_gate(const bf16 *x, bf16 *y, long m, long n, int tanh) {
    for (long i = 0; i < m; i++)
        for (long j = 0; j < n; j += WIDTH) {
            lanes mask = first_lanes(n - j);
            const bf16 *gate = x + i * 2 * n + j;
            vec g = load_bf16_tail(gate, mask), up = load_bf16_tail(gate + n, mask);
            store_bf16_tail(y + i * n + j, (tanh ? gelu_tanh(g) : silu(g)) * up, mask);
        }
}
