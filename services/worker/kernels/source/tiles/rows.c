// Everything that is done to each row of activations by itself: norms, rotary positions, gates, the cache.
#include "common.h"

static inline float sum_of_squares(const bf16 *x, long n) {
    __m512 sum = _mm512_setzero_ps();
    for (long j = 0; j < n; j += 16) {
        __m512 v = load_bf16_tail(x + j, first_lanes(n - j));
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return _mm512_reduce_add_ps(sum);
}

// y = x / sqrt(mean(x^2) + eps) * weight over the last dimension; weight [groups, n], row i uses group i % groups.
EXPORT void rz_rms_norm(const bf16 *x, long ldx, const float *weight, long groups, float eps, bf16 *y, long ldy, long m,
                        long n) {
    for (long i = 0; i < m; i++)
        for (long g = 0; g < groups; g++) {
            const bf16 *from = x + i * ldx + g * n;
            bf16 *to = y + i * ldy + g * n;
            __m512 scale = _mm512_set1_ps(1.0f / sqrtf(sum_of_squares(from, n) / (float)n + eps));
            for (long j = 0; j < n; j += 16) {
                __mmask16 mask = first_lanes(n - j);
                __m512 w = _mm512_maskz_loadu_ps(mask, weight + g * n + j);
                __m512 v = _mm512_mul_ps(_mm512_mul_ps(load_bf16_tail(from + j, mask), scale), w);
                store_bf16_tail(to + j, v, mask);
            }
        }
}

// x += scale * added, both [count]
EXPORT void rz_add(bf16 *x, const bf16 *added, float scale, long count) {
    __m512 factor = _mm512_set1_ps(scale);
    for (long j = 0; j < count; j += 16) {
        __mmask16 mask = first_lanes(count - j);
        __m512 v = _mm512_fmadd_ps(load_bf16_tail(added + j, mask), factor, load_bf16_tail(x + j, mask));
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
            for (long j = 0; j < half; j += 16) {
                __mmask16 mask = first_lanes(half - j);
                __m512 va = load_bf16_tail(a + j, mask), vb = load_bf16_tail(b + j, mask);
                __m512 vc = _mm512_maskz_loadu_ps(mask, c + j), vs = _mm512_maskz_loadu_ps(mask, s + j);
                store_bf16_tail(a + j, _mm512_fnmadd_ps(vb, vs, _mm512_mul_ps(va, vc)), mask);
                store_bf16_tail(b + j, _mm512_fmadd_ps(va, vs, _mm512_mul_ps(vb, vc)), mask);
            }
        }
}

// cache[slots[i]] = x[i], rows of `width` elements
EXPORT void rz_write_rows(bf16 *cache, const int64_t *slots, const bf16 *x, long ldx, long width, long m) {
    for (long i = 0; i < m; i++) memcpy(cache + slots[i] * width, x + i * ldx, width * sizeof(bf16));
}

static inline __m512 silu(__m512 x) { return _mm512_mul_ps(x, sigmoid_of(x)); }

static inline __m512 gelu_tanh(__m512 x) { // x (1 + tanh(u)) / 2 = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
    __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
    __m512 u2 = _mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.59576912f));
    return _mm512_mul_ps(x, sigmoid_of(u2));
}

// y [m, n] = act(gate) * up of x [m, 2 n] = (gate, up); `tanh`: gelu_tanh instead of silu
EXPORT void rz_gate(const bf16 *x, bf16 *y, long m, long n, int tanh) {
    for (long i = 0; i < m; i++)
        for (long j = 0; j < n; j += 16) {
            __mmask16 mask = first_lanes(n - j);
            const bf16 *gate = x + i * 2 * n + j;
            __m512 g = load_bf16_tail(gate, mask), up = load_bf16_tail(gate + n, mask);
            store_bf16_tail(y + i * n + j, _mm512_mul_ps(tanh ? gelu_tanh(g) : silu(g), up), mask);
        }
}
