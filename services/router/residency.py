"""Which workers are awake: puts idle workers to sleep, and makes room on a shared host for one that wakes.

Workers obey and refuse what they cannot do, and every call is idempotent. So several routers need no common lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc

from services.common.rpc import open_channel
from services.common.tasks import end_tasks, wait_for_event
from services.common.tls.credentials import Tls
from services.router.fleet import Fleet
from services.router.membership import Member
from services.router.worker_use import WorkerUse, next_to_rest, next_to_sleep

CHECK_S = 0.25
# How long one that wakes waits for requests of others to end.
ROOM_S = 60.0
_SLEEP_S, _WAKE_S, _SEEN_S = 30.0, 10.0, 5.0  # time-outs of the calls, and until the state shows their effect
_AGAIN_S = 1.0  # pause after a worker has refused to sleep

log = logging.getLogger(__name__)


class WakeError(Exception):
    """The worker cannot wake now; the message says why."""


class Residency:
    """The awake and the sleeping workers of all hosts, as one router moves them."""

    def __init__(self, fleet: Fleet, tls: Tls | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._tls = tls
        self._clock = clock
        self._uses: dict[str, WorkerUse] = {}  # by worker id
        self._falling_asleep: set[str] = set()  # worker ids
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by host: workers wake one after another
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """A worker's state has changed."""
        self._changed.set()

    def placed(self, worker_id: str, keep_alive_s: float | None) -> None:
        """A request was placed at the worker; `keep_alive_s` is how long it asks the model to stay after it."""
        place = self._fleet.find(worker_id)
        if place is None or (keep_alive_s is None and not _may_move(place[1])):
            return
        if use := self._use(worker_id):
            use.placed(keep_alive_s, self._clock())

    async def run(self) -> None:
        """Put workers to sleep that have been idle for too long, or of which too many are awake, until cancelled."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                for use in self._due():
                    task = asyncio.create_task(self._put_to_sleep(use))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(CHECK_S)
        finally:
            await end_tasks(tasks)

    async def wake(self, worker_id: str) -> None:
        """Make room for a sleeping worker and wake it; returns once it is waking. Raises :class:`WakeError`."""
        use = self._use(worker_id)
        if use is None:
            raise WakeError(f"worker {worker_id} is not known")
        try:
            await self._wake_in_turn(use)
        except WakeError as error:
            use.member.wake_refusal = str(error)
            raise
        use.member.wake_refusal = ""

    # One worker

    def _use(self, worker_id: str) -> WorkerUse | None:
        """The use of a worker's current incarnation; None if the worker has left."""
        place = self._fleet.find(worker_id)
        if place is None:
            self._uses.pop(worker_id, None)
            return None
        pool, member = place
        use = self._uses.get(worker_id)
        if use is None or use.member is not member or use.incarnation != member.incarnation:
            now = self._clock()
            use = self._uses[worker_id] = WorkerUse(pool, member, member.incarnation, now, now)
        return self._observe(use)

    def _observe(self, use: WorkerUse) -> WorkerUse:
        use.observe(self._clock())
        return use

    async def _wake(self, use: WorkerUse) -> bool:
        """Wake a worker; False if its host's memory does not suffice, and another worker could give some."""
        try:
            async with self._stub(use) as stub:
                await stub.Wake(worker_pb2.WakeRequest(promised_bytes=self._promised_beside(use)), timeout=_WAKE_S)
        except grpc.aio.AioRpcError as error:
            short = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            if short and any(other.movable for other in self._awake_beside(use)):
                return False
            raise WakeError(f"worker {use.member.worker_id} does not wake: {error.details()}") from error
        await self._until(lambda: use.member.state.phase != worker_pb2.PHASE_SLEEPING, _SEEN_S)
        return True

    async def _put_to_sleep(self, use: WorkerUse) -> None:
        """Ask the worker to sleep, and place no requests there meanwhile."""
        worker_id = use.member.worker_id
        if worker_id in self._falling_asleep:
            return
        self._falling_asleep.add(worker_id)
        self._set_resting(use, True)
        try:
            async with self._stub(use) as stub:
                await stub.Sleep(worker_pb2.SleepRequest(level=1), timeout=_SLEEP_S)
            await self._until(lambda: use.member.state.phase != worker_pb2.PHASE_SERVING, _SEEN_S)
            log.info("worker %s sleeps", worker_id, extra={"worker_id": worker_id, "model": use.pool.model})
        except grpc.aio.AioRpcError as error:
            never = error.code() == grpc.StatusCode.UNIMPLEMENTED
            use.asked_again_at = math.inf if never else self._clock() + _AGAIN_S
            log.warning("worker %s does not sleep: %s", worker_id, error.details(), extra={"worker_id": worker_id})
        finally:
            self._falling_asleep.discard(worker_id)
            self._set_resting(use, False)
            self.changed()

    def _set_resting(self, use: WorkerUse, resting: bool) -> None:
        if use.pool.members.get(use.member.worker_id) is use.member:
            use.pool.set_resting(use.member.worker_id, resting)

    @asynccontextmanager
    async def _stub(self, use: WorkerUse) -> AsyncIterator[worker_pb2_grpc.WorkerAsyncStub]:
        async with open_channel(use.member.address, to="worker", tls=self._tls) as channel:
            yield worker_pb2_grpc.WorkerStub(channel)

    # A host

    async def _wake_in_turn(self, use: WorkerUse) -> None:
        """Make room and wake the worker, after others of its host. Raises WakeError."""
        host = use.member.state.host
        if not host:
            await self._wake(use)
            return
        async with self._locks[host]:
            if self._observe(use).awake:
                return
            while True:
                await self._until_loaded(use)
                if len(self._awake_beside(use)) < (use.member.state.max_awake or math.inf) and await self._wake(use):
                    return
                await self._free_one(use)

    async def _until_loaded(self, use: WorkerUse) -> None:
        """Return once no other worker of the host wakes: what it still takes, no prediction of memory would see."""
        while any(other.phase == worker_pb2.PHASE_WAKING for other in self._awake_beside(use)):
            await self._next_change(CHECK_S)

    def _awake_beside(self, use: WorkerUse) -> list[WorkerUse]:
        """The awake workers of the same host."""
        host = use.member.state.host
        return [other for other in self._all() if other.awake and other.member.state.host == host and other is not use]

    def _promised_beside(self, use: WorkerUse) -> int:
        """Bytes that awake workers of the same host have yet to take, which their host still counts as available."""
        others = self._awake_beside(use) if use.member.state.host else []
        return sum(other.member.state.promised_bytes for other in others)

    async def _free_one(self, use: WorkerUse) -> None:
        """Put a worker of the same host to sleep, a busy one once its requests have ended. Raises WakeError."""
        host, resting, until = use.member.state.host, None, self._clock() + ROOM_S
        before = len(self._awake_beside(use))
        try:
            while self._clock() < until:
                others, now = self._awake_beside(use), self._clock()
                if not others or len(others) < before:
                    return
                if all(other.member.state.pinned for other in others):
                    raise WakeError(f"no worker of host {host} may sleep: all that are awake are pinned")
                if idle := next_to_sleep(others, now):
                    await self._put_to_sleep(idle)
                elif resting := resting or next_to_rest(others, now):
                    self._set_resting(resting, True)  # again, after it has refused to sleep
                await self._next_change(CHECK_S)
        finally:
            if resting is not None:
                self._set_resting(resting, False)
        raise WakeError(f"no worker of host {host} became idle within {ROOM_S:.0f} s")

    # All workers

    def _all(self) -> list[WorkerUse]:
        """The use of all workers that share a host, may sleep by idleness, or were used by a request's keep_alive."""
        members = [member for pool in self._fleet.pools.values() for member in pool.members.values()]
        concerned = {member.worker_id for member in members if _may_move(member)}
        return [use for worker_id in concerned | self._uses.keys() if (use := self._use(worker_id))]

    def _due(self) -> list[WorkerUse]:
        """The workers that have to sleep now."""
        uses, now = self._all(), self._clock()
        due = [use for use in uses if use.is_overdue(now)]
        hosts: dict[str, list[WorkerUse]] = defaultdict(list)
        for use in uses:
            if use.awake and use not in due:
                hosts[use.member.state.host].append(use)
        for host, awake in hosts.items():
            most = awake[0].member.state.max_awake if host else 0
            if most and len(awake) > most and not self._locks[host].locked() and (surplus := next_to_sleep(awake, now)):
                due.append(surplus)
        return due

    async def _next_change(self, timeout_s: float) -> None:
        self._changed.clear()
        await wait_for_event(self._changed, timeout_s)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Return once the condition holds, or after `timeout_s`."""
        until = self._clock() + timeout_s
        while not condition() and (left := until - self._clock()) > 0:
            await self._next_change(left)


def _may_move(member: Member) -> bool:
    """Whether the worker's settings let it sleep; without them only a request's keep_alive does."""
    return bool(member.state.host or member.state.idle_sleep_s)
