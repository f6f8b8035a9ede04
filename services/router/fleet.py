"""All workers this router knows: one pool per model, kept up to date by a state stream from each worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc.aio
from ryzanstein.v1 import routing_pb2, worker_pb2, worker_pb2_grpc

from services.common.leases import Lease
from services.common.rpc import open_channel
from services.router.breaker import BreakerLimits
from services.router.pool import Member, Pool

RECONNECT_MIN_S, RECONNECT_MAX_S = 0.05, 1.0
# A thousand workers that have nothing else to say cost a router 4 % of a core.
HEARTBEAT_MS = 1000

log = logging.getLogger(__name__)


class UnknownModelError(Exception):
    """No worker has ever served the model, or several models are served and none was named."""


class UnavailableError(Exception):
    """The model is known but none of its workers can take requests now."""


class Fleet:
    """Pools by model. `changed` is called whenever a waiting request may have become placeable."""

    def __init__(self, router_id: str, saturation_s: float, limits: BreakerLimits, changed: Callable[[], None]) -> None:
        self.pools: dict[str, Pool] = {}
        self._homes: dict[str, Pool] = {}  # by worker id
        self._router_id = router_id
        self._saturation_s = saturation_s
        self._limits = limits
        self._changed = changed

    async def follow(self, lease: Lease) -> None:
        """Keep a worker in its pool and its state stream open until cancelled."""
        self._join(lease)
        pause = RECONNECT_MIN_S
        async with open_channel(lease.address, small_messages=True) as channel:
            while True:
                if await self._watch(lease, channel):
                    pause = RECONNECT_MIN_S
                self._homes[lease.worker_id].disconnected(lease.worker_id)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RECONNECT_MAX_S)

    async def _watch(self, lease: Lease, channel: grpc.aio.Channel) -> bool:
        """Apply states until the stream breaks; whether there were any."""
        heard = False
        request = worker_pb2.WatchStateRequest(watcher_id=self._router_id, heartbeat_ms=HEARTBEAT_MS)
        try:
            async for state in worker_pb2_grpc.WorkerStub(channel).WatchState(request):
                if state.worker_id != lease.worker_id:
                    log.warning("%s answers as worker %s, not %s", lease.address, state.worker_id, lease.worker_id)
                    break
                if state.unchanged:  # never the first
                    self._homes[lease.worker_id].heard(lease.worker_id)
                    continue
                heard = True
                self._homes[lease.worker_id].update(lease.worker_id, state, self._router_id)
                self._changed()
        except grpc.aio.AioRpcError as error:
            if heard:
                extra = {"worker_id": lease.worker_id}
                log.warning("state stream of %s broken: %s", lease.worker_id, error.details(), extra=extra)
        return heard

    def _join(self, lease: Lease) -> None:
        pool = self.pools.get(lease.model)
        if pool is None:
            pool = self.pools[lease.model] = Pool(lease.model, self._saturation_s, time.monotonic)
        pool.add(lease.worker_id, lease.address, self._limits)
        self._homes[lease.worker_id] = pool

    def lost(self, worker_id: str) -> None:
        """The worker is gone: lease and stream."""
        if pool := self._homes.pop(worker_id, None):
            pool.remove(worker_id)

    def connected(self, worker_id: str) -> bool:
        """Whether the worker is known to be alive without Redis."""
        pool = self._homes.get(worker_id)
        return pool is not None and pool.is_live(worker_id)

    def find(self, worker_id: str) -> tuple[Pool, Member] | None:
        """A worker and its pool."""
        pool = self._homes.get(worker_id)
        return (pool, pool.members[worker_id]) if pool else None

    def has_live_workers(self) -> bool:
        """Whether any state stream is alive."""
        return any(pool.is_live(worker_id) for worker_id, pool in self._homes.items())

    def pool(self, model: str) -> Pool:
        """The pool that serves `model` ('' when there is only one); it has members.

        Raises UnknownModelError or UnavailableError.
        """
        staffed = [name for name, pool in self.pools.items() if pool.members]
        if not model and len(staffed) > 1:
            raise UnknownModelError(f"model: name one of {', '.join(sorted(staffed))}")
        if not staffed or (model in self.pools and model not in staffed):
            raise UnavailableError(f"no worker serves {model or 'any model'} now")
        if model and model not in staffed:
            raise UnknownModelError(f"model: {model!r} is not served; served are {', '.join(sorted(staffed))}")
        return self.pools[model or staffed[0]]

    def report(self, outcome: routing_pb2.Outcome) -> None:
        """What became of a request. Only faults count against a worker."""
        pool = self._homes.get(outcome.worker_id)
        if pool is None:
            return
        match outcome.result:
            case routing_pb2.Outcome.RESULT_OK:
                pool.success(outcome.worker_id, outcome.incarnation)
            case routing_pb2.Outcome.RESULT_FAULT:
                pool.fault(outcome.worker_id, outcome.incarnation)
            case _:
                pool.no_verdict(outcome.worker_id, outcome.incarnation)
        self._changed()
