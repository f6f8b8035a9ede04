// All functions that the libraries export; their definitions describe them. signatures.py reads this file for Python's calls and
// for replays. Arguments are pointers, long, int, float, or one of the two counts.
#pragma once

#include <stdint.h>

typedef uint16_t bf16;
typedef struct collectives collectives; // collective.h
typedef struct call call;               // replay.c

// Prefetches the cache line at an address into the first-level (FETCH_NEAR) or the second-level cache (FETCH).
#define FETCH_NEAR(address) __builtin_prefetch(address, 0, 3)
#define FETCH(address) __builtin_prefetch(address, 0, 2)

// Arguments that a replay replaces by the sizes of its step. All other arguments are the same in every step.
typedef long row_count;
typedef long sequence_count;

#define REPLAYED // functions that a model's step can consist of

REPLAYED void rz_linear(const bf16 *x, long ldx, row_count m, long k, const bf16 *packed, const float *bias, long n, void *y,
                        long ldy, int wide, bf16 *spare);
REPLAYED void rz_low_rank(const bf16 *x, long ldx, row_count m, long k, const bf16 *a, const bf16 *b, long most, long n,
                          const int64_t *ranks, const int64_t *slots, bf16 *y, long ldy);
REPLAYED void rz_rms_norm(const bf16 *x, long ldx, const float *weight, long groups, float eps, bf16 *y, long ldy, row_count m,
                          long n);
REPLAYED void rz_add(bf16 *x, const bf16 *added, float scale, row_count m, long n);
REPLAYED void rz_rotate(bf16 *x, long ldx, long heads, long head_dim, const float *cos, const float *sin, long half,
                        const int64_t *positions, row_count m);
REPLAYED void rz_write_rows(bf16 *cache, const int64_t *slots, const bf16 *x, long ldx, long width, row_count m);
REPLAYED void rz_gate(const bf16 *x, bf16 *y, row_count m, long n, int tanh);
REPLAYED void rz_attend(const bf16 *q, long ldq, bf16 *out, long ldo, const bf16 *cache, long n_kv, long group, long head_dim,
                        long block_tokens, float scale, float softcap, long window, const int64_t *starts, const int64_t *lengths,
                        const int64_t *blocks, long n_blocks, long tables, sequence_count sequences);
REPLAYED void rz_write_int8(int8_t *cache, const int64_t *slots, const bf16 *x, long ldx, long heads, long head_dim,
                            long block_tokens, row_count m);
REPLAYED void rz_attend_int8(const bf16 *q, long ldq, bf16 *out, long ldo, const int8_t *cache, long n_kv, long group,
                             long head_dim, long block_tokens, float scale, float softcap, long window, const int64_t *starts,
                             const int64_t *lengths, const int64_t *blocks, long n_blocks, long tables, sequence_count sequences);
REPLAYED void rz_summarize(const void *cache, bf16 *summaries, const int64_t *slots, row_count m, long n_kv, long head_dim,
                           long block_tokens, int coded);
REPLAYED void rz_choose_pages(const bf16 *q, long ldq, const bf16 *summaries, long n_kv, long group, long head_dim,
                              long block_tokens, const int64_t *starts, const int64_t *lengths, const int64_t *pages,
                              const int64_t *blocks, long n_blocks, float *scores, int64_t *chosen, int64_t *chosen_lengths,
                              sequence_count sequences);
void rz_attend_int8_float(const float *q, long ldq, float *out, long ldo, const int8_t *cache, long n_kv, long group,
                          long head_dim, long block_tokens, float scale, float softcap, long window, const int64_t *starts,
                          const int64_t *lengths, const int64_t *blocks, long n_blocks, long tables, long sequences);
REPLAYED void rz_quantize_rows(const bf16 *x, long ldx, row_count m, long n_in, const int32_t *order, long k, long block,
                               int input_bits, void *inputs, long stride);
REPLAYED void rz_quantized_linear(const void *inputs, long stride, row_count m, long k, long block, const void *codes, int bits,
                                  int input_bits, const void *scales, const void *offsets, long common, int half, const float *bias, long n,
                                  void *y, long ldy, int wide);
REPLAYED void rz_convolve(const bf16 *x, long ldx, long n, int gated, const float *taps, const float *bias, long kernel, bf16 *state,
                          const int64_t *rows, sequence_count sequences, long length, bf16 *y);
REPLAYED void rz_state_space(const bf16 *x, long ldx, const bf16 *b, const bf16 *c, long ldb, const bf16 *dt, long ldt,
                             const float *rate, const float *bias, const float *skip, float least, float *states,
                             const int64_t *rows, sequence_count sequences, long length, bf16 *y, long n_heads, long height,
                             long groups, long width);
REPLAYED void rz_delta_rule(const bf16 *x, long ldx, const bf16 *dt, const bf16 *corrected, long ldt, const float *rate,
                            const float *bias, float *states, const int64_t *rows, sequence_count sequences, long length,
                            bf16 *y, long n_heads, long group, long height, long width);
REPLAYED void rz_gated_norm(const bf16 *x, long ldx, const bf16 *z, long ldz, const float *weight, long groups, float eps, int outside,
                            int sigmoid, bf16 *y, row_count m, long n);

// Only in the libraries made from fma/.
void rz_attend_float(const float *q, long ldq, float *out, long ldo, const float *cache, long n_kv, long group, long head_dim,
                     long block_tokens, float scale, float softcap, long window, const int64_t *starts, const int64_t *lengths,
                     const int64_t *blocks, long n_blocks, long tables, long sequences);

void rz_pack_weight(const bf16 *weight, long n, long k, bf16 *packed);
void rz_unpack_rows(const bf16 *packed, long k, const int64_t *rows, bf16 *y, long m);
void rz_pack_codes(const uint8_t *codes, long n, long k, int bits, int input_bits, void *packed);
void rz_look_up(const void *codes, int bits, int input_bits, const void *scales, const void *offsets, long common, int half,
                long k, long block, const int32_t *order, long n_in, const int64_t *rows, bf16 *y, long m);
void rz_scan(float *states, const int64_t *rows, long sequences, long length, const float *inputs, const float *b, const float *c,
             const float *decay, long decays, const float *rate, float *y, long n_heads, long height, long width);
void rz_channel_space(const bf16 *x, long ldx, const bf16 *b, const bf16 *c, long ldb, const bf16 *dt, long ldt,
                      const float *rates, const float *bias, const float *skip, float *states, const int64_t *rows, long sequences,
                      long length, bf16 *y, long n_channels, long width);
void rz_draw(const float *logits, long ld, long m, long n, long first_id, const float *temperature, const uint64_t *seeds,
             const int64_t *positions, int64_t *keys);
void rz_pick(const float *logits, long ld, long m, long n, long first_id, long width, int64_t *keys);
void rz_weigh(const float *logits, long ld, long m, long n, float *mass);

int rz_enable(long threads);
int rz_all_reduce(collectives *c, bf16 *x, long count);
long rz_replay(const call *calls, long n, long first, long rows, long sequences, collectives *group);
