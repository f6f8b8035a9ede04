"""Pages of long contexts in plain torch: summaries of blocks, and the choice of the blocks that a decode reads.

A summary holds the least and the largest number of each dimension of a block's keys (Tang et al., Quest,
arXiv:2406.10774). They tell the largest product of a query with one of the keys to expect: its product with the middle
between both, and the root of the sum of squares of its products with half their distances. In all dimensions at once no
key is at an end, so the sum of these products, a bound, is far larger in heads of many dimensions. A KV head reads the
blocks whose product comes nearest to the largest one of some head of its group, and always the first block and the last
two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends.kv_format import KvFormat
from services.compute.backends.shapes import AttentionShape, KvShape

LAST = 2  # blocks at the end that are always read, as is the first one


def summarise(kv_format: KvFormat, layer: Tensor, shape: KvShape, blocks: Tensor, summaries: Tensor) -> None:
    """Write the summaries [n_blocks, n_kv_heads, 2, head_dim] of `blocks` [n], whose positions are all written."""
    places = blocks.unsqueeze(1) * shape.block_tokens + torch.arange(shape.block_tokens, device=blocks.device)
    rows = kv_format.read(layer, shape, places.flatten(), torch.float32, None)
    keys = rows.view(len(blocks), shape.block_tokens, 2, shape.n_kv_heads, shape.head_dim)[:, :, 0]
    summaries[blocks] = torch.stack((keys.amin(1), keys.amax(1)), dim=2).to(summaries.dtype)


def choose_blocks(q: Tensor, summaries: Tensor, table: Tensor, most: int, shape: AttentionShape) -> Tensor:
    """Return the blocks that each KV head reads of a row's `table` [n]: [n_kv_heads, most], in the table's order.

    `q` [n_heads * head_dim] is the row's; `most` is less than n.
    """
    low, high = summaries[table[1:-LAST]].float().unbind(2)  # [n_candidates, n_kv_heads, head_dim] each
    heads = q.view(1, shape.n_kv_heads, shape.group, shape.head_dim).float()
    at_low, at_high = heads * low.unsqueeze(2), heads * high.unsqueeze(2)
    expected = (at_low + at_high).sum(-1) + (at_high - at_low).square().sum(-1).sqrt()  # twice the product
    scores = (expected - expected.amax(0)).amax(2).T  # [n_kv_heads, n_candidates]
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : most - 1 - LAST] + 1
    ends = torch.tensor([0, *range(len(table) - LAST, len(table))], device=table.device).expand(shape.n_kv_heads, -1)
    return table[torch.cat((best, ends), dim=1).sort(dim=1).values]


def choose_pages(
    q: Tensor,
    summaries: Tensor,
    sequences: tuple[Tensor, Tensor, Tensor],
    pages: Tensor,
    shape: AttentionShape,
    block_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sequences (row starts, lengths, tables) with a table for each KV head: [n, n_kv_heads, max_blocks].

    `pages` [n] limits the blocks of each sequence; 0: all of them. A sequence that chooses has one row of `q`.
    """
    starts, lengths, tables = sequences
    chosen, chosen_lengths = tables.unsqueeze(1).repeat(1, shape.n_kv_heads, 1), lengths.clone()
    for index, most in enumerate(pages.tolist()):
        n = -(-int(lengths[index]) // block_tokens)
        if most and n > most:
            row = q[int(starts[index])]
            chosen[index, :, :most] = choose_blocks(row, summaries, tables[index, :n], most, shape)
            chosen_lengths[index] -= (n - most) * block_tokens
    return starts, chosen_lengths, chosen
