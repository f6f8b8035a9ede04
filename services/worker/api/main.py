"""Wires one worker server: settings, gRPC, ranks, lease, metrics; and takes it apart again on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from prometheus_client import CollectorRegistry
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

from services.common.heap import freeze_started
from services.common.keys import RedisKeys
from services.common.leases import Lease, LeaseKeeper
from services.common.lifecycle import GaveUpError, StartupError, run_service
from services.common.metrics import new_registry, serve_metrics
from services.common.redis_client import open_redis
from services.common.rpc import Health, bind, new_server
from services.common.tasks import end_tasks
from services.common.tracing import tracing
from services.worker.api.card import Identity, WorkerModel
from services.worker.api.gateways import Gateways
from services.worker.api.life_metrics import LifeMetrics
from services.worker.api.metrics import EngineTotals, WorkerMetrics
from services.worker.api.model_files import read_model_files
from services.worker.api.readiness import Readiness
from services.worker.api.servicer import WorkerServicer
from services.worker.api.settings import WorkerSettings
from services.worker.api.startup import group_config, model_revision
from services.worker.api.state import StateForRouters
from services.worker.api.transfer_metrics import TransferMetrics
from services.worker.engine.base import Ranks
from services.worker.engine.loop import EngineConfig, EngineLoop
from services.worker.kv_transfer.puller import Puller
from services.worker.kv_transfer.source import BlockSource
from services.worker.process.rank_group import RankGroup, RankGroupConfig

REDIS_TIMEOUT_S = 0.5
STREAMS_END_S = 2.0
LIVENESS = "liveness"  # a name for grpc.health.v1: SERVING as long as the process answers

log = logging.getLogger(__name__)


async def serve(
    settings: WorkerSettings, stop: asyncio.Event, make_ranks: Callable[[RankGroupConfig], Ranks] = RankGroup
) -> None:
    """Serve until `stop` is set, then drain and leave. Raises StartupError when the ranks never start.

    Raises GaveUpError when they are lost and do not come back in time.
    """
    registry, readiness = new_registry("worker"), Readiness()
    with (
        tracing("worker", settings.worker_id),  # before a tracer is asked for
        serve_metrics(settings.host, settings.metrics_port, registry, readiness),
    ):
        folder = await readiness.fetch_model(settings, stop)
        if folder is not None:
            await _serve_model(settings, stop, make_ranks, folder, registry, readiness)


async def _serve_model(
    settings: WorkerSettings,
    stop: asyncio.Event,
    make_ranks: Callable[[RankGroupConfig], Ranks],
    folder: Path,
    registry: CollectorRegistry,
    readiness: Readiness,
) -> None:
    files = await asyncio.to_thread(read_model_files, folder)
    config = group_config(settings, folder, files)
    identity = Identity(
        settings.worker_id, str(uuid.uuid4()), settings.served_model_name or Path(settings.model).name or folder.name
    )
    model = WorkerModel(identity, files, config, settings.sampling_defaults, int(time.time()))
    life = LifeMetrics(registry)
    life.describe(identity.model, model_revision(settings.revision, folder), config, version("ryzanstein"))
    puller = Puller(settings.pull_timeout_s, settings.pull_mb_per_s * 1e6)
    engine = EngineLoop(
        EngineConfig(
            config,
            model.hash_root,
            settings.max_waiting,
            settings.max_batched_tokens,
            settings.prefill_step_ms / 1e3,
            settings.recovery_limit_s,
        ),
        make_ranks(config),
        puller,
        WorkerMetrics(registry),
        life,
    )
    gateways, state = Gateways(engine, model), StateForRouters(identity, engine)
    source = BlockSource(identity.incarnation, lambda: engine.store)
    registry.register(EngineTotals(engine.counters, state))
    registry.register(TransferMetrics(puller.totals, source.sent))

    server = new_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(model, engine, gateways, state, source), server)
    health = Health(server, [pb.DESCRIPTOR.services_by_name["Worker"].full_name])
    await health.set_serving(False)
    await health.set_status(LIVENESS, True)
    port = bind(server, settings.host, settings.worker_port)
    await server.start()
    freeze_started()
    redis, address = open_redis(settings.redis, REDIS_TIMEOUT_S), settings.advertised(port)
    lease = LeaseKeeper(
        redis,
        RedisKeys(settings.namespace),
        settings.redis,
        lambda: Lease(identity.worker_id, identity.incarnation, address, identity.model, engine.phase_name),
    )

    def waits_for() -> str:
        """Nobody finds a worker that has never written its lease; later a Redis that is away takes nothing away."""
        return lease.waits_for if engine.serving else f"{engine.phase_name}: {engine.detail}"

    readiness.depends_on(waits_for)
    log.info("listening", extra={"worker_id": settings.worker_id, "address": address})

    keeper = asyncio.create_task(engine.run(), name="engine")
    beside = [
        asyncio.create_task(_follow_phase(engine, health, lease.written), name="health"),
        asyncio.create_task(lease.run(), name="lease"),
    ]
    try:
        await _first(asyncio.create_task(stop.wait()), keeper)
        await engine.drain(settings.drain_s)
    finally:
        gateways.close()
        await puller.close()
        await server.stop(STREAMS_END_S)
        await end_tasks(beside)
        await redis.aclose()
        await _end(keeper)


async def _follow_phase(engine: EngineLoop, health: Health, registered: asyncio.Event) -> None:
    """Health is SERVING exactly while the phase is, once the worker can be found."""
    await registered.wait()
    with engine.changes.watch() as changed:
        told = False
        while True:
            if engine.serving != told:
                told = engine.serving
                await health.set_serving(told)
            await changed.wait()
            changed.clear()


async def _first(stop: asyncio.Task[bool], keeper: asyncio.Task[None]) -> None:
    """Until the stop signal; what ends the keeper ends us."""
    await asyncio.wait((stop, keeper), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if keeper.done():
        keeper.result()


async def _end(keeper: asyncio.Task[None]) -> None:
    """Cancel once: the ranks take their time to stop, and a second cancellation would leave them behind."""
    keeper.cancel()
    with contextlib.suppress(asyncio.CancelledError, StartupError, GaveUpError):
        await keeper


def main() -> None:
    """Entry point of `python -m services.worker.api`."""
    run_service("worker", WorkerSettings, serve)
