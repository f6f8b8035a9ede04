"""The adapters of an engine: which may be loaded, and which of them the ranks hold in which slot."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ryzanstein.v1 import worker_pb2 as pb

from services.common.adapters import check_path
from services.compute.model.adapters.peft import CONFIG, TENSORS
from services.compute.model.adapters.served import read_adapter
from services.compute.model.registry import Description
from services.compute.model.spec import ModelError
from services.worker.adapters.slot_table import AdapterSlotTable, SlotUser
from services.worker.engine.base import StepObserver
from services.worker.engine.errors import InvalidRequestError, UnsupportedError
from services.worker.engine.request import AdapterRef
from services.worker.engine.state import AdapterFacts, EngineCounters, EngineState
from services.worker.protocol.order_codec import AdapterOrder

_FIELD = "adapter"
_NEW = 0.5  # weight of a new measurement of a load
FILES, MEMORY = "files", "memory"  # where loads read

Load = Callable[[AdapterOrder], Awaitable[str]]  # returns an error, or an empty text

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterSources:
    """The adapters that this worker may read."""

    model: Description
    max_rank: int
    named: tuple[str, ...]  # folders of the settings' adapters
    within: tuple[str, ...]  # folders that hold others
    cache_bytes: int = 0  # bytes of each rank for adapters that may lose their slots
    n_slots: int = 0

    async def inspect(
        self, source: str, name: str = "", on_read: Callable[[int], None] = lambda n_bytes: None
    ) -> AdapterFacts:
        """Check an adapter without reading its tensors into memory. Raises InvalidRequestError.

        Calls `on_read`, in another thread, with the bytes of every piece read.
        """
        try:
            check_path(source)
            folder = self._allowed(source)
            adapter = await asyncio.to_thread(read_adapter, folder, self.model, self.max_rank, on_read)
        except (ModelError, OSError, RuntimeError, ValueError) as error:  # the path: too long, a loop of links, ...
            raise InvalidRequestError(_FIELD, str(error)) from error
        if adapter.n_left_out:
            log.warning(
                "%s: %d of its tensors are not used: they change %s",
                source,
                adapter.n_left_out,
                self.model.spec.left_out,
            )
        return AdapterFacts(name, adapter.digest, source, adapter.rank, adapter.n_bytes)

    def _allowed(self, source: str) -> Path:
        """Return the folder of a source, with links and `..` resolved, as of its files. Raises InvalidRequestError."""
        folder, roots = Path(source).resolve(), [Path(one).resolve() for one in self.within]
        files = [folder, *((folder / name).resolve() for name in (CONFIG, TENSORS))]
        if source in self.named or all(any(file.is_relative_to(root) for root in roots) for file in files):
            return folder
        allowed = ", ".join(self.within) or "none (RYZANSTEIN_ADAPTER_SOURCES)"
        raise InvalidRequestError(_FIELD, f"{source}: adapters are loaded from these folders only: {allowed}")


class _Memory:
    """The adapters that ranks keep besides those in slots, up to a number of bytes; the ranks follow the orders."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, tuple[str, int]] = OrderedDict()  # names and bytes; the one used last at the end
        self._forgotten: list[str] = []

    def items(self) -> dict[str, str]:
        """The names by digest."""
        return {digest: name for digest, (name, _) in self._kept.items()}

    def used(self, digest: str) -> bool:
        """Whether the ranks keep an adapter, which is about to be used."""
        if digest in self._kept:
            self._kept.move_to_end(digest)
        return digest in self._kept

    def keep(self, ref: AdapterRef, n_bytes: int) -> bool:
        """Whether the ranks should keep an adapter that they load, in place of others."""
        if n_bytes > self._most:
            return False
        self._kept[ref.digest] = ref.name, n_bytes
        while sum(size for _, size in self._kept.values()) > self._most:
            self._forgotten.append(self._kept.popitem(last=False)[0])
        return True

    def lost(self, digest: str) -> None:
        """A load has failed: perhaps not on all ranks."""
        if self._kept.pop(digest, None):
            self._forgotten.append(digest)

    def take_forgotten(self) -> tuple[str, ...]:
        """The digests that ranks should forget with the next order."""
        forgotten, self._forgotten = tuple(self._forgotten), []
        return forgotten


