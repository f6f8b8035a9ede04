// Vector maths for registers of any width; each header includes it between its arithmetic and its 2^x.
#pragma once

INLINE vec exp2_of(vec x);

// 2^x for x in [-0.5, 0.5]: minimax, relative error 2e-7.
INLINE vec exp2_of_fraction(vec x) {
    vec p = spread(1.5403530e-4f);
    p = fma_of(p, x, spread(1.3333558e-3f));
    p = fma_of(p, x, spread(9.6181291e-3f));
    p = fma_of(p, x, spread(5.5504109e-2f));
    p = fma_of(p, x, spread(2.4022651e-1f));
    p = fma_of(p, x, spread(6.9314718e-1f));
    return fma_of(p, x, spread(1.0f));
}

// 1 / (1 + e^-x)
INLINE vec sigmoid_of(vec x) { return spread(1.0f) / (spread(1.0f) + exp2_of(x * spread(-1.44269504f))); }

INLINE vec tanh_of(vec x) { return fma_of(spread(2.0f), sigmoid_of(x + x), spread(-1.0f)); } // 2 sigmoid(2x) - 1
