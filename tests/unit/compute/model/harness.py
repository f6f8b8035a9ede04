"""Drives a decoder by hand: block tables, chunks and steps, without scheduler or runner."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from services.compute.backends.batch import AdapterNumbers, AdapterRows, StepBatch
from services.compute.backends.collectives import Communicator, SingleRank
from services.compute.backends.cpu.collectives import ReplayedLoneRank
from services.compute.backends.states import StateRows
from services.compute.backends.torch.backend import TorchBackend
from services.compute.model.build import build_decoder
from services.compute.model.decoder import Decoder
from services.compute.model.families.config import Config
from services.compute.model.families.fused import stacked_refs
from services.compute.model.families.naming import classifier_refs
from services.compute.model.formats.safetensors import TensorFiles
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.loading.checkpoint import Checkpoint
from services.compute.model.registry import interpret
from services.compute.model.spec import ModelSpec
from services.compute.ranks.line import RankLine
from services.compute.ranks.segment import Segment

CPU = torch.device("cpu")
_SLOTS = 64  # rows of states


def lone_rank() -> ReplayedLoneRank:
    """The group of one, with a line of its own to show that it lives."""
    return ReplayedLoneRank(RankLine(Segment.create("test", 4096), 0, 0))


def load_changed(folder: Path, change: Callable[[ModelSpec], ModelSpec]) -> Decoder:
    """Load a checkpoint in float32 as if its spec were another one. Raises ModelError if the tensors do not fit it."""
    family, spec = interpret(Config.load(folder))
    changed = change(spec)
    refs = family.refs(changed)
    if changed.classifier is not None:
        refs |= classifier_refs(changed, changed.classifier)
    with torch.inference_mode(), closing(TensorFiles(folder, family.prefixes)) as files:
        stored = stacked_refs(changed, family.stacked)
        source = Checkpoint(files, refs, family.ignored, family.optional_prefix, stored)
        load = LinearLoader(source, SingleRank(), TorchBackend(torch.float32, CPU))
        return build_decoder(changed, load, changed.max_positions)


T = TypeVar("T")


@dataclass
class DecoderRequest:
    """One request's tokens and blocks."""

    ids: list[int]
    table: list[int]
    computed: int = 0
    slot: int = 0


@dataclass
class CachedDecoder:
    """A decoder with a cache whose blocks are handed out in a scrambled order, and never reused."""

    model: Decoder
    comm: Communicator = field(default_factory=SingleRank)
    block_tokens: int = 8
    n_blocks: int = 400

    def __post_init__(self) -> None:
        self.cache = self.model.make_cache(self.n_blocks, self.block_tokens, _SLOTS)
        self._slots = itertools.cycle(range(_SLOTS))
        self._device = self.cache.layers[0].device if self.cache.layers else CPU  # bidirectional models cache nothing
        order = torch.randperm(self.n_blocks, generator=torch.Generator().manual_seed(1)) + 1
        self._free = order.tolist()

    def admit(self, ids: Sequence[int]) -> DecoderRequest:
        n = -(-len(ids) // self.block_tokens)
        table, self._free = self._free[:n], self._free[n:]
        return DecoderRequest(list(ids), table, slot=next(self._slots))

    def step(self, work: Sequence[tuple[DecoderRequest, int]]) -> list[torch.Tensor]:
        """Compute the next `n` tokens of each sequence; returns their hidden states in the given order."""
        order = sorted(range(len(work)), key=lambda i: work[i][1] > 1)
        batch = self.batch([work[i] for i in order])
        hidden = self.model.forward(batch, self.cache)
        results: list[torch.Tensor] = [hidden] * len(work)
        for place, i in enumerate(order):
            results[i] = hidden[batch.query_starts[place] : batch.query_starts[place + 1]].clone()
            work[i][0].computed += work[i][1]
        return results

    def last_rows(self, work: Sequence[tuple[DecoderRequest, int]], wanted: Sequence[int]) -> torch.Tensor:
        """The same, in batch order; the last rows of the sequences `wanted` alone: [len(wanted), hidden_size]."""
        batch = self.batch(work)
        hidden = self.model.forward(batch, self.cache, [batch.query_starts[place + 1] - 1 for place in wanted])
        for request, n in work:
            request.computed += n
        return hidden.clone()

    def batch(self, work: Sequence[tuple[DecoderRequest, int]]) -> StepBatch:
        size = self.block_tokens
        ids, positions, slots, starts, lengths = [], [], [], [0], []
        for seq, n in work:
            for p in range(seq.computed, seq.computed + n):
                ids.append(seq.ids[p])
                positions.append(p)
                slots.append(seq.table[p // size] * size + p % size)
            starts.append(len(ids))
            lengths.append(seq.computed + n)
        width = max(-(-length // size) for length in lengths)
        tables = torch.zeros(len(work), width, dtype=torch.int64)
        for row, ((seq, _), length) in enumerate(zip(work, lengths, strict=True)):
            needed = -(-length // size)
            tables[row, :needed] = torch.tensor(seq.table[:needed])
        return StepBatch(
            token_ids=torch.tensor(ids, device=self._device),
            positions=torch.tensor(positions, device=self._device),
            kv_slots=torch.tensor(slots, device=self._device),
            query_starts=tuple(starts),
            context_lens=tuple(lengths),
            block_tables=tables.to(self._device),
            n_decode=sum(n == 1 for _, n in work),
            segments=self._segments(work) if self.cache.states else (),
        )

    def _segments(self, work: Sequence[tuple[DecoderRequest, int]]) -> tuple[StateRows, ...]:
        ends = list(itertools.accumulate(n for _, n in work))
        return tuple(
            StateRows(end - n, end, request.slot, fresh=request.computed == 0)
            for (request, n), end in zip(work, ends, strict=True)
        )

    def run(self, ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
        """Compute one sequence alone, cut into `chunks` (the last one takes the rest): [n, hidden_size]."""
        seq = self.admit(ids)
        actual = [self.step([(seq, n)])[0] for n in cut(len(ids), chunks)]
        return torch.cat(actual)


def adapter_rows(slots: Sequence[int], device: torch.device = CPU) -> AdapterRows | None:
    """Rows with the adapters in `slots`; -1: none."""
    numbers = AdapterNumbers.of(np.array(slots, np.int64))
    if numbers is None:
        return None
    return numbers.on_device(*(torch.from_numpy(array).to(device) for array in (numbers.slots, numbers.order)))


def cut(length: int, chunks: Sequence[int]) -> list[int]:
    sizes = []
    for chunk in chunks:
        sizes.append(min(chunk, length - sum(sizes)))
    sizes.append(length - sum(sizes))
    return [size for size in sizes if size > 0]


class ThreadRank:
    """One rank of a group of threads. Sums are taken in float32 in rank order."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[torch.Tensor | None]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._board = barrier, board
        self.n_calls = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return x.copy_(total)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x))

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.n_calls += 1
        self._board[self.rank] = x.clone()
        self._barrier.wait(timeout=300)
        parts = [part.clone() for part in self._board if part is not None]
        self._barrier.wait(timeout=300)
        assert len({part.shape for part in parts}) == 1
        return parts


def run_ranks(size: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """Run `work` on `size` ranks at once; returns their results by rank."""
    barrier, board = threading.Barrier(size), [None] * size

    def guarded(rank: int) -> T:
        try:
            return work(ThreadRank(rank, size, barrier, board))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))
