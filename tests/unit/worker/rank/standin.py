"""A decoder of a few lines that depends on every position, block and rank: the sum over a sequence's tokens.

As the model "misbehave" it misbehaves on chosen tokens, for the tests of failure detection.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.compute.backends.base import ModelBackend
from services.compute.backends.batch import StepBatch
from services.compute.backends.collectives import Communicator
from services.compute.backends.decodes import Decodes, NoDecodes, Tokens
from services.compute.backends.torch.logit_shard import TorchLogitShard
from services.compute.model.footprint import Footprint
from services.compute.model.loading.folder import KnownFiles
from services.compute.ranks.config import RankGroupConfig
from services.compute.ranks.memory import MemoryAccount
from services.worker.protocol.event_codec import ModelFacts
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.rank.awake import LoadedModel, refuse_adapter
from tests.unit.worker.ipc.dying import end_main_thread

VOCAB, HIDDEN = 96, 16
DIE_SLOWLY, RAISE, HANG, SPIN, SKIP_COLLECTIVE, KILL_SELF, COMPUTE, EAT = range(88, 96)  # misbehave on these tokens
SLOW_ADAPTER, SLOW_S = "/slow", 1.5  # its files come slowly
HEAP_TOLD = "frozen objects, collections: "
MISBEHAVING_RANK = 1
_EATEN_MIB = 2048


@dataclass
class StandinCache:
    rows: torch.Tensor  # [(n_blocks + 1) * block_tokens, HIDDEN]
    block_tokens: int
    states: None = None

    @property
    def layers(self) -> list[torch.Tensor]:
        return [self.rows.view(-1, self.block_tokens, HIDDEN)]


class StandinDecoder:
    def __init__(
        self, comm: Communicator, seed: int = 0, misbehave: bool = False, *, exact_chunks: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._comm, self._misbehave = comm, misbehave
        self.exact_chunks = exact_chunks
        self.last: StepBatch | None = None
        self.vocab_local = VOCAB // comm.size
        self.vocab_start = comm.rank * self.vocab_local
        self.logit_shard = TorchLogitShard(self.vocab_start, self.vocab_local, torch.device("cpu"))
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self._head = torch.randn(VOCAB, HIDDEN, generator=generator)[self.vocab_start :][: self.vocab_local]

    def forward(self, batch: StepBatch, cache: StandinCache, rows: Sequence[int] | None = None) -> torch.Tensor:
        if self._misbehave and self._comm.rank == min(MISBEHAVING_RANK, self._comm.size - 1):
            for token in _DAMAGE.keys() & set(batch.token_ids.tolist()):
                _DAMAGE[token](self._comm)
        self.last = batch
        x = self.embedding[batch.token_ids]
        cache.rows[batch.kv_slots] = x * (1 + batch.positions.unsqueeze(-1) / 7)
        out = torch.empty_like(x)
        for i, length in enumerate(batch.context_lens):
            first, last = batch.query_starts[i], batch.query_starts[i + 1]
            where = torch.arange(length)
            size = cache.block_tokens
            slots = batch.block_tables[i][where // size] * size + where % size
            sums = cache.rows[slots].double().cumsum(dim=0)[length - (last - first) :]
            out[first:last] = sums.float()
        # Each rank adds its share of the columns, as a row-parallel linear does.
        columns = torch.arange(HIDDEN) % self._comm.size == self._comm.rank
        hidden = self._comm.all_reduce((out * columns).contiguous())
        return hidden if rows is None else hidden[list(rows)]

    def replay_decodes(self, cache: StandinCache, tokens: Tokens | None) -> Decodes:
        return NoDecodes()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.double() @ self._head.double().T).float()


def _raise() -> None:
    raise RuntimeError(
        f"the stand-in was told to raise; {HEAP_TOLD}{gc.get_freeze_count()} {gc.get_stats()[0]['collections']}"
    )


def _compute() -> None:
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        torch.ones(200, 200) @ torch.ones(200, 200)


def _spin() -> None:
    while True:
        pass


def _eat() -> None:
    hoard = []
    while len(hoard) < _EATEN_MIB // 16:  # a limit that does not hold must not take the machine down
        hoard.append(bytearray(b"\1") * (16 << 20))  # every page is written


_DAMAGE: dict[int, Callable[[Communicator], object]] = {
    DIE_SLOWLY: lambda _: end_main_thread(),
    RAISE: lambda _: _raise(),
    HANG: lambda _: time.sleep(1000),
    SPIN: lambda _: _spin(),
    SKIP_COLLECTIVE: lambda comm: comm.all_gather(torch.zeros(3)),
    KILL_SELF: lambda _: os.kill(os.getpid(), signal.SIGKILL),
    COMPUTE: lambda _: _compute(),
    EAT: lambda _: _eat(),
}


def standin_cache(n_blocks: int, block_tokens: int) -> StandinCache:
    return StandinCache(torch.full(((n_blocks + 1) * block_tokens, HIDDEN), torch.nan), block_tokens)


def _load_adapter(order: AdapterOrder) -> None:
    if order.folder != SLOW_ADAPTER:
        refuse_adapter(order)
    time.sleep(SLOW_S)


def load(
    config: RankGroupConfig, comm: Communicator, backend: ModelBackend, known: KnownFiles | None = None
) -> LoadedModel:
    return LoadedModel(
        StandinDecoder(comm, misbehave=config.model_path == "misbehave"),
        ModelFacts(VOCAB, HIDDEN),
        HIDDEN * 4,
        lambda n_blocks: standin_cache(n_blocks, config.block_tokens),
        Footprint(1, MemoryAccount(), kv_token=HIDDEN * 4, kv_format="float32"),
        load_adapter=_load_adapter,
    )
