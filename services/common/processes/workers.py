"""Several worker servers under one supervisor, of which only some may be awake."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc

from services.common.processes.process import Probe
from services.common.rpc import open_channel
from services.common.tls.credentials import Tls

_TIMEOUT_S = 1.0
_LIVENESS_TIMEOUT_S = 3.0  # on a busy machine an answer is slow
_AGAIN_S = 0.2  # pause after a busy worker has refused to sleep
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

WorkerT = TypeVar("WorkerT")


def grpc_serving(address: str, to: str = "", tls: Tls | None = None) -> Probe:
    """Ready once grpc.health.v1 returns SERVING. `to`: the component, with `tls`."""
    channels: list[grpc.aio.Channel] = []

    async def probe() -> bool:
        if not channels:
            channels.append(open_channel(address, to=to, tls=tls))
        stub = health_pb2_grpc.HealthStub(channels[0])
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)  # type: ignore[attr-defined]
        except grpc.aio.AioRpcError:
            return False
        serving = bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        if serving:
            await channels.pop().close()
        return serving

    return probe


def grpc_alive(address: str, to: str = "", tls: Tls | None = None) -> Probe:
    """Alive if grpc.health.v1 returns any answer, since it comes from the event loop."""

    async def probe() -> bool:
        async with open_channel(address, to=to, tls=tls) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            try:
                await stub.Check(request, timeout=_LIVENESS_TIMEOUT_S)  # type: ignore[attr-defined]
            except grpc.aio.AioRpcError as error:
                return error.code() not in _SILENT
        return True

    return probe


async def start_in_turns(
    workers: Sequence[WorkerT],
    max_awake: int,
    priority: Callable[[WorkerT], float],
    start: Callable[[Sequence[WorkerT]], Awaitable[None]],
    sleep: Callable[[WorkerT], Awaitable[None]],
) -> None:
    """Start all workers and wait until they are ready, with at most `max_awake` awake at a time; 0: no limit.

    The last ones start first, and each sleeps before the next one starts. So the first ones of the highest priority are
    awake at the end. `start` returns once the workers are ready. Pinned workers, of an infinite priority, never sleep.
    """
    order = list(reversed(workers))
    order.sort(key=lambda worker: (priority(worker) < math.inf, priority(worker)))
    first = order[:max_awake] if max_awake else order
    awake = [worker for worker in first if priority(worker) < math.inf]
    await start(first)
    for worker in order[len(first) :]:
        await sleep(awake.pop(0))
        await start([worker])
        awake.append(worker)


async def put_to_sleep(address: str, tls: Tls | None = None) -> None:
    """Put a worker to sleep once it is idle. Raises grpc.aio.AioRpcError."""
    async with open_channel(address, to="worker", tls=tls) as channel:
        while True:
            try:
                await worker_pb2_grpc.WorkerStub(channel).Sleep(worker_pb2.SleepRequest(level=1))
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                await asyncio.sleep(_AGAIN_S)
            else:
                return
