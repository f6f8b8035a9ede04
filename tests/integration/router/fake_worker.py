"""A worker without a model: real gRPC, real lease, and whatever state and cache a test gives it.

As a module it is a process of its own, to be killed: `python -m tests.integration.router.fake_worker ID REDIS_URL`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence

import grpc.aio
import redis.asyncio as redis
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

from services.common.keys import RedisKeys
from services.common.leases import Lease, LeaseKeeper, LeaseTable
from services.common.ports import free_port
from services.common.redis_client import RedisAccess
from services.common.rpc import bind, new_server
from services.common.tasks import end_tasks
from services.common.tls.credentials import Tls

MODEL = "tiny"
HEARTBEAT_S = 2.0


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, worker_id: str, model: str = MODEL, *, kept_events: int = 1000) -> None:
        self.worker_id = worker_id
        self.model = model
        self.incarnation = uuid.uuid4().hex
        self.state = pb.WorkerState(
            worker_id=worker_id,
            incarnation=self.incarnation,
            phase=pb.PHASE_SERVING,
            prefill_tokens_per_s=10_000,
            decode_step_ms=20,
            kv_blocks_total=1000,
            max_request_tokens=16_000,
        )
        self.address = ""
        self.drains: list[int] = []
        self.refuses = ""  # why it does not drain
        self.cannot_wake = ""  # why its memory does not suffice
        self.woken_phase = pb.PHASE_SERVING  # the phase that follows the order to wake
        self.naps: list[str] = []  # the calls that changed its phase
        self.promised: list[int] = []  # bytes that others have yet to take, by calls that woke it
        self.cannot_sleep = ""
        self.refused_sleeps = 0
        self.stalled = asyncio.Event()  # while set, the worker sends no states
        self.held: dict[int, None] = {}
        self.syncs: list[pb.KvSyncRequest] = []
        self._events: deque[pb.KvEvent] = deque(maxlen=kept_events)
        self.next_seq = 0
        self._watchers: set[asyncio.Event] = set()
        self._stack = contextlib.AsyncExitStack()
        self._server: grpc.aio.Server | None = None

    # --- for tests

    def update(self, **fields: object) -> None:
        self.state.MergeFrom(pb.WorkerState(**fields))  # type: ignore[arg-type]
        for name, value in fields.items():
            if not value:
                self.state.ClearField(name)  # type: ignore[arg-type]
        self._tell()

    def store(self, hashes: Sequence[int]) -> None:
        self.held |= dict.fromkeys(hashes)
        self._append(pb.KvEvent(stored=hashes))

    def evict(self, hashes: Sequence[int]) -> None:
        for block in hashes:
            del self.held[block]
        self._append(pb.KvEvent(removed=hashes))

    def offload(self, place: pb.KvPlace, hashes: Sequence[int]) -> None:
        self._append(pb.KvEvent(offloaded=hashes, place=place))

    def drop(self, place: pb.KvPlace, hashes: Sequence[int]) -> None:
        self._append(pb.KvEvent(dropped=hashes, place=place))

    def clear(self) -> None:
        self.held.clear()
        self._append(pb.KvEvent(cleared=True))

    def skip_events(self, n: int) -> None:
        """Drop events before they are sent, so that the next one leaves a gap."""
        self.next_seq += n
        self._events.clear()

    def _append(self, event: pb.KvEvent) -> None:
        self._events.append(event)
        self.next_seq += 1
        self._tell()

    def _tell(self) -> None:
        self.state.seq += 1
        for watcher in self._watchers:
            watcher.set()

    # The server

    async def start(
        self,
        client: redis.Redis | None = None,
        keys: RedisKeys | None = None,
        port: int | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Listen, by default on a port that it can have again after a break; a lease is there on return."""
        self._server = new_server(tls=tls)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1', free_port() if port is None else port, tls)}"
        await self._server.start()
        if client is not None:
            keys = keys or RedisKeys("default")
            await LeaseTable(client, keys).write(self.lease())
            keeper = asyncio.create_task(LeaseKeeper(client, keys, RedisAccess("unix:///a"), self.lease).run())
            self._stack.push_async_callback(end_tasks, [keeper])

    def lease(self) -> Lease:
        return Lease(self.worker_id, self.incarnation, self.address, self.model, "serving")

    async def stop(self) -> None:
        """Give the lease up and break all streams."""
        await self._stack.aclose()
        if self._server is not None:
            await self._server.stop(None)

    async def break_streams(self) -> None:
        """The server goes, the lease stays."""
        assert self._server is not None
        await self._server.stop(None)

    # The service

    @contextlib.contextmanager
    def _watch(self):  # type: ignore[no-untyped-def]
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            yield changed
        finally:
            self._watchers.discard(changed)

    async def WatchState(self, request, context) -> AsyncIterator[pb.WorkerState]:  # type: ignore[no-untyped-def]  # noqa: N802
        reported = -1
        with self._watch() as changed:
            while True:
                changed.clear()
                if not self.stalled.is_set():
                    yield self.state if self.state.seq != reported else self._heartbeat()
                    reported = self.state.seq
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(random.uniform(0.9, 1.0) * HEARTBEAT_S):  # a fleet does not beat in step
                        await changed.wait()

    def _heartbeat(self) -> pb.WorkerState:
        return pb.WorkerState(
            worker_id=self.worker_id, incarnation=self.incarnation, seq=self.state.seq, unchanged=True
        )

    async def KvSync(self, request, context) -> AsyncIterator[pb.KvEvents]:  # type: ignore[no-untyped-def]  # noqa: N802
        self.syncs.append(request)
        oldest = self.next_seq - len(self._events)
        known = request.incarnation == self.incarnation and oldest <= request.next_seq <= self.next_seq
        with self._watch() as changed:
            reported = request.next_seq
            if not known:
                reported = self.next_seq
                dump = [pb.KvEvent(stored=list(self.held))] if self.held else []
                yield self._batch(reported - len(dump), dump, reset=True)
            elif reported == self.next_seq:
                yield self._batch(reported, [])
            while True:
                changed.clear()
                if fresh := min(self.next_seq - reported, len(self._events)):
                    events = list(self._events)[-fresh:]
                    reported = self.next_seq
                    yield self._batch(reported - fresh, events)
                await changed.wait()

    def _batch(self, first_seq: int, events: list[pb.KvEvent], *, reset: bool = False) -> pb.KvEvents:
        return pb.KvEvents(
            worker_id=self.worker_id, incarnation=self.incarnation, first_seq=first_seq, reset=reset, events=events
        )

    async def Drain(self, request, context) -> pb.DrainResponse:  # type: ignore[no-untyped-def]  # noqa: N802
        if self.refuses:
            await context.abort(grpc.StatusCode.INTERNAL, self.refuses)
        self.drains.append(request.grace_ms)
        self.update(phase=pb.PHASE_DRAINING)
        return pb.DrainResponse(handed_off=2)

    async def Sleep(self, request, context) -> pb.SleepResponse:  # type: ignore[no-untyped-def]  # noqa: N802
        if self.state.phase != pb.PHASE_SLEEPING:
            if self.cannot_sleep:
                self.refused_sleeps += 1
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.cannot_sleep)
            self.naps.append("sleep")
            self.update(phase=pb.PHASE_SLEEPING)
        return pb.SleepResponse()

    async def Wake(self, request, context) -> pb.WakeResponse:  # type: ignore[no-untyped-def]  # noqa: N802
        if self.cannot_wake:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self.cannot_wake)
        if self.state.phase == pb.PHASE_SLEEPING:
            self.naps.append("wake")
            self.promised.append(request.promised_bytes)
            self.update(phase=self.woken_phase)
        return pb.WakeResponse()


async def _main(worker_id: str, redis_url: str) -> None:
    worker = FakeWorker(worker_id)
    worker.store([1, 2, 3])
    await worker.start(redis.from_url(redis_url), RedisKeys("default"))
    print(worker.address, os.getpid(), flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
