"""Loads adapters into slots of the ranks.

Orders travel in the ring of the plans, so all ranks change between the same two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.worker.protocol.adapter_codec import AdapterOrder, encode_adapter

_NUMBERS = 1 << 31


@dataclass(slots=True)
class _Load:
    waiting: set[int]  # ranks
    error: str = ""
    done: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class AdapterLoads:
    """The loads in progress of one group of `n_ranks` ranks; `send` reaches all of them."""

    def __init__(self, n_ranks: int, send: Callable[[memoryview], None]) -> None:
        self._n_ranks, self._send = n_ranks, send
        self._loads: dict[int, _Load] = {}
        self._number = 0
        self._lost: Exception | None = None

    def __len__(self) -> int:
        return len(self._loads)

    async def load(self, order: AdapterOrder) -> str:
        """Load an adapter; returns a rank's error, or an empty text. Raises RanksFailedError without ranks."""
        if self._lost is not None:
            raise self._lost
        self._number = (self._number + 1) % _NUMBERS
        load = self._loads[self._number] = _Load(set(range(self._n_ranks)))
        self._send(encode_adapter(replace(order, number=self._number)))
        return await asyncio.shield(load.done)

    def answered(self, rank: int, number: int, error: str) -> None:
        """Record a rank's answer."""
        load = self._loads[number]
        load.waiting.discard(rank)
        load.error = load.error or error
        if not load.waiting:
            del self._loads[number]
            load.done.set_result(load.error)

    def fail(self, error: Exception) -> None:
        """End all loads with `error`, because the ranks are gone."""
        self._lost = error
        for load in self._loads.values():
            load.done.set_exception(error)
            load.done.exception()  # marks it as retrieved, because the caller may have been cancelled
        self._loads.clear()
