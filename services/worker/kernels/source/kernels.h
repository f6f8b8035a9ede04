// The kernels that a step of a model is made of, in all libraries alike; what they do stands where they are defined.
#pragma once

#include <stdint.h>

typedef uint16_t bf16;

void rz_linear(const bf16 *x, long ldx, long m, long k, const bf16 *packed, const float *bias, long n, void *y, long ldy,
               int wide, bf16 *spare);
void rz_rms_norm(const bf16 *x, long ldx, const float *weight, long groups, float eps, bf16 *y, long ldy, long m, long n);
void rz_add(bf16 *x, const bf16 *added, float scale, long count);
void rz_rotate(bf16 *x, long ldx, long heads, long head_dim, const float *cos, const float *sin, long half,
               const int64_t *positions, long m);
void rz_write_rows(bf16 *cache, const int64_t *slots, const bf16 *x, long ldx, long width, long m);
void rz_gate(const bf16 *x, bf16 *y, long m, long n, int tanh);
void rz_attend(const bf16 *q, long ldq, bf16 *out, long ldo, const bf16 *cache, long n_kv, long group, long head_dim,
               long block_size, float scale, float softcap, long window, const int64_t *starts, const int64_t *lengths,
               const int64_t *blocks, long n_blocks, long sequences);
