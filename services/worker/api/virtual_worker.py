"""A virtual worker: routers and gateways see each engine of a process as a worker of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

from services.common.heap import freeze_started
from services.common.keys import RedisKeys
from services.common.leases import Lease, LeaseKeeper
from services.common.lifecycle import GaveUpError, StartupError
from services.common.phases import phase_name
from services.common.redis_client import open_redis
from services.common.rpc import Health, bind, new_server
from services.common.settings import ServiceSettings
from services.common.tasks import retried, running_loops
from services.common.tls.credentials import Tls
from services.worker.api.adapter_pins import follow_pins
from services.worker.api.card import EngineIdentity
from services.worker.api.gateways import Gateways
from services.worker.api.readiness import Readiness
from services.worker.api.servicer import WorkerServicer
from services.worker.engine.base import Engine

REDIS_TIMEOUT_S = 0.5
STREAMS_END_S = 2.0
LIVENESS = "liveness"  # a name for grpc.health.v1: SERVING as long as the process answers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VirtualWorker:
    """One engine under its own id, port and lease; a process can serve several."""

    engine: Engine
    identity: EngineIdentity
    port: int  # gRPC port; 0 picks a free port
    drain_s: float  # seconds that running requests continue after `stop` before they are handed off
    handed_off: Callable[[pb.Handoff.Reason], None]  # called for every request that is handed off
    tls: Tls | None = None
    merge_s: float = 0.0  # messages to a gateway are at least so far apart, unless they are urgent

    async def serve(self, settings: ServiceSettings, readiness: Readiness, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain. Raises the engine's StartupError and GaveUpError."""
        engine, identity = self.engine, self.identity
        gateways = Gateways(engine, self.handed_off, self.merge_s)
        server = new_server(tls=self.tls)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(identity, engine, gateways), server)
        health = Health(server, [pb.DESCRIPTOR.services_by_name["Worker"].full_name])
        await health.set_serving(False)
        await health.set_status(LIVENESS, True)
        port = bind(server, settings.host, self.port, self.tls)
        await server.start()
        redis, address = open_redis(settings.redis, REDIS_TIMEOUT_S), settings.advertised(port)
        keys = RedisKeys(settings.namespace)
        lease = LeaseKeeper(
            redis,
            keys,
            settings.redis,
            lambda: Lease(identity.worker_id, identity.incarnation, address, identity.model, phase_name(engine.phase)),
        )

        def waits_for() -> str:
            """The worker needs its first lease to be found; an unreachable Redis does not matter later."""
            return lease.waits_for if _ready(engine) else f"{phase_name(engine.phase)}: {engine.detail}"

        readiness.depends_on(waits_for)
        log.info("listening", extra={"worker_id": identity.worker_id, "address": address})

        running = asyncio.create_task(engine.run(), name="engine")
        loops = [_follow_phase(engine, health, lease.written), lease.run()]
        if engine.model.adapter_slots:
            pins = partial(follow_pins, redis, keys, settings.redis, identity.model, engine.pin_adapters)
            loops.append(retried(pins))
        try:
            async with running_loops(stop, *loops):
                try:
                    await _first(asyncio.create_task(stop.wait()), running)
                    await engine.drain(self.drain_s)
                finally:
                    gateways.close()
                    await server.stop(STREAMS_END_S)
        finally:
            await redis.aclose()
            await _end(running)


async def serve_all(
    workers: Sequence[VirtualWorker], settings: ServiceSettings, readiness: Readiness, stop: asyncio.Event
) -> None:
    """Serve the workers of a process, which is ready when all are. The first error ends all and is raised."""
    freeze_started()
    each = [Readiness() for _ in workers]
    readiness.depends_on(lambda: next((reason for ready in each if (reason := ready())), ""))
    tasks = [
        asyncio.create_task(worker.serve(settings, ready, stop), name=worker.identity.worker_id)
        for worker, ready in zip(workers, each, strict=True)
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        stop.set()
        await asyncio.wait(tasks)


def _ready(engine: Engine) -> bool:
    """Whether the worker serves, or will after a wake, for which routers must find it."""
    return engine.phase in {pb.PHASE_SERVING, pb.PHASE_SLEEPING, pb.PHASE_WAKING}


async def _follow_phase(engine: Engine, health: Health, registered: asyncio.Event) -> None:
    """Set health to SERVING exactly while the worker is ready, once it is registered."""
    await registered.wait()
    with engine.changes.watch() as changed:
        reported = False
        while True:
            if _ready(engine) != reported:
                reported = _ready(engine)
                await health.set_serving(reported)
            await changed.wait()
            changed.clear()


async def _first(stop: asyncio.Task[bool], running: asyncio.Task[None]) -> None:
    """Wait for the stop signal or for the engine's end, whose error is raised."""
    await asyncio.wait((stop, running), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if running.done():
        running.result()


async def _end(running: asyncio.Task[None]) -> None:
    """Cancel once and wait: stopping the ranks takes time, and a second cancellation would leave ranks running."""
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError, StartupError, GaveUpError):
        await running
