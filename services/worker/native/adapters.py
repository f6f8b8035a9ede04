"""The adapters of an engine: which may be loaded, and which of them the ranks hold in which slot."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.worker.engine.errors import InvalidRequestError, UnsupportedError
from services.worker.engine.request import AdapterRef
from services.worker.engine.state import AdapterFacts
from services.worker.model.adapters.served import read_adapter
from services.worker.model.registry import Description
from services.worker.model.spec import ModelError

_FIELD = "adapter"
Load = Callable[[int, str], Awaitable[str]]  # slot and folder -> error, or an empty text


@dataclass(frozen=True, slots=True)
class AdapterSources:
    """The adapters that this worker may read."""

    model: Description
    max_rank: int
    named: tuple[str, ...]  # folders of the settings' adapters
    within: tuple[str, ...]  # folders that hold others

    async def inspect(self, source: str, name: str = "") -> AdapterFacts:
        """Check an adapter without reading its tensors into memory. Raises InvalidRequestError."""
        folder = self._allowed(source)
        try:
            found = await asyncio.to_thread(read_adapter, folder, self.model, self.max_rank)
        except ModelError as error:
            raise InvalidRequestError(_FIELD, str(error)) from error
        return AdapterFacts(name, found.digest, source, found.rank)

    def _allowed(self, source: str) -> Path:
        """Return the folder of a source, with links and `..` resolved. Raises InvalidRequestError."""
        folder = Path(source).resolve()
        if source in self.named or any(folder.is_relative_to(Path(one).resolve()) for one in self.within):
            return folder
        allowed = ", ".join(self.within) or "none (RYZANSTEIN_ADAPTER_SOURCES)"
        raise InvalidRequestError(_FIELD, f"{source}: adapters are loaded from these folders only: {allowed}")


@dataclass(slots=True)
class _Resident:
    """An adapter in a slot."""

    slot: int
    loading: asyncio.Task[None]
    users: int = 0  # requests that run or wait with it


class AdapterSlots:
    """The slots of the serving ranks. An adapter keeps its slot while requests use it; then the oldest gives way."""

    def __init__(self, sources: AdapterSources | None, n_slots: int, load: Load) -> None:
        self._sources, self._load = sources, load
        self._free = list(range(n_slots))
        self._resident: OrderedDict[str, _Resident] = OrderedDict()  # by digest, the one used last at the end
        self._freed = asyncio.Event()

    @property
    def digests(self) -> Sequence[str]:
        """The adapters that the ranks hold."""
        return tuple(digest for digest, found in self._resident.items() if found.loading.done())

    async def take(self, ref: AdapterRef) -> int:
        """Return the adapter's slot, for one user more. Loads the adapter if needed; waits while all slots are in use.

        Raises InvalidRequestError if it cannot be loaded, or is another one now than the digest says, and
        RanksFailedError.
        """
        found = self._resident.get(ref.digest)
        if found is None:
            found = await self._bring(ref)
        found.users += 1
        try:
            await asyncio.shield(found.loading)
        except BaseException:
            found.users -= 1
            raise
        if ref.digest in self._resident:
            self._resident.move_to_end(ref.digest)
        return found.slot

    def give_back(self, digest: str) -> None:
        """End one use."""
        found = self._resident[digest]
        found.users -= 1
        if not found.users:
            self._freed.set()

    async def _bring(self, ref: AdapterRef) -> _Resident:
        if self._sources is None:
            raise InvalidRequestError(_FIELD, "this worker has no slots for adapters (RYZANSTEIN_ADAPTER_SOURCES)")
        facts = await self._sources.inspect(ref.source)
        if facts.digest != ref.digest:
            raise InvalidRequestError(
                _FIELD, f"{ref.source}: holds another adapter than the request began with (digest {facts.digest[:12]})"
            )
        while ref.digest not in self._resident:
            if (slot := self._vacate()) is None:
                self._freed.clear()
                await self._freed.wait()
                continue
            task = asyncio.create_task(self._bring_into(slot, ref), name="adapter")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # all waiting may have gone
            self._resident[ref.digest] = _Resident(slot, task)
        return self._resident[ref.digest]

    async def _bring_into(self, slot: int, ref: AdapterRef) -> None:
        """Load an adapter; every request that waits for it gets the error."""
        assert self._sources is not None
        loaded = False
        try:
            if error := await self._load(slot, ref.source):
                raise InvalidRequestError(_FIELD, error)
            if (await self._sources.inspect(ref.source)).digest != ref.digest:
                raise InvalidRequestError(_FIELD, f"{ref.source}: changed while it was loaded")
            loaded = True
        finally:
            if not loaded:
                del self._resident[ref.digest]
                self._free.append(slot)
                self._freed.set()

    def _vacate(self) -> int | None:
        """Return a free slot, perhaps that of the adapter that was used longest ago; None if all are in use."""
        if self._free:
            return self._free.pop()
        idle = next((digest for digest, one in self._resident.items() if not one.users and one.loading.done()), None)
        return None if idle is None else self._resident.pop(idle).slot


async def inspect(sources: AdapterSources | None, source: str) -> AdapterFacts:
    """Check an adapter of a worker that may have no room for any. Raises InvalidRequestError, UnsupportedError."""
    if sources is None:
        raise UnsupportedError("this worker loads no adapters: RYZANSTEIN_ADAPTER_SOURCES names no folder")
    return await sources.inspect(source)
