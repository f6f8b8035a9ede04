"""The adapters of an engine on vLLM: our slots decide which are loaded, and vLLM's ranks hold them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from services.worker.adapters.slots import AdapterSlots, AdapterSources
from services.worker.engine.base import StepObserver
from services.worker.engine.request import AdapterRef, EngineRequest
from services.worker.engine.state import EngineCounters, EngineState
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.vllm.core import Core, RequestFailedError


class VllmAdapters:
    """Slots that are made anew whenever vLLM starts or wakes, with the adapters that were resident before."""

    def __init__(
        self,
        sources: AdapterSources | None,
        pinned: Sequence[AdapterRef],
        core: Core,
        observer: StepObserver,
        counters: EngineCounters,
        changed: Callable[[], None],
    ) -> None:
        """`pinned`: by the settings; `sources` is None without room for adapters."""
        self._sources, self._own, self._core = sources, pinned, core
        self._observer, self._counters, self._changed = observer, counters, changed
        self._pinned: Sequence[AdapterRef] = ()  # besides those of the settings
        self._resident: Sequence[AdapterRef] = ()  # in slots when vLLM fell asleep
        self._slots: AdapterSlots | None = None
        self._in_slot: dict[int, str] = {}  # digests by slot

    def open(self) -> None:
        """VLLM has started or woken."""
        self._in_slot = {}
        self._slots = AdapterSlots(
            self._sources,
            self._load,
            self._observer,
            self._counters,
            self._changed,
            lambda tenant, seconds: None,  # vLLM's scheduler knows no tenants
        )
        self._slots.pin((*self._own, *self._pinned))
        self._slots.restore(self._resident)
        self._resident = ()

    def close(self, *, asleep: bool) -> None:
        """VLLM falls asleep, or is lost."""
        slots, self._slots = self._slots, None
        if slots is not None:
            self._resident = slots.resident() if asleep else ()
            slots.abandon()

    def pin(self, refs: Sequence[AdapterRef]) -> None:
        """Load these adapters, and keep them in their slots, besides those of the settings."""
        if refs != self._pinned:
            self._pinned = refs
            if self._slots is not None:
                self._slots.pin((*self._own, *refs))

    def add_to(self, state: EngineState) -> EngineState:
        """Add what routers and metrics should know."""
        return state if self._slots is None else self._slots.add_to(state)

    def bytes_read(self, request: EngineRequest) -> int | None:
        """Bytes that were read of a request's adapter; None unless its files are being checked."""
        if self._slots is None or request.adapter is None:
            return None
        return self._slots.bytes_read(request.adapter.digest)

    @asynccontextmanager
    async def in_use(self, request: EngineRequest) -> AsyncGenerator[None, None]:
        """Keep a request's adapter in a slot. Raises InvalidRequestError if it cannot be loaded, CoreError."""
        slots, ref = self._slots, request.adapter
        if ref is None:
            yield
            return
        assert slots is not None, "an engine that takes requests has started"
        await slots.take(ref, request.tenant)
        try:
            yield
        finally:
            slots.give_back(ref.digest)

    async def _load(self, order: AdapterOrder) -> str:
        if (old := self._in_slot.pop(order.slot, None)) is not None:
            await self._core.unload_adapter(old)
        try:
            await self._core.load_adapter(order.digest, order.folder)
        except RequestFailedError as error:
            return str(error)
        self._in_slot[order.slot] = order.digest
        return ""
