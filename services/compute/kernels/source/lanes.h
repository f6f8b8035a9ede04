// Divides a step's attention into tasks, tiles and lanes. A lane is one query head of one row; a tile holds lanes of one
// sequence that read the same keys.
#pragma once

#include "common.h"

#define LANES 32
#define MAX_HEAD_DIM 256

typedef struct {
    const void *q; // [rows, ldq]
    long ldq;
    void *out; // [rows, ldo]
    long ldo;
    const void *cache; // [slots, 2 * n_kv * head_dim], K then V
    long n_kv, group, head_dim, block_tokens;
    float scale, softcap; // 0: no cap
    long window;          // 0: all keys
    long size;            // bytes of a number in q, out and cache
} layer;

typedef struct {
    long n;
    long row[LANES], head[LANES];
    int32_t limit[LANES], low[LANES]; // a lane sees keys [low, limit)
    long first, last;                 // the smallest range of keys that contains all of these
} tile_lanes;

typedef struct keys_of_sequence {
    const int64_t *blocks; // the sequence's block table
    long n_blocks, kv_head;
    long first, last;                    // keys [first, last) are read
    const struct keys_of_sequence *next; // keys that this thread reads next; null: unknown
} keys_of_sequence;

typedef void tile_attention(const layer *a, const tile_lanes *l, const keys_of_sequence *s);

typedef struct {
    layer a;
    const int64_t *starts, *lengths, *blocks;
    long n_blocks, tables, sequences; // tables: those of a sequence, 1 or one for each KV head
    tile_attention *attend_tile;
    long parts; // tasks of a head of a prompt
    long n_single_head_tasks, heads_per_task; // single-head tasks come first, the others have heads_per_task heads
} attention;

#define MAX_KEYS 32 // most keys that are looked up at once

typedef struct {
    long at[MAX_KEYS]; // indices in the cache; a key's value is n_kv * head_dim further on
    long n;
} found_keys;

// Finds up to `keys` keys from `key` on and before `last`; keys beyond the sequence's blocks are in the null block. It divides
// once, because on some CPUs a division takes as long as a key's products.
static inline void find_keys(const layer *a, const keys_of_sequence *s, long key, long last, long keys, found_keys *f) {
    long block = (uint32_t)key / (uint32_t)a->block_tokens, place = key - block * a->block_tokens;
    f->n = last - key < keys ? last - key : keys;
    for (long i = 0; i < f->n; block++, place = 0) {
        long slot = (block < s->n_blocks ? s->blocks[block] : 0) * a->block_tokens + place;
        long at = (slot * 2 * a->n_kv + s->kv_head) * a->head_dim;
        for (; place < a->block_tokens && i < f->n; place++, at += 2 * a->n_kv * a->head_dim) f->at[i++] = at;
    }
}

// Finds the block of keys after the block at `key`; after the sequence's last block it is the first block of `s->next`, or none.
static inline void find_next(const layer *a, const keys_of_sequence *s, long key, long last, long keys, found_keys *f) {
    key += keys;
    if (key >= last && s->next) {
        s = s->next;
        key = s->first / keys * keys;
        last = s->last;
    }
    f->n = 0;
    if (key < last) find_keys(a, s, key, last, keys, f);
}

// Prefetches part `part` of `parts` of a block of `keys` keys. Keys are scattered, so without a prefetch each block would start
// with a wait for memory. It fetches in parts, because many prefetches at once delay the loads behind them. Inlining is forced,
// because gcc treats a function that only prefetches as one without effect and drops its calls.
INLINE void fetch(const layer *a, const found_keys *f, long keys, long part, long parts) {
    long size = a->head_dim * a->size, end = (part + 1) * keys / parts < f->n ? (part + 1) * keys / parts : f->n;
    for (long i = part * keys / parts; i < end; i++) {
        const char *k = (const char *)a->cache + f->at[i] * a->size;
        for (long at = 0; at < size; at += 64) {
            FETCH(k + at);
            FETCH(k + a->n_kv * size + at);
        }
    }
}

