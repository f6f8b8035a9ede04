"""Gives orders to all ranks of a group and collects their answers.

Orders travel in the ring of the plans, so every rank executes them between the steps submitted before and after them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from services.worker.protocol.order_codec import Order, encode_order

_NUMBERS = 1 << 31


@dataclass(slots=True)
class _Pending:
    waiting: set[int]  # ranks
    error: str = ""  # the first one
    done: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Orders:
    """The orders in progress of one group of `n_ranks` ranks; `send` reaches all of them."""

    def __init__(self, n_ranks: int, send: Callable[[memoryview], None]) -> None:
        self._n_ranks, self._send = n_ranks, send
        self._pending: dict[int, _Pending] = {}  # by number
        self._number = 0
        self._lost: Exception | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def send(self, order: Order) -> asyncio.Future[str]:
        """Send an order; the future returns a rank's error, or an empty text if all ranks have executed it.

        It raises RanksFailedError when the ranks are lost. Await it with `asyncio.shield`, because a sent order is
        executed even when its caller is cancelled.
        """
        pending = _Pending(set(range(self._n_ranks)))
        if self._lost is not None:
            _fail(pending, self._lost)
            return pending.done
        self._number = (self._number + 1) % _NUMBERS
        self._pending[self._number] = pending
        self._send(encode_order(self._number, order))
        return pending.done

    def answered(self, rank: int, number: int, error: str) -> None:
        """Record a rank's answer. Raises ValueError unless one is due."""
        pending = self._pending.get(number)
        if pending is None or rank not in pending.waiting:
            raise ValueError(f"rank {rank} answers an order that was not given: {number}")
        pending.waiting.discard(rank)
        pending.error = pending.error or error
        if not pending.waiting:
            del self._pending[number]
            pending.done.set_result(pending.error)

    def fail(self, error: Exception) -> None:
        """End the orders in progress and all later ones with `error`, because the ranks are gone."""
        self._lost = error
        for pending in self._pending.values():
            _fail(pending, error)
        self._pending.clear()


def _fail(pending: _Pending, error: Exception) -> None:
    pending.done.set_exception(error)
    pending.done.exception()  # marks it as retrieved, because the caller may have been cancelled
