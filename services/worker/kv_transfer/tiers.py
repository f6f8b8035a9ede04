"""The places of KV blocks below the pool, together: what is copied to them, and what is loaded from them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ryzanstein.v1 import worker_pb2 as pb

from services.common.tasks import end_tasks
from services.worker.engine.kv_events import PLACES, BlockPlace, KvEventLog
from services.worker.kv_transfer.block_store import BlockStore
from services.worker.kv_transfer.device import DeviceKv
from services.worker.kv_transfer.loader import BlockLoader, LoadError
from services.worker.kv_transfer.write_behind import WriteBehind
from services.worker.scheduling.places import BlockName
from services.worker.scheduling.request import Request

_READ_BLOCKS = 8  # contents read at a time
PAUSE_S = 30.0  # without copies after one that failed: a full disk stays full for a while

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent blocks of a prefix in one store."""

    store: BlockStore
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Loadable:
    """Blocks of a prefix in places, as far as a request can begin with them."""

    runs: Sequence[_Run]  # pieces of a state follow the blocks
    lookups: Sequence[tuple[BlockStore, int, int]]  # blocks that a store holds and lacks, of those it was asked for
    end: int  # blocks of the prefix that the request can begin with
    with_state: bool = False  # the state at that end is in a place


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A reader of blocks in one store or in several, one after the other, and of a state after them."""

    runs: Sequence[_Run]

    async def read(self, digests: Sequence[bytes], first: int, limit_s: float) -> AsyncGenerator[bytes, None]:
        """The blocks from `first` on. Raises LoadError for one that is damaged or gone."""
        for run in self.runs:
            wanted, store = digests[max(first, run.first) : run.end], run.store
            if store.lookup(wanted) < len(wanted):
                raise LoadError("gone", f"blocks on {store.place} were evicted meanwhile")
            held, began, n = store.prepare_load(wanted), time.monotonic(), 0
            try:
                for at in range(0, len(wanted), _READ_BLOCKS):
                    for content in await store.read(wanted[at : at + _READ_BLOCKS]):
                        if content is None:
                            raise LoadError("corrupt", f"a block on {store.place} cannot be read")
                        n += 1
                        yield content
            finally:
                store.complete_load(held)
                _count(store, n, time.monotonic() - began)

    def loaded(self, n_blocks: int, n_bytes: int) -> None:
        """Blocks are counted by `read`, which knows the store."""

    def failed(self, reason: str, detail: str, n_missing: int) -> None:
        """Log a failure, and count it unless `read` has."""
        first = self.runs[-1].end - n_missing
        totals = next(run.store.totals for run in self.runs if first < run.end)
        if reason == "timeout":
            totals.failures[reason] += n_missing
        elif reason == "error":
            totals.failures[reason] += 1
        log.warning("%d KV blocks are computed instead of loaded: %s, %s", n_missing, reason, detail)

    def ended(self, n_bytes: int, seconds: float) -> None:
        """Speeds are measured by `read`, which knows the store."""


def _count(store: BlockStore, n: int, seconds: float) -> None:
    totals, n_bytes = store.totals, n * store.block_bytes
    totals.loaded_blocks += n
    totals.loaded_bytes += n_bytes
    totals.loaded_seconds += seconds
    if n:
        store.speed.measure(n_bytes, seconds)


class Tiers:
    """All places of one engine, fastest first; they outlive its ranks. Implements `Places`."""

    def __init__(
        self,
        stores: Sequence[BlockStore],
        loader: BlockLoader,
        events: KvEventLog,
        announce: Callable[[], None],
    ) -> None:
        self._stores, self._loader, self._events = stores, loader, events
        self._announce = announce
        self._device: DeviceKv | None = None
        self._writers: list[WriteBehind] = []
        for store in stores:
            above = self._writers[-1] if self._writers else None
            self._writers.append(WriteBehind(store, lambda: self._device, above))
        self._tasks: list[asyncio.Task[None]] = []

    def attach(self, device: DeviceKv) -> None:
        """Use the KV cache of serving ranks; the first call starts to copy."""
        self._device = device
        self._wake()
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._run(writer), name="kv-write") for writer in self._writers]

    def detach(self) -> None:
        """The ranks no longer serve."""
        self._device = None
        self.cleared()

    def sleep(self) -> None:
        """Give memory back; what is on the disk stays."""
        for store in self._stores:
            if store.place is BlockPlace.HOST:
                store.clear()
        self._changed()

    async def close(self) -> None:
        """End all copies."""
        await end_tasks(self._tasks)
        for store in self._stores:
            store.close()

    def hashes(self) -> Mapping[BlockPlace, list[int]]:
        """Wire hashes of all blocks by place, parents before children."""
        return {store.place: store.hashes() for store in self._stores}

    async def read_host(self, digests: Sequence[bytes]) -> list[bytes]:
        """Contents of the leading blocks of `digests` that host memory holds, for another worker."""
        for store in self._stores:
            if store.place is BlockPlace.HOST:
                entries = store.prepare_load(digests[: store.lookup(digests)])
                leading: list[bytes] = []
                try:
                    for content in await store.read([entry.name.digest for entry in entries]):
                        if content is None:  # otherwise the next block would pass for this one
                            break
                        leading.append(content)
                finally:
                    store.complete_load(entries)
                return leading
        return []

    def states(self) -> tuple[pb.KvPlaceState, ...]:
        """The state that routers need."""
        return tuple(
            pb.KvPlaceState(
                place=PLACES[store.place],
                bytes=store.totals.coarse_bytes,
                capacity_bytes=store.totals.capacity_bytes,
                load_bytes_per_s=store.speed.bytes_per_s(),
                fault=store.totals.fault,
            )
            for store in self._stores
        )

    # -- Places ----------------------------------------------------------------------------------------------

    def published(self, block: BlockName) -> None:
        """Copy a block of the pool, soon."""
        for writer in self._writers:
            writer.published(block)

    def evicted(self, digest: bytes) -> None:
        """Do not use copies of the block that are under way."""
        for writer in self._writers:
            writer.evicted(digest)

    def saved(self, digest: bytes) -> None:
        """Copy a snapshot, soon."""
        for writer in self._writers:
            writer.saved(digest)

    def cleared(self) -> None:
        """Copy no block of the pool."""
        for writer in self._writers:
            writer.cleared()

    def load(self, request: Request, digests: Sequence[bytes], first: int, worth_tokens: int) -> bool:
        """Begin to load the blocks after the `first` ones that are here and load faster than they are computed."""
        device = self._device
        if device is None or not self._stores:
            return False
        size, loadable = device.layout.block_tokens, self._find(device, digests, first)
        worthwhile = bool(loadable.runs) and (loadable.end - first) * size >= worth_tokens
        begun = worthwhile and self._loader.start(
            device, request, StoredPrefix(loadable.runs), loadable.end * size, with_state=loadable.with_state
        )
        if worthwhile and not begun and self._loader.busy:  # its end makes room
            self._loader.postpone(request)
            return True
        for store, n_hits, n_misses in loadable.lookups:
            store.totals.hits += n_hits
            store.totals.misses += n_misses
        return begun

    def _find(self, device: DeviceKv, digests: Sequence[bytes], first: int) -> _Loadable:
        """Look a prefix up, of which a request can begin with the `first` blocks without a load."""
        at, runs, lookups = first, list[_Run](), list[tuple[BlockStore, int, int]]()
        if device.sizes.state_bytes:  # the device may hold more blocks than states
            at = max(first, len(device.owner.scheduler.pool.match(digests)))
        for store in self._stores:
            store.touch(digests)
            n = store.lookup(digests[at:])
            lookups.append((store, n, len(digests) - at - n))
            if n and not self._is_slow(store, n, n * device.layout.block_tokens):
                runs.append(_Run(store, at, at + n))
                at += n
        return self._up_to_state(device, digests[:at], first, _Loadable(runs, lookups, at))

    def _up_to_state(self, device: DeviceKv, digests: Sequence[bytes], first: int, loadable: _Loadable) -> _Loadable:
        """Cut what can be loaded of the prefix `digests` to the last block at whose end there is a state."""
        snapshots = device.owner.scheduler.transfers.snapshots
        if snapshots is None:
            return loadable
        for end in range(len(digests), first, -1):
            digest = digests[end - 1]
            runs = [_Run(run.store, run.first, min(run.end, end)) for run in loadable.runs if run.first < end]
            if digest in snapshots:
                return replace(loadable, runs=runs, end=end)
            last = device.last_piece(digest)
            store = next((store for store in self._stores if store.lookup((last,))), None)
            if store is not None:
                n = device.sizes.n_pieces
                if self._is_slow(store, n, (end - first) * device.layout.block_tokens):
                    break
                store.touch([*digests[:end], *(name.digest for name in device.pieces(digest))])
                return replace(loadable, runs=[*runs, _Run(store, end, end + n)], end=end, with_state=True)
        return replace(loadable, runs=(), end=first)

    def _is_slow(self, store: BlockStore, n_blocks: int, n_tokens: int) -> bool:
        """Whether computing `n_tokens` takes less time than a load of `n_blocks`."""
        tokens_per_s = self._loader.prefill_tokens_per_s()
        load_s = n_blocks * store.block_bytes / store.speed.bytes_per_s()
        slow = tokens_per_s > 0 and load_s * tokens_per_s > n_tokens
        store.totals.failures["slow"] += n_blocks * slow
        return slow

    async def _run(self, writer: WriteBehind) -> None:
        """Open a store and copy to it until cancelled. Requests go on without copies while that fails."""
        store, opened = writer.store, False
        while True:
            try:
                if not opened:
                    await store.open()
                    opened, store.totals.fault = True, ""
                    self._changed()
                await writer.run(self._copied)
            except OSError as error:
                self._failed(store, "io", error.strerror or str(error))
            except Exception as error:  # a fault of ours, which the metric and the state report
                log.exception("KV blocks cannot be copied to %s", store.place)
                self._failed(store, "error", repr(error))
            await asyncio.sleep(PAUSE_S)

    def _failed(self, store: BlockStore, reason: str, detail: str) -> None:
        log.warning("no KV block is copied to %s for %g s: %s", store.place, PAUSE_S, detail)
        store.totals.failures[reason] += 1
        store.totals.fault = detail
        self._wake()
        self._events.flush()
        self._announce()

    def _copied(self) -> None:
        self._wake()
        self._changed()

    def _wake(self) -> None:
        for writer in self._writers:
            writer.wake()

    def _changed(self) -> None:
        if self._events.flush():
            self._announce()
