"""Places below the pool without an event loop: copies and loads that take time, over the books of real stores."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from services.worker.engine.kv_events import Announcer, BlockPlace, KvEventLog
from services.worker.engine.state import PlaceTotals
from services.worker.kv_transfer.host_store import HostStore
from services.worker.scheduling.places import BlockName
from services.worker.scheduling.request import Request
from services.worker.scheduling.transfers import Arrival
from tests.unit.worker.scheduling.kept_states import KeptStates

if TYPE_CHECKING:
    from tests.unit.worker.scheduling.harness import Harness

_BYTES = 8  # in the books; contents are the fake ranks' states
PLACES = (BlockPlace.HOST, BlockPlace.DISK)  # fastest first


class _Books(HostStore):
    """The books of any place."""

    def __init__(self, place: BlockPlace, n_blocks: int, events: KvEventLog) -> None:
        super().__init__(_BYTES, n_blocks * _BYTES, events, PlaceTotals())
        self.place, self._announcer = place, Announcer(events, place)


@dataclass(eq=False)
class _Kept:
    """One place, and the blocks on their way to it."""

    store: HostStore
    contents: dict[bytes, list[int]] = field(default_factory=dict)
    pending: dict[bytes, BlockName] = field(default_factory=dict)
    copying: tuple[BlockName, list[int]] | None = None

    def evicted(self, digest: bytes) -> None:
        self.pending.pop(digest, None)
        if self.copying is not None and self.copying[0].digest == digest:
            self.store.complete_store(self.copying[0], stored=False)
            self.copying = None

    def copy(self, harness: Harness) -> None:
        """A copy ends or begins."""
        if self.copying is not None:
            name, content = self.copying
            self.contents[name.digest] = content
            self.store.complete_store(name, stored=True)
            self.copying = None
        elif self.pending:
            name = self.pending.pop(next(iter(self.pending)))
            (block,) = harness.scheduler.pool.match([name.digest])
            if self.store.prepare_store(name):
                # Plans that were sent are executed already, so a copy ordered now would get these contents.
                self.copying = name, list(harness.ranks.kv[block])


class KeptBlocks:
    """A `Places` whose copies and loads go on when `work` is called; `n_blocks` are the sizes of its places."""

    def __init__(self, n_blocks: Sequence[int], events: KvEventLog, rng: random.Random) -> None:
        self.kept = [_Kept(_Books(place, n, events)) for place, n in zip(PLACES, n_blocks, strict=False)]
        self.random, self.n_loaded = rng, 0
        self.harness: Harness | None = None
        self.states = KeptStates(self)
        self.loads: list[tuple[Request, Arrival]] = []

    @property
    def stores(self) -> list[HostStore]:
        return [each.store for each in self.kept]

    def published(self, block: BlockName) -> None:
        for each in self.kept:
            each.pending[block.digest] = block

    def evicted(self, digest: bytes) -> None:
        for each in self.kept:
            each.evicted(digest)

    def saved(self, digest: bytes) -> None:
        self.states.pending[digest] = None

    def cleared(self) -> None:
        for each in self.kept:
            for digest in list(each.pending):
                each.evicted(digest)

    def load(self, request: Request, digests: Sequence[bytes], first: int, worth_tokens: int) -> bool:
        assert self.harness is not None
        transfers, size = self.harness.scheduler.transfers, self.harness.config.block_tokens
        at = first if transfers.snapshots is None else len(self.harness.scheduler.pool.match(digests))
        for store in self.stores:
            at += store.lookup(digests[at:])
        with_state = False
        if transfers.snapshots is not None:
            at, with_state = self.states.last(digests[:at], first)
        if at == first or (at - first) * size < worth_tokens:
            return False
        arrival = transfers.expect(request, at * size, least=0 if with_state else 1)
        if arrival is None:
            return False
        if with_state:
            self.states.expect(request, digests[at - 1])
        self.loads.append((request, arrival))
        return True

    def work(self) -> None:
        """A copy begins or ends, or some blocks of a load arrive."""
        assert self.harness is not None
        if self.loads and self.random.random() < 0.5:
            self._load()
        else:
            busy = [each for each in self.kept if each.copying or each.pending]
            if self.states.busy and self.random.random() < 0.5:
                self.states.copy()
            elif busy:
                self.random.choice(busy).copy(self.harness)

    def _load(self) -> None:
        assert self.harness is not None
        request, arrival = self.loads.pop(self.random.randrange(len(self.loads)))
        n = self.random.randrange(len(arrival.digests) + 1)
        actual = [self._content(digest) for digest in arrival.digests[:n]]
        contents = list(takewhile(bool, actual))  # fewer if some were evicted meanwhile
        for block, content in zip(arrival.fresh, contents, strict=False):
            self.harness.ranks.kv[block][:] = content
        self.harness.scheduler.adopt(arrival, len(contents))
        self.n_loaded += len(contents)
        if arrival.fresh and self.random.random() < 0.7:
            self.loads.append((request, arrival))
            return
        self.states.arrive(request, whole=not arrival.fresh)
        self.harness.scheduler.transfers.finish(arrival)
        self.harness.scheduler.requeue(request)

    def _content(self, digest: bytes) -> list[int]:
        """A block's contents in the first place that holds it; empty: in none."""
        return next((each.contents[digest] for each in self.kept if each.store.lookup([digest])), [])

    def end(self) -> None:
        while self.loads or self.states.busy or any(each.pending or each.copying for each in self.kept):
            self.work()
