// How attention divides a step's rows. A lane is one query head of one row; a tile holds lanes of one sequence that read the
// same keys.
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
    long n_kv, group, head_dim, block_size;
    float scale, softcap; // 0: no cap
    long window;          // 0: all keys
    long size;            // bytes of a number in all of them
} layer;

typedef struct {
    long n;
    long row[LANES], head[LANES];
    int32_t limit[LANES], low[LANES]; // keys [low, limit) are seen
    long first, last;                 // what all of them see lies in [first, last)
} tile_lanes;

typedef struct keys_of_sequence {
    const int64_t *blocks; // of the sequence
    long n_blocks, kv_head;
    long first, last;                    // keys [first, last) are read
    const struct keys_of_sequence *next; // by this thread after these; null: not known
} keys_of_sequence;

typedef void tile_attention(const layer *a, const tile_lanes *l, const keys_of_sequence *s);

typedef struct {
    layer a;
    const int64_t *starts, *lengths, *blocks;
    long n_blocks, sequences;
    tile_attention *attend_tile;
    long n_single_head_tasks, heads_per_task; // of the tasks before, and of those after: set by share_attention
} attention;

#define MAX_KEYS 32 // that are looked up at once

typedef struct {
    long at[MAX_KEYS]; // indices in the cache; a key's value is n_kv * head_dim further on
    long n;
} found_keys;

// `keys` keys from `key` on, or as many as come before `last`; beyond the sequence's blocks, in the null block. One division
// for all of them: some processors take as long for it as for a key's products.
static inline void find_keys(const layer *a, const keys_of_sequence *s, long key, long last, long keys, found_keys *f) {
    long block = (uint32_t)key / (uint32_t)a->block_size, place = key - block * a->block_size;
    f->n = last - key < keys ? last - key : keys;
    for (long i = 0; i < f->n; block++, place = 0) {
        long slot = (block < s->n_blocks ? s->blocks[block] : 0) * a->block_size + place;
        long at = (slot * 2 * a->n_kv + s->kv_head) * a->head_dim;
        for (; place < a->block_size && i < f->n; place++, at += 2 * a->n_kv * a->head_dim) f->at[i++] = at;
    }
}

// The block of keys that is read after the one at `key`; after the last one, which is before `last`, the first of what comes
// next, or none.
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

// Keys lie scattered: unless they are fetched ahead, a block of them waits for memory before it can begin. Of `keys` keys, a
// part of `parts`: only so many lines can be under way, more at once hold up what follows. Inlined by force: gcc takes a
// function that only fetches for one without effect, and leaves the call out.
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
    const int64_t *blocks = w->blocks + i * w->n_blocks;
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

// One sequence and one KV head; `next`: of what this thread takes after it, or null.
static inline void attend_sequence(const attention *w, long index, const keys_of_sequence *next) {
    const layer *a = &w->a;
    long i = index / a->n_kv, end = w->starts[i + 1];
    long heads = a->group < LANES ? a->group : LANES, rows = LANES / heads;
    keys_of_sequence s = keys_of(w, index);
    s.next = next;
    for (long row = w->starts[i]; row < end; row += rows)
        for (long head = 0; head < a->group; head += heads) {
            tile_lanes l;
            l.n = 0;
            for (long r = row; r < row + rows && r < end; r++)
                for (long h = head; h < head + heads && h < a->group; h++)
                    add_lane(a, &l, r, s.kv_head * a->group + h, w->lengths[i] - (end - 1 - r));
            w->attend_tile(a, &l, &s);
        }
}

static inline int is_prompt(const attention *w, long index) {
    long i = index / w->a.n_kv;
    return w->starts[i + 1] - w->starts[i] > 1;
}

// Prompts' heads first, a task each; then those of other sequences, several in a task.
static inline void attend_task(const void *context, long task) {
    const attention *w = context;
    if (task < w->n_single_head_tasks) {
        if (is_prompt(w, task)) attend_sequence(w, task, 0);
        return;
    }
    long index = (task - w->n_single_head_tasks) * w->heads_per_task, all = w->sequences * w->a.n_kv;
    long end = index + w->heads_per_task;
    if (end > all) end = all;
    for (; index < end; index++) {
        keys_of_sequence next;
        int more = index + 1 < end && !is_prompt(w, index + 1);
        if (more) next = keys_of(w, index + 1);
        if (!is_prompt(w, index)) attend_sequence(w, index, more ? &next : 0);
    }
}

#define TASKS 16 // for each thread

// The first keys of a task wait for memory, all others are fetched ahead: so a task is several heads where there are
// enough of them. A prompt's heads are too much work for that.
static inline void share_attention(attention w) {
    long all = w.sequences * w.a.n_kv, tasks = TASKS * pool_threads();
    w.n_single_head_tasks = w.starts[w.sequences] > w.sequences ? all : 0;
    w.heads_per_task = pool_threads() == 1 ? all : (all + tasks - 1) / tasks;
    share(attend_task, &w, w.n_single_head_tasks + (all + w.heads_per_task - 1) / w.heads_per_task);
}
