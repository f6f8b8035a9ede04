"""All workers that this router knows: one pool per model, which a state stream from each worker keeps up to date."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from hashlib import blake2b
from uuid import uuid4

import grpc.aio
from ryzanstein.v1 import routing_pb2, worker_pb2, worker_pb2_grpc

from services.common.leases import FORGET_S, Lease
from services.common.rpc import open_channel
from services.common.tls.credentials import Tls
from services.router.breaker import BreakerLimits
from services.router.membership import Member
from services.router.pool import Pool

RECONNECT_MIN_S, RECONNECT_MAX_S = 0.05, 1.0
# The heartbeats of a thousand workers cost a router 4 % of a core.
HEARTBEAT_MS = 1000

log = logging.getLogger(__name__)


class UnknownModelError(Exception):
    """No worker serves or is expected to serve the model; or the request names no model and there are several."""


class UnavailableError(Exception):
    """The model is known, but none of its workers can take requests now. `retry_after_s` is 0 where it is not known."""

    def __init__(self, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Fleet:
    """Pools by model. The fleet calls `changed` whenever a waiting request may have become placeable.

    An expected model is known even while it has no worker.
    """

    def __init__(
        self,
        router_id: str,
        saturation_s: float,
        limits: BreakerLimits,
        changed: Callable[[], None],
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self.pools: dict[str, Pool] = {}
        self._homes: dict[str, Pool] = {}  # by worker id
        self.expected: frozenset[str] | None = None  # not read yet
        self._empty_since: dict[str, float] = {}  # by model
        self._news = asyncio.Event()  # replaced at each change of the known models
        self._process = uuid4().hex
        self._changes = 0  # number of changed workers, incarnations, phases and expected models
        self._router_id = router_id
        self._saturation_s = saturation_s
        self._limits = limits
        self._changed = changed

    def expect(self, models: frozenset[str]) -> None:
        """Replace the set of expected models."""
        for model in models - self.pools.keys():
            self._new_pool(model)
        for model in (self.expected or frozenset()) - models:
            if not self.pools[model].members:
                self._empty_since.setdefault(model, time.monotonic())
        self._changes += models != self.expected
        self.expected = models
        self._models_changed()

    async def follow(self, lease: Lease) -> None:
        """Keep a worker in its pool, and keep its state stream open, until cancelled."""
        self.join(lease)
        name, pause, extra = lease.worker_id, RECONNECT_MIN_S, {"worker_id": lease.worker_id, "address": lease.address}
        broken = False
        async with open_channel(lease.address, to="worker", tls=self._tls, small_messages=True) as channel:
            while True:
                alive, cause = await self._watch(lease, channel)
                if alive:
                    pause = RECONNECT_MIN_S
                if alive or not broken:  # one line per outage
                    log.warning("state stream of %s at %s broken: %s", name, lease.address, cause, extra=extra)
                    broken = True
                self._homes[lease.worker_id].disconnected(lease.worker_id)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RECONNECT_MAX_S)

    async def _watch(self, lease: Lease, channel: grpc.aio.Channel) -> tuple[bool, str]:
        """Apply states until the stream breaks; return whether any arrived, and the cause of the break."""
        alive, cause = False, "the worker has ended it"
        request = worker_pb2.WatchStateRequest(watcher_id=self._router_id, heartbeat_ms=HEARTBEAT_MS)
        try:
            async for state in worker_pb2_grpc.WorkerStub(channel).WatchState(request):
                if state.worker_id != lease.worker_id:
                    cause = f"worker {state.worker_id} answers there"
                    break
                if state.unchanged:  # a heartbeat; the first message of a stream is never one
                    self._homes[lease.worker_id].on_heartbeat(lease.worker_id)
                    continue
                alive = True
                self._changes += self._homes[lease.worker_id].update(lease.worker_id, state, self._router_id)
                self._changed()
        except grpc.aio.AioRpcError as error:
            cause = f"{error.code().name}: {error.details()}"
        return alive, cause

    def join(self, lease: Lease) -> None:
        """Add the worker of a lease to its model's pool, not connected yet."""
        pool = self.pools.get(lease.model) or self._new_pool(lease.model)
        pool.add(lease.worker_id, lease.address, self._limits)
        self._homes[lease.worker_id] = pool
        self._changes += 1
        self._empty_since.pop(lease.model, None)
        self._models_changed()

    def _new_pool(self, model: str) -> Pool:
        pool = self.pools[model] = Pool(model, self._saturation_s, time.monotonic)
        return pool

    def lost(self, worker_id: str) -> None:
        """Remove a worker whose lease and stream have both ended."""
        if pool := self._homes.pop(worker_id, None):
            pool.remove(worker_id)
            self._changes += 1
            if not pool.members:
                self._empty_since[pool.model] = time.monotonic()

    def forget(self, wanted: Collection[str]) -> list[str]:
        """Drop pools of unexpected and unwanted models that have been empty for `FORGET_S`; return their models."""
        long_ago, expected = time.monotonic() - FORGET_S, self.expected
        gone = [model for model, since in self._empty_since.items() if since < long_ago]
        gone = [model for model in gone if expected is not None and model not in expected and model not in wanted]
        for model in gone:
            del self.pools[model], self._empty_since[model]
        return gone

    def _models_changed(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def wait_for_models(self) -> None:
        """Return once a worker has joined, or the expected models have changed."""
        await self._news.wait()

    def version(self, now: float) -> str:
        """The version of the brief list of workers: of two equal ones, gateways need to read one only."""
        tripped = [pool.breakers.tripped(now) for pool in self.pools.values()]
        breakers = blake2b(repr(tripped).encode(), digest_size=8).hexdigest()  # they also change by time
        return f"{self._process}-{self._changes}-{breakers}"

    def connected(self, worker_id: str) -> bool:
        """Whether the worker's state stream shows that it is alive, whatever Redis says."""
        pool = self._homes.get(worker_id)
        return pool is not None and pool.is_live(worker_id)

    def find(self, worker_id: str) -> tuple[Pool, Member] | None:
        """A worker and its pool, by worker id."""
        pool = self._homes.get(worker_id)
        return (pool, pool.members[worker_id]) if pool else None

    def has_live_workers(self) -> bool:
        """Whether any state stream is alive."""
        return any(pool.is_live(worker_id) for worker_id, pool in self._homes.items())

    def pool(self, model: str) -> Pool:
        """The pool of `model`; '' selects the only one. The pool may be empty, while its workers start or restart.

        Raises UnknownModelError, or UnavailableError while this router knows no model, or not the expected ones.
        """
        if model in self.pools:
            return self.pools[model]
        known = [name for name, pool in self.pools.items() if pool.members] or list(self.pools)
        if not known or self.expected is None:
            raise UnavailableError(f"no worker serves {model or 'any model'} now")
        if model:
            raise UnknownModelError(f"model: {model!r} is not served; served are {', '.join(sorted(known))}")
        if len(known) > 1:
            raise UnknownModelError(f"model: name one of {', '.join(sorted(known))}")
        return self.pools[known[0]]

    def known(self, model: str) -> str | None:
        """The name of the model that a request means; None if it is not known, or not one."""
        try:
            return self.pool(model).model
        except (UnknownModelError, UnavailableError):
            return None

    def report(self, outcome: routing_pb2.Outcome) -> None:
        """Count a gateway's report of a request's outcome. Only faults count against a worker."""
        pool = self._homes.get(outcome.worker_id)
        if pool is None:
            return
        match outcome.result:
            case routing_pb2.Outcome.RESULT_OK | routing_pb2.Outcome.RESULT_BEGUN:
                pool.success(outcome.worker_id, outcome.incarnation)
            case routing_pb2.Outcome.RESULT_FAULT:
                pool.fault(outcome.worker_id, outcome.incarnation)
            case _:
                pool.no_verdict(outcome.worker_id, outcome.incarnation)
        self._changed()
