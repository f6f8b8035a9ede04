"""Wires one worker server: settings, gRPC, ranks, lease, metrics; and takes it apart again on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

from services.common.heap import freeze_started
from services.common.keys import RedisKeys
from services.common.leases import Lease, LeaseKeeper
from services.common.lifecycle import StartupError, run_service
from services.common.logs import configure_logging
from services.common.metrics import serve_metrics
from services.common.redis_client import open_redis
from services.common.rpc import Health, bind, new_server
from services.common.tasks import end_tasks
from services.common.tracing import tracing
from services.worker.server.assembly import Assembly
from services.worker.server.block_puller import Puller
from services.worker.server.core import Identity, WorkerCore
from services.worker.server.metrics import WorkerMetrics
from services.worker.server.model_files import read_model_files
from services.worker.server.recovery import RankKeeper, Ranks
from services.worker.server.servicer import WorkerServicer
from services.worker.server.settings import WorkerSettings
from services.worker.server.startup import group_config, model_folder
from services.worker.server.transfer_metrics import TransferMetrics
from services.worker.supervision.rank_group import RankGroup, RankGroupConfig

REDIS_TIMEOUT_S = 0.5
STREAMS_END_S = 2.0
LIVENESS = "liveness"  # a name for grpc.health.v1: SERVING as long as the process answers

log = logging.getLogger(__name__)


def read_settings() -> WorkerSettings:
    """From the environment; raises StartupError naming the variable."""
    try:
        return WorkerSettings()  # type: ignore[call-arg]  # fields come from the environment
    except ValidationError as error:
        first = error.errors()[0]
        name = f"RYZANSTEIN_{'_'.join(str(part) for part in first['loc']).upper()}"
        raise StartupError(f"{name}: {first['msg']}") from error


async def serve(
    settings: WorkerSettings, stop: asyncio.Event, make_ranks: Callable[[RankGroupConfig], Ranks] = RankGroup
) -> None:
    """Serve until `stop` is set, then drain and leave. Raises StartupError when the ranks never start."""
    folder = await asyncio.to_thread(model_folder, settings.model, settings.revision)
    files = await asyncio.to_thread(read_model_files, folder)
    config = group_config(settings, folder)
    identity = Identity(
        settings.worker_id, str(uuid.uuid4()), settings.served_model_name or Path(settings.model).name or folder.name
    )
    core = WorkerCore(identity, settings.max_waiting, Puller(settings.pull_timeout_s, settings.pull_mb_per_s * 1e6))
    metrics = WorkerMetrics(core.counters, core.state)
    metrics.registry.register(TransferMetrics(core.puller.totals, core.source.sent))
    ranks = make_ranks(config)
    assembly = Assembly(settings, files, config, core, metrics, ranks)

    server = new_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(core, lambda: assembly.card), server)
    health = Health(server, [pb.DESCRIPTOR.services_by_name["Worker"].full_name])
    await health.set_serving(False)
    await health.set_status(LIVENESS, True)
    port = bind(server, settings.host, settings.worker_port)
    await server.start()
    freeze_started()
    log.info("listening", extra={"worker_id": settings.worker_id, "address": settings.advertised(port)})

    with (
        tracing("worker", settings.worker_id),
        serve_metrics(settings.host, settings.metrics_port, metrics.registry, lambda: core.serving),
    ):
        keeper = asyncio.create_task(RankKeeper(ranks, core, assembly.engage).run(), name="ranks")
        beside = [
            asyncio.create_task(_follow_phase(core, health), name="health"),
            asyncio.create_task(_keep_lease(settings, core, port), name="lease"),
        ]
        try:
            await _first(asyncio.create_task(stop.wait()), keeper)
            await core.drain(settings.drain_s)
        finally:
            core.close()
            await core.puller.close()
            await server.stop(STREAMS_END_S)
            await end_tasks(beside)
            await _end(keeper)


async def _follow_phase(core: WorkerCore, health: Health) -> None:
    """Health is SERVING exactly while the phase is."""
    with core.changes.watch() as changed:
        told = False
        while True:
            if core.serving != told:
                told = core.serving
                await health.set_serving(told)
            await changed.wait()
            changed.clear()


async def _keep_lease(settings: WorkerSettings, core: WorkerCore, port: int) -> None:
    identity = core.identity
    address = settings.advertised(port)

    def lease() -> Lease:
        return Lease(identity.worker_id, identity.incarnation, address, identity.model, core.phase_name)

    redis = open_redis(settings.redis_url, REDIS_TIMEOUT_S)
    try:
        await LeaseKeeper(redis, RedisKeys(settings.namespace), lease).run()
    finally:
        await redis.aclose()


async def _first(stop: asyncio.Task[bool], keeper: asyncio.Task[None]) -> None:
    """Until the stop signal; what ends the keeper ends us."""
    await asyncio.wait((stop, keeper), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if keeper.done():
        keeper.result()


async def _end(keeper: asyncio.Task[None]) -> None:
    """Cancel once: the ranks take their time to stop, and a second cancellation would leave them behind."""
    keeper.cancel()
    with contextlib.suppress(asyncio.CancelledError, StartupError):
        await keeper


def main() -> None:
    """Entry point of `python -m services.worker.server`."""
    configure_logging("worker", "info")

    async def run(stop: asyncio.Event) -> None:
        settings = read_settings()
        configure_logging("worker", settings.log_level)
        await serve(settings, stop)

    run_service(run)
