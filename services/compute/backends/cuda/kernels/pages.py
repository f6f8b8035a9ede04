"""Pages of long contexts in Triton: summaries of blocks, and the largest product to expect of a decode with a key.

A summary is [n_kv_heads, 2, head_dim]: the least and the largest number of each dimension of a block's keys.
"""

import triton
import triton.language as tl
from triton.errors import TritonError as TritonError

from services.compute.backends.cuda.kernels.kv_codes import _spread


@triton.jit
def summarise(
    cache,
    scales,  # scales of codes: the cache's memory, read as bfloat16
    slots,  # [n] int64
    summaries,
    factor,  # factor of a key before it is spread
    n_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    n_dims: tl.constexpr,
    n_levels: tl.constexpr,
    block_tokens: tl.constexpr,
    coded: tl.constexpr,
):
    """Write a KV head's summary of a block if a row has the last position of the block."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot % block_tokens != block_tokens - 1:
        return
    block, dims = slot // block_tokens, tl.arange(0, n_dims)
    real = dims < head_dim
    low = tl.full([n_dims], float("inf"), tl.float32)
    high = tl.full([n_dims], float("-inf"), tl.float32)
    for place in range(block_tokens):
        if coded:
            run = (block * 2 * n_kv_heads + head) * (block_tokens * (head_dim + 2))
            scale = tl.load(scales + (run + block_tokens * head_dim) // 2 + place).to(tl.float32)
            codes = tl.load(cache + run + place * head_dim + dims, mask=real, other=0.0).to(tl.float32)
            key = _spread(codes * scale, factor, n_dims, n_levels)
        else:
            start = ((block * block_tokens + place) * 2 * n_kv_heads + head) * head_dim
            key = tl.load(cache + start + dims, mask=real, other=0.0).to(tl.float32)
        low, high = tl.minimum(low, key), tl.maximum(high, key)
    to = summaries + (block * n_kv_heads + head) * 2 * head_dim + dims
    tl.store(to, low.to(summaries.dtype.element_ty), mask=real)
    tl.store(to + head_dim, high.to(summaries.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["q_stride", "table_stride", "n_blocks"])
def expect(
    q,
    summaries,
    tables,
    lengths,
    pages,  # [n] most blocks that each KV head reads; 0: all
    expected,  # [n, n_heads, n_blocks] float32
    q_stride,
    table_stride,
    n_blocks,
    block_tokens: tl.constexpr,
    n_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    n_dims: tl.constexpr,
    n_pages: tl.constexpr,
):
    """Write twice the largest product to expect of a head with a key of `n_pages` blocks, for rows that choose."""
    row, kv_head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    n, most = tl.cdiv(tl.load(lengths + row), block_tokens), tl.load(pages + row)
    if most == 0 or n <= most:
        return
    places = tile * n_pages + tl.arange(0, n_pages)
    present, dims = places < n, tl.arange(0, n_dims)
    blocks = tl.load(tables + row * table_stride + places, mask=present, other=0).to(tl.int64)
    real = present[:, None] & (dims < head_dim)[None, :]
    least = summaries + ((blocks * n_kv_heads + kv_head) * 2 * head_dim)[:, None] + dims[None, :]
    low = tl.load(least, mask=real, other=0.0).to(tl.float32)
    high = tl.load(least + head_dim, mask=real, other=0.0).to(tl.float32)
    for member in range(group):
        head = kv_head * group + member
        query = tl.load(q + row * q_stride + head * head_dim + dims, mask=dims < head_dim, other=0.0).to(tl.float32)
        at_low, at_high = query[None, :] * low, query[None, :] * high
        spans = tl.sum((at_high - at_low) * (at_high - at_low), 1)
        products = tl.sum(at_low + at_high, 1) + tl.sqrt_rn(spans)
        tl.store(expected + (row * n_kv_heads * group + head) * n_blocks + places, products, mask=present)
