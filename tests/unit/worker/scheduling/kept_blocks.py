"""Places below the pool without an event loop: copies and loads that take time, over the books of a real store."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.worker.engine.kv_events import KvEventLog
from services.worker.engine.state import PlaceTotals
from services.worker.kv_transfer.host_store import HostStore
from services.worker.scheduling.places import BlockName
from services.worker.scheduling.request import Request
from services.worker.scheduling.transfers import Arrival

if TYPE_CHECKING:
    from tests.unit.worker.scheduling.harness import Harness

_BYTES = 8  # in the books; contents are the fake ranks' states


class KeptBlocks:
    """A `Places` whose copies and loads go on when `work` is called."""

    def __init__(self, n_blocks: int, events: KvEventLog, rng: random.Random) -> None:
        self.store = HostStore(_BYTES, n_blocks * _BYTES, events, PlaceTotals())
        self.random, self.n_loaded = rng, 0
        self.harness: Harness | None = None
        self.contents: dict[bytes, list[int]] = {}
        self.pending: dict[bytes, BlockName] = {}
        self.copying: tuple[BlockName, list[int]] | None = None
        self.loads: list[tuple[Request, Arrival]] = []

    def published(self, block: BlockName) -> None:
        self.pending[block.digest] = block

    def evicted(self, digest: bytes) -> None:
        self.pending.pop(digest, None)
        if self.copying is not None and self.copying[0].digest == digest:
            self.store.complete_store(self.copying[0], stored=False)
            self.copying = None

    def cleared(self) -> None:
        for digest in list(self.pending):
            self.evicted(digest)

    def load(self, request: Request, digests: Sequence[bytes], first: int, worth_tokens: int) -> bool:
        assert self.harness is not None
        size = self.harness.config.block_tokens
        n = self.store.lookup(digests[first:])
        if n == 0 or n * size < worth_tokens:
            return False
        arrival = self.harness.scheduler.transfers.expect(request, (first + n) * size)
        if arrival is None:
            return False
        self.loads.append((request, arrival))
        return True

    def work(self) -> None:
        """A copy begins or ends, or some blocks of a load arrive."""
        assert self.harness is not None
        if self.loads and self.random.random() < 0.5:
            self._load()
        elif self.copying is not None:
            name, content = self.copying
            self.contents[name.digest] = content
            self.store.complete_store(name, stored=True)
            self.copying = None
        elif self.pending:
            name = self.pending.pop(next(iter(self.pending)))
            (block,) = self.harness.scheduler.pool.match([name.digest])
            if self.store.prepare_store(name):
                # Plans that were sent are executed already, so a copy ordered now would get these contents.
                self.copying = name, list(self.harness.ranks.kv[block])

    def _load(self) -> None:
        assert self.harness is not None
        request, arrival = self.loads.pop(self.random.randrange(len(self.loads)))
        n = self.random.randrange(len(arrival.digests) + 1)
        n = self.store.lookup(arrival.digests[:n])  # fewer if some were evicted meanwhile
        for block, digest in zip(arrival.fresh[:n], arrival.digests[:n], strict=True):
            self.harness.ranks.kv[block][:] = self.contents[digest]
        self.harness.scheduler.adopt(arrival, n)
        self.n_loaded += n
        if arrival.fresh and self.random.random() < 0.7:
            self.loads.append((request, arrival))
            return
        self.harness.scheduler.transfers.finish(arrival)
        self.harness.scheduler.requeue(request)

    def end(self) -> None:
        while self.loads or self.pending or self.copying:
            self.work()
