"""Requests that wait for an eligible worker: a bounded queue, fair between tenants within a priority."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueFullError(Exception):
    """The queue is full, or a tenant with fewer waiting requests took the place."""


@dataclass(slots=True, eq=False)
class _Waiter(Generic[T]):
    tenant: str
    priority: int
    since: float
    attempt: Callable[[], T | None]
    until: Callable[[], float]
    done: asyncio.Future[T]
    timer: asyncio.TimerHandle | None = None

    def expire(self) -> None:
        """End the wait if it is time to, else look again when it is."""
        loop = self.done.get_loop()
        if self.timer is not None:
            self.timer.cancel()
        if (end := self.until()) > loop.time():
            self.timer = loop.call_at(end, self.expire)
        elif not self.done.done():
            self.done.set_exception(TimeoutError())


class RouteQueue(Generic[T]):
    """Each waiter has an attempt: a synchronous function that returns None as long as it cannot succeed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._count = 0
        # priority -> tenant -> waiters; the first tenant of a priority is served next.
        self._lines: dict[int, OrderedDict[str, deque[_Waiter[T]]]] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def since(self) -> float | None:
        """When the first of the waiters began to wait; None without waiters."""
        lines = (line for lines in self._lines.values() for line in lines.values())
        return min((line[0].since for line in lines), default=None)

    async def wait(
        self, tenant: str, priority: int, attempt: Callable[[], T | None], until: Callable[[], float], since: float
    ) -> T:
        """The result of `attempt` once it succeeds; raises QueueFullError or TimeoutError.

        Times are the event loop's. `until` is asked again when the time that it gave has come, or by `expire`. A waiter
        that began to wait earlier, perhaps at another router, stands before later ones of its tenant.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(tenant, priority, since, attempt, until, done)
        if self._count >= self._size:
            self._make_room(waiter)
        self._insert(waiter)
        self.drain()
        waiter.expire()
        try:
            return await done
        finally:
            if waiter.timer is not None:
                waiter.timer.cancel()
            if done.cancelled() or done.exception():
                self._remove(waiter)

    def expire(self) -> None:
        """Ask all waiters again when their waits end, and end those whose time has come."""
        for line in [line for lines in self._lines.values() for line in lines.values()]:
            for waiter in line:
                waiter.expire()

    def drain(self) -> None:
        """Try the waiters in order, until an attempt fails."""
        while self._count:
            lines = self._lines[min(self._lines)]
            tenant, line = next(iter(lines.items()))
            waiter = line[0]
            if waiter.done.done():  # its caller is gone
                self._remove(waiter)
                continue
            result = waiter.attempt()
            if result is None:
                return
            waiter.done.set_result(result)
            self._remove(waiter)
            if tenant in lines:
                lines.move_to_end(tenant)

    def _make_room(self, newcomer: _Waiter[T]) -> None:
        """Evict the last waiter of the longest line of the worst priority, unless that is better than the newcomer's.

        Raises QueueFullError if there is no such line, or if it has the newcomer's priority and the newcomer's own line
        would become as long.
        """
        tenants = self._lines.get(newcomer.priority, OrderedDict())
        own = len(tenants[newcomer.tenant]) if newcomer.tenant in tenants else 0
        candidates = [
            (priority, len(line), line)
            for priority, lines in self._lines.items()
            if priority >= newcomer.priority
            for line in lines.values()
        ]
        if not candidates:
            raise QueueFullError
        priority, length, line = max(candidates, key=lambda item: item[:2])
        if priority == newcomer.priority and length <= own + 1:
            raise QueueFullError
        victim = line[-1]
        self._remove(victim)
        victim.done.set_exception(QueueFullError())

    def _insert(self, waiter: _Waiter[T]) -> None:
        line = self._lines.setdefault(waiter.priority, OrderedDict()).setdefault(waiter.tenant, deque())
        place = len(line)
        while place and line[place - 1].since > waiter.since:
            place -= 1
        line.insert(place, waiter)
        self._count += 1

    def _remove(self, waiter: _Waiter[T]) -> None:
        lines = self._lines.get(waiter.priority, OrderedDict())
        line = lines.get(waiter.tenant)
        if line is None or waiter not in line:
            return
        line.remove(waiter)
        self._count -= 1
        if not line:
            del lines[waiter.tenant]
        if not lines:
            del self._lines[waiter.priority]
