"""The keys that a layer reaches in a step: all of them, or those of a chunk of positions (Llama 4)."""

from __future__ import annotations

from dataclasses import replace

import torch

from services.compute.backends.batch import StepBatch, long_tensor
from services.compute.model.spec import Reach


def reached(reach: Reach, batch: StepBatch, block_tokens: int) -> StepBatch:
    """Return the step as layers of `reach` see it; only those that reach all keys are narrowed."""
    if reach.window is None and reach.chunk is None:
        return batch.narrow()
    return split_at(reach.chunk, batch, block_tokens)


def split_at(chunk: int | None, batch: StepBatch, block_tokens: int) -> StepBatch:
    """Return the step as sequences that begin at the start of a chunk of positions, a sequence for each chunk.

    So every attention computes it. `chunk` is a multiple of `block_tokens`; None: attention has no chunks.
    """
    if chunk is None or max(batch.context_lens) <= chunk:
        return batch
    starts, lengths, tables, firsts = [0], list[int](), list[torch.Tensor](), list[int]()
    for index, length in enumerate(batch.context_lens):
        row, end = batch.query_starts[index], batch.query_starts[index + 1]
        position = length - (end - row)
        while row < end:
            first = position // chunk * chunk
            n_rows = min(first + chunk - position, end - row)
            row, position = row + n_rows, position + n_rows
            starts.append(row)
            lengths.append(position - first)
            firsts.extend([first] * n_rows)
            block = first // block_tokens
            tables.append(batch.block_tables[index, block : block + chunk // block_tokens])
    padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
    return replace(
        batch,
        positions=batch.positions - long_tensor(firsts).to(batch.positions.device),
        query_starts=tuple(starts),
        context_lens=tuple(lengths),
        lengths=None,
        block_tables=padded,
    )
