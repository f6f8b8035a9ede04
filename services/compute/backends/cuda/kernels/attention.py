"""Attention over the paged cache in Triton: keys and values are read where they lie, once for a group of heads.

The softmax is computed while keys are read (Milakov & Gimelshein, arXiv:1805.02867). Decodes divide a sequence's keys
into splits of a fixed number (Flash-Decoding), so a row's sums have one order, whatever the batch. Scores are in units
of log2(e), because GPUs have exp2.

A cache is [n_blocks, block_tokens, 2, n_kv_heads, head_dim]: K, then V of a token. Or it holds codes of 8 bits:
[n_blocks, 2 * n_kv_heads, run], where a run is a head's codes [block_tokens, head_dim] and their scales [block_tokens],
bfloat16. Scales are factors of scores and of weights, so codes are multiplied as they are.
"""

import triton
import triton.language as tl
from triton.errors import TritonError as TritonError

_LOG2_E = tl.constexpr(1.4426950408889634)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # by NumPy, which has no bfloat16


@triton.jit
def _attend_keys(
    q,  # [m, n_dims]
    best,  # [m] highest score so far
    mass,  # [m] sum of the weights so far
    acc,  # [m, n_dims] weighted sum of the values so far
    positions,  # [m] of the rows
    slopes,  # [m]
    cache,
    scales,  # scales of codes: the cache's memory, read as bfloat16
    kv_head,
    table,  # the sequence's blocks
    first,  # a multiple of `n_keys`
    last,  # exclusive
    window,
    scale,
    softcap,
    block_tokens: tl.constexpr,
    n_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    n_dims: tl.constexpr,
    n_keys: tl.constexpr,
    has_softcap: tl.constexpr,
    has_slopes: tl.constexpr,
    coded: tl.constexpr,
):
    dims = tl.arange(0, n_dims)
    real = dims < head_dim
    if _INTERPRETED:
        q = q.to(tl.float32)
    for start in range(first, last, n_keys):
        keys = start + tl.arange(0, n_keys)
        present = keys < last
        blocks = tl.load(table + keys // block_tokens, mask=present, other=0).to(tl.int64)
        if coded:
            run: tl.constexpr = block_tokens * (head_dim + 2)
            start_of_run = (blocks * 2 * n_kv_heads + kv_head) * run
            places, to_values = start_of_run + keys % block_tokens * head_dim, n_kv_heads * run
        else:
            places = ((blocks * block_tokens + keys % block_tokens) * 2 * n_kv_heads + kv_head) * head_dim
            to_values = n_kv_heads * head_dim
        k = tl.load(cache + places[None, :] + dims[:, None], mask=present[None, :] & real[:, None], other=0.0)
        v = tl.load(
            cache + to_values + places[:, None] + dims[None, :],
            mask=present[:, None] & real[None, :],
            other=0.0,
        )
        if coded or _INTERPRETED:
            k, v = k.to(q.dtype), v.to(q.dtype)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if coded:
            of_keys = scales + (start_of_run + block_tokens * head_dim) // 2 + keys % block_tokens
            scores *= tl.load(of_keys, mask=present, other=0.0).to(tl.float32)[None, :]
        if has_softcap:
            scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * _LOG2_E / softcap)) + 1))  # softcap * tanh(x / softcap)
        distance = positions[:, None] - keys[None, :]
        if has_slopes:
            scores -= slopes[:, None] * distance
        seen = present[None, :] & (distance >= 0) & (distance < window)
        scores = tl.where(seen, scores * _LOG2_E, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
        weights = tl.exp2(scores - finite[:, None])
        rest = tl.exp2(best - finite)
        mass = mass * rest + tl.sum(weights, 1)
        if coded:
            weights *= tl.load(of_keys + n_kv_heads * run // 2, mask=present, other=0.0).to(tl.float32)[None, :]
        acc = acc * rest[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher
    return best, mass, acc


@triton.jit
def _divided(best, mass, acc, sinks, has_sinks: tl.constexpr):
    """Return `acc` over the sum of the weights, a sink's included."""
    if has_sinks:
        sunk = sinks * _LOG2_E
        top = tl.maximum(best, sunk)
        share = tl.exp2(best - top)
        return acc * (share / (mass * share + tl.exp2(sunk - top)))[:, None]
    return acc / mass[:, None]


@triton.jit(do_not_specialize=["q_stride", "table_stride", "head_stride", "window", "n_splits"])
def decode(
    q,
    out,  # [n, n_heads * head_dim]
    parts,  # [n, n_heads, n_splits, head_dim] float32, if there are several splits
    weights,  # [n, n_heads, n_splits, 2] float32: highest score and sum of the weights
    cache,
    scales,
    tables,
    lengths,
    slopes,  # [n_heads]
    sinks,  # [n_heads] of the layer
    q_stride,
    table_stride,
    head_stride,  # between the tables of a row's KV heads; 0: they share a table
    window,
    n_splits,
    scale,
    softcap,
    block_tokens: tl.constexpr,
    n_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    n_dims: tl.constexpr,
    n_members: tl.constexpr,
    n_keys: tl.constexpr,
    split_keys: tl.constexpr,
    direct: tl.constexpr,
    has_softcap: tl.constexpr,
    has_slopes: tl.constexpr,
    has_sinks: tl.constexpr,
    coded: tl.constexpr,
):
    """Attend with one row per sequence; a program computes one split for one KV head's group."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    oldest = tl.maximum(length - window, 0)
    start = (oldest // split_keys + split) * split_keys
    if start >= length:
        return
    members, dims = tl.arange(0, n_members), tl.arange(0, n_dims)
    heads = kv_head * group + members
    ours, real = members < group, dims < head_dim
    inside = ours[:, None] & real[None, :]
    places = heads[:, None] * head_dim + dims[None, :]
    best, mass, acc = _attend_keys(
        tl.load(q + row * q_stride + places, mask=inside, other=0.0),
        tl.full([n_members], float("-inf"), tl.float32),
        tl.zeros([n_members], tl.float32),
        tl.zeros([n_members, n_dims], tl.float32),
        tl.full([n_members], 0, tl.int32) + (length - 1),
        tl.load(slopes + heads, mask=ours, other=0.0) if has_slopes else tl.zeros([n_members], tl.float32),
        cache,
        scales,
        kv_head,
        tables + row * table_stride + kv_head * head_stride,
        tl.maximum(start, oldest // n_keys * n_keys),
        tl.minimum(start + split_keys, length),
        window,
        scale,
        softcap,
        block_tokens,
        n_kv_heads,
        head_dim,
        n_dims,
        n_keys,
        has_softcap,
        has_slopes,
        coded,
    )
    n_heads: tl.constexpr = n_kv_heads * group
    if direct:
        sunk = tl.load(sinks + heads, mask=ours, other=0.0) if has_sinks else mass
        result = _divided(best, mass, acc, sunk, has_sinks)
        tl.store(out + row * (n_heads * head_dim) + places, result.to(out.dtype.element_ty), mask=inside)
    else:
        slots = (row * n_heads + heads) * n_splits + split
        tl.store(parts + slots[:, None] * head_dim + dims[None, :], acc, mask=inside)
        tl.store(weights + slots * 2, best, mask=ours)
        tl.store(weights + slots * 2 + 1, mass, mask=ours)


@triton.jit(do_not_specialize=["window", "n_splits"])
def merge(
    out,  # [n, n_heads * head_dim]
    parts,
    weights,
    lengths,
    sinks,
    window,
    n_splits,
    n_heads: tl.constexpr,
    head_dim: tl.constexpr,
    n_dims: tl.constexpr,
    n_merged: tl.constexpr,
    split_keys: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Add up the splits of `decode`; a program has one row's head, and adds `n_merged` splits at a time."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + row).to(tl.int32)
    if length == 0:
        return
    n_used = tl.cdiv(length, split_keys) - tl.maximum(length - window, 0) // split_keys
    base = (row * n_heads + head) * n_splits
    dims = tl.arange(0, n_dims)
    real = dims < head_dim
    best = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, n_dims], tl.float32)
    for first in range(0, n_used, n_merged):
        splits = first + tl.arange(0, n_merged)
        used = splits < n_used
        tops = tl.load(weights + (base + splits) * 2, mask=used, other=float("-inf"))
        masses = tl.load(weights + (base + splits) * 2 + 1, mask=used, other=0.0)
        values = tl.load(
            parts + (base + splits)[:, None] * head_dim + dims[None, :], mask=used[:, None] & real[None, :], other=0.0
        )
        higher = tl.maximum(best, tl.max(tops, 0))
        shares, rest = tl.exp2(tops - higher), tl.exp2(best - higher)
        mass = mass * rest + tl.sum(masses * shares, 0)
        acc = acc * rest[:, None] + tl.sum(values * shares[:, None], 0)[None, :]
        best = higher
    sunk = tl.load(sinks + head + tl.zeros([1], tl.int32)) if has_sinks else mass
    result = _divided(best, mass, acc, sunk, has_sinks)
    places = (row * n_heads + head) * head_dim + dims[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=real[None, :])


@triton.jit(do_not_specialize=["q_stride", "table_stride", "window"])
def prefill(
    q,
    out,  # [n, n_heads * head_dim]
    cache,
    scales,
    tables,
    tiles,  # [n_tiles, 4] int32: sequence, first row, number of rows, position of the first row
    slopes,
    sinks,
    q_stride,
    table_stride,
    window,
    scale,
    softcap,
    block_tokens: tl.constexpr,
    n_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    n_dims: tl.constexpr,
    n_members: tl.constexpr,
    tile_rows: tl.constexpr,
    n_keys: tl.constexpr,
    has_softcap: tl.constexpr,
    has_slopes: tl.constexpr,
    has_sinks: tl.constexpr,
    coded: tl.constexpr,
):
    """Attend with several rows of a sequence; a program computes a tile of rows for one KV head's group."""
    tile, kv_head = tl.program_id(0) * 4, tl.program_id(1)
    sequence, first_row = tl.load(tiles + tile).to(tl.int64), tl.load(tiles + tile + 1)
    n_rows, position = tl.load(tiles + tile + 2), tl.load(tiles + tile + 3)
    if n_rows == 0:
        return
    lanes, dims = tl.arange(0, tile_rows * n_members), tl.arange(0, n_dims)
    rows, members = lanes // n_members, lanes % n_members
    heads = kv_head * group + members
    ours, real = (rows < n_rows) & (members < group), dims < head_dim
    inside = ours[:, None] & real[None, :]
    numbers = (first_row + rows).to(tl.int64)[:, None]
    places = heads[:, None] * head_dim + dims[None, :]
    best, mass, acc = _attend_keys(
        tl.load(q + numbers * q_stride + places, mask=inside, other=0.0),
        tl.full([tile_rows * n_members], float("-inf"), tl.float32),
        tl.zeros([tile_rows * n_members], tl.float32),
        tl.zeros([tile_rows * n_members, n_dims], tl.float32),
        position + rows,
        tl.load(slopes + heads, mask=ours, other=0.0) if has_slopes else tl.zeros([tile_rows * n_members], tl.float32),
        cache,
        scales,
        kv_head,
        tables + sequence * table_stride,
        tl.maximum(position - window + 1, 0) // n_keys * n_keys,
        position + n_rows,
        window,
        scale,
        softcap,
        block_tokens,
        n_kv_heads,
        head_dim,
        n_dims,
        n_keys,
        has_softcap,
        has_slopes,
        coded,
    )
    sunk = tl.load(sinks + heads, mask=ours, other=0.0) if has_sinks else mass
    result = _divided(best, mass, acc, sunk, has_sinks)
    stride: tl.constexpr = n_kv_heads * group * head_dim
    tl.store(out + numbers * stride + places, result.to(out.dtype.element_ty), mask=inside)