class _Reading:
    """How much of an adapter's files was read; another thread counts."""

    n_bytes = 0

    def add(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes


class AdapterSlots:
    """The slots of the serving ranks, and the other adapters in memory."""

    def __init__(
        self,
        sources: AdapterSources | None,
        load: Load,
        observer: StepObserver,
        counters: EngineCounters,
        changed: Callable[[], None],
        charge: Callable[[str, float], None],
    ) -> None:
        """Calls `changed` when `add_to` has something new, `charge` with the tenant of a load and its seconds."""
        self._sources, self._load, self._observer = sources, load, observer
        self._counters, self._announce, self._charge = counters, changed, charge
        self._table = AdapterSlotTable(sources.n_slots if sources else 0, time.monotonic)
        self._memory = _Memory(sources.cache_bytes if sources else 0)
        self._users: dict[str, SlotUser] = {}  # by digest
        self._refs: dict[str, AdapterRef] = {}  # by digest: how its last user named it
        self._coming: dict[SlotUser, asyncio.Task[None]] = {}
        self._granted: dict[SlotUser, asyncio.Future[None]] = {}
        self._changed = asyncio.Event()
        self._reading: dict[str, _Reading] = {}  # adapters whose files are being checked, by digest
        self._load_ms = {FILES: 0.0, MEMORY: 0.0}
        self._n_waiting = 0

    def add_to(self, state: EngineState) -> EngineState:
        """Add what routers and metrics should know."""
        if self._sources is None:
            return state
        held = {one.digest: (one.name, True) for one in self._users.values() if one.slot >= 0}
        held = {digest: (name, False) for digest, name in self._memory.items().items()} | held
        return replace(
            state,
            adapters=tuple(
                pb.ResidentAdapter(name=name, digest=digest, in_slot=in_slot)
                for digest, (name, in_slot) in sorted(held.items())
            ),
            adapter_read_ms=self._load_ms[FILES],
            adapter_copy_ms=self._load_ms[MEMORY],
            adapter_slots_in_use=self._table.in_use,
            adapter_slots=self._sources.n_slots,
            adapter_waiting=self._n_waiting,
        )

    def pin(self, refs: Sequence[AdapterRef]) -> None:
        """Load these adapters, and never evict them; those that were pinned before may be evicted again.

        One slot stays for others: `refs` beyond that are ignored, with a warning.
        """
        if self._sources is None:
            return
        pinned = refs[: self._sources.n_slots - 1]
        for ref in refs[len(pinned) :]:
            log.warning("adapter %s is not pinned: one of %d slots stays free", ref.name, self._sources.n_slots)
        self._table.pinned = {ref.digest for ref in pinned}
        for ref in pinned:
            if ref.digest not in self._users:
                self._begin(ref, "")
        self._place()

    def resident(self) -> Sequence[AdapterRef]:
        """The adapters that are in slots, or are being loaded."""
        return tuple(self._refs[digest] for digest in self._users)

    def restore(self, refs: Sequence[AdapterRef]) -> None:
        """Load adapters that were resident before; requests may evict them again."""
        for ref in refs:
            if ref.digest not in self._users:
                self._begin(ref, "")
        self._place()

    async def take(self, ref: AdapterRef, tenant: str = "") -> int:
        """Return the adapter's slot, for one user more. Loads the adapter if needed; waits while all slots are in use.

        Raises InvalidRequestError if it cannot be loaded, or is another one now than the digest says, and
        RanksFailedError.
        """
        self._n_waiting += 1
        try:
            while (user := self._users.get(ref.digest)) is not None and self._table.yields(user):
                self._changed.clear()
                await self._changed.wait()
            user = user or self._begin(ref, tenant)
            self._table.use(user, tenant)
            try:
                await asyncio.shield(self._coming[user])
            except BaseException:
                self._end(user)
                raise
        finally:
            self._n_waiting -= 1
        return user.slot

    def bytes_read(self, digest: str) -> int | None:
        """Bytes that were read of an adapter so far; None unless its files are being checked."""
        reading = self._reading.get(digest)
        return reading.n_bytes if reading else None

    def give_back(self, digest: str) -> None:
        """End one use."""
        self._end(self._users[digest])

    def abandon(self) -> None:
        """End all loads: the ranks are gone."""
        for task in self._coming.values():
            task.cancel()

    def _end(self, user: SlotUser) -> None:
        self._table.unuse(user)
        self._place()

    def _place(self) -> None:
        """Give the slots that are free, or may be, to adapters that wait for one."""
        placed, evicted = self._table.place()
        self._counters.adapter_evictions += len(evicted)
        for user in evicted:
            del self._users[user.digest], self._coming[user]
        for user in placed:
            if not self._granted[user].done():
                self._granted[user].set_result(None)
        self._changed.set()
        self._announce()

    def _begin(self, ref: AdapterRef, tenant: str) -> SlotUser:
        user = self._users[ref.digest] = self._table.add(ref.digest, ref.name, tenant)
        self._refs[ref.digest] = ref
        self._granted[user] = asyncio.get_running_loop().create_future()
        task = self._coming[user] = asyncio.create_task(self._bring(user, ref, tenant), name="adapter")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # all waiting may have gone
        return user

    async def _bring(self, user: SlotUser, ref: AdapterRef, tenant: str) -> None:
        """Load an adapter for a tenant; every request that waits for it gets the error."""
        source, result = FILES, "lost"
        began = time.monotonic()
        try:
            if self._sources is None:
                raise InvalidRequestError(_FIELD, "this worker has no slots for adapters (RYZANSTEIN_ADAPTER_SOURCES)")
            n_bytes = 0
            if not self._memory.used(ref.digest):
                n_bytes = (await self._inspect(ref)).n_bytes
            self._table.wait(user)
            self._place()
            await self._granted[user]
            began = time.monotonic()
            source = MEMORY if self._memory.used(ref.digest) else FILES
            if source == FILES and not n_bytes:  # it was in memory when the request came
                n_bytes = (await self._inspect(ref)).n_bytes
            keep = source == FILES and self._memory.keep(ref, n_bytes)
            folder = ref.source if source == FILES else ""
            order = AdapterOrder(user.slot, folder, ref.digest, keep, self._memory.take_forgotten())
            ordered = time.monotonic()
            error = await self._load(order)
            self._charge(tenant, time.monotonic() - ordered)
            if error:
                raise InvalidRequestError(_FIELD, error)
            if source == FILES:
                await self._inspect(ref, "changed while it was loaded")
            user.loaded, result = True, "ok"
            self._learn(source, (time.monotonic() - began) * 1e3)
        except InvalidRequestError as error:
            result = "refused"
            log.warning("adapter %s is not loaded: %s", ref.name, error)
            raise
        finally:
            del self._granted[user]
            if not user.loaded:
                self._memory.lost(ref.digest)
                self._table.drop(user)
                del self._users[user.digest], self._coming[user]
            self._observer.on_adapter_load(source, result, time.monotonic() - began)
            self._place()

    async def _inspect(
        self, ref: AdapterRef, what: str = "holds another adapter than the request began with"
    ) -> AdapterFacts:
        """Check that the files are those of the digest. Raises InvalidRequestError."""
        assert self._sources is not None
        reading = self._reading[ref.digest] = _Reading()
        try:
            facts = await self._sources.inspect(ref.source, on_read=reading.add)
        finally:
            del self._reading[ref.digest]
        if facts.digest != ref.digest:
            raise InvalidRequestError(_FIELD, f"{ref.source}: {what} (digest {facts.digest[:12]})")
        return facts

    def _learn(self, source: str, ms: float) -> None:
        old = self._load_ms[source]
        self._load_ms[source] = old + _NEW * (ms - old) if old else ms


async def inspect(sources: AdapterSources | None, source: str) -> AdapterFacts:
    """Check an adapter of a worker that may have no room for any. Raises InvalidRequestError, UnsupportedError."""
    if sources is None:
        raise UnsupportedError("this worker loads no adapters: RYZANSTEIN_ADAPTER_SOURCES names no folder")
    return await sources.inspect(source)