static inline keys_of_sequence keys_of(const attention *w, long index) {
    long i = index / w->a.n_kv, first = w->lengths[i] - (w->starts[i + 1] - w->starts[i]) + 1 - w->a.window;
    const int64_t *blocks = w->blocks + (w->tables > 1 ? index : i) * w->n_blocks;
    return (keys_of_sequence){blocks, w->n_blocks, index % w->a.n_kv, w->a.window && first > 0 ? first : 0, w->lengths[i], 0};
}

static inline void add_lane(const layer *a, tile_lanes *l, long row, long head, long limit) {
    long low = a->window && limit > a->window ? limit - a->window : 0, i = l->n++;
    l->row[i] = row;
    l->head[i] = head;
    l->limit[i] = (int32_t)limit;
    l->low[i] = (int32_t)low;
    if (i == 0 || low < l->first) l->first = low;
    if (i == 0 || limit > l->last) l->last = limit;
}

// Attends for one KV head and one of `parts` parts of a sequence's rows; `next`: the keys that this thread reads next, or null.
static inline void attend_sequence(const attention *w, long index, long part, long parts, const keys_of_sequence *next) {
    const layer *a = &w->a;
    long i = index / a->n_kv, end = w->starts[i + 1], size = (end - w->starts[i] + parts - 1) / parts;
    long heads = a->group < LANES ? a->group : LANES, rows = LANES / heads, from = w->starts[i] + part * size;
    long to = from + size < end ? from + size : end;
    keys_of_sequence s = keys_of(w, index);
    s.next = next;
    for (long row = from; row < to; row += rows)
        for (long head = 0; head < a->group; head += heads) {
            tile_lanes l;
            l.n = 0;
            for (long r = row; r < row + rows && r < to; r++)
                for (long h = head; h < head + heads && h < a->group; h++)
                    add_lane(a, &l, r, s.kv_head * a->group + h, w->lengths[i] - (end - 1 - r));
            w->attend_tile(a, &l, &s);
        }
}

static inline int is_prompt(const attention *w, long index) {
    long i = index / w->a.n_kv;
    return w->starts[i + 1] - w->starts[i] > 1;
}

// The first tasks compute one head of a prompt each, or a part of its rows, the other tasks several heads of other sequences.
static inline void attend_task(const void *context, long task) {
    const attention *w = context;
    if (task < w->n_single_head_tasks) {
        long index = task / w->parts;
        if (is_prompt(w, index)) attend_sequence(w, index, task % w->parts, w->parts, 0);
        return;
    }
    long index = (task - w->n_single_head_tasks) * w->heads_per_task, all = w->sequences * w->a.n_kv;
    long end = index + w->heads_per_task;
    if (end > all) end = all;
    for (; index < end; index++) {
        keys_of_sequence next;
        int more = index + 1 < end && !is_prompt(w, index + 1);
        if (more) next = keys_of(w, index + 1);
        if (!is_prompt(w, index)) attend_sequence(w, index, 0, 1, more ? &next : 0);
    }
}

#define TASKS 16       // per thread
#define PROMPT_TASKS 2 // per thread, at least: of prompts

// Only the first keys of a task wait for memory, the others are prefetched. So a task has several heads when there are enough
// of them. A head of a prompt is enough work for a task; where there are few of them, its rows are divided.
static inline void share_attention(attention w) {
    long all = w.sequences * w.a.n_kv, tasks = TASKS * pool_threads(), heads = 0;
    for (long i = 0; i < all; i += w.a.n_kv) heads += is_prompt(&w, i) * w.a.n_kv;
    long wanted = pool_threads() == 1 ? 1 : PROMPT_TASKS * pool_threads();
    w.parts = heads ? (wanted + heads - 1) / heads : 1;
    w.n_single_head_tasks = heads ? all * w.parts : 0;
    w.heads_per_task = pool_threads() == 1 ? all : (all + tasks - 1) / tasks;
    share(attend_task, &w, w.n_single_head_tasks + (all + w.heads_per_task - 1) / w.heads_per_task);
}
