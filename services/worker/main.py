"""Wires one worker process: settings, metrics, the model, its engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from services.common.download_report import reporting
from services.common.gguf_files import model_name
from services.common.heap import share_heap
from services.common.lifecycle import StartupError, run_service
from services.common.metrics import new_registry, serve_metrics
from services.common.tls.credentials import Tls, export_end
from services.common.tracing import tracing
from services.compute.model.loading.hub import Download
from services.worker.api.card import EngineIdentity, SharedHost
from services.worker.api.energy import EnergyMetrics, nvml_devices, rapl_packages
from services.worker.api.life_metrics import LifeMetrics
from services.worker.api.metrics import EngineTotals, WorkerMetrics
from services.worker.api.readiness import Readiness
from services.worker.api.transfer_metrics import TransferMetrics
from services.worker.api.virtual_worker import VirtualWorker, serve_all
from services.worker.engine.base import Engine, LifeObserver, StepObserver
from services.worker.native.opening import open_native
from services.worker.native.startup import model_folder, model_revision
from services.worker.settings import WorkerSettings
from services.worker.simulated.opening import open_model, open_simulated
from services.worker.vllm.follower import follow
from services.worker.vllm.nodes import node_of
from services.worker.vllm.opening import open_vllm

OpenEngine = Callable[[WorkerSettings, Path, StepObserver, LifeObserver, Tls | None], Awaitable[Engine]]

ENGINES: Mapping[str, OpenEngine] = {"native": open_native, "vllm": open_vllm, "simulated": open_simulated}


async def serve(settings: WorkerSettings, stop: asyncio.Event, open_engine: OpenEngine | None = None) -> None:
    """Serve until `stop` is set, then drain. Raises StartupError when the engine never starts.

    Raises GaveUpError when its ranks are lost and do not start again in time.
    """
    registry, readiness, tls = new_registry("worker", settings.telemetry_names), Readiness(), settings.open_tls()
    export_end(registry, tls)
    with (
        tracing("worker", settings.worker_id),  # before a tracer is asked for
        serve_metrics(settings.host, settings.metrics_port, registry, readiness),
    ):
        folder = await _fetch(settings, readiness, stop)
        if folder is None:
            return
        node = node_of(settings)
        if node is not None and node.rank:
            await follow(node, settings.model_copy(update={"model": str(folder)}), readiness.depends_on, stop)
            return
        life = LifeMetrics(registry)
        engines = await _open_engines(settings, folder, WorkerMetrics(registry), life, tls, open_engine)
        name = settings.served_model_name or model_name(settings.model) or folder.name
        if name in settings.adapters:
            raise StartupError(f"RYZANSTEIN_ADAPTERS {name}: the model itself has this name")
        life.describe(name, model_revision(settings.revision, folder), engines[0].model, version("ryzanstein"))
        registry.register(EngineTotals([each.counters for each in engines], [each.state for each in engines]))
        registry.register(TransferMetrics([each.transfers for each in engines]))
        registry.register(EnergyMetrics(rapl_packages() | nvml_devices()))
        workers = [
            VirtualWorker(
                engine,
                _identity(settings, worker_id, name),
                settings.worker_port if engine is engines[0] else 0,
                settings.drain_s,
                life.handed_off,
                tls,
                settings.step_merge_ms / 1e3,
            )
            for worker_id, engine in zip(settings.worker_ids, engines, strict=True)
        ]
        await serve_all(workers, settings, readiness, stop)


async def _fetch(settings: WorkerSettings, readiness: Readiness, stop: asyncio.Event) -> Path | None:
    """The model's folder after its download, of which `/readyz` and routers hear; None if `stop` was set first."""
    async with reporting(settings, settings.served_model_name or model_name(settings.model)) as reports:

        def fetch(begins: Callable[[object], None]) -> Coroutine[Any, Any, Path]:
            def both(download: Download) -> None:
                begins(download)
                reports(download)

            return model_folder(settings.model, settings.revision, both)

        return await readiness.fetch_model(settings.model, fetch, stop)


def _identity(settings: WorkerSettings, worker_id: str, name: str) -> EngineIdentity:
    """The identity of a worker that starts now."""
    shared = SharedHost(
        settings.memory_host, settings.max_awake, settings.idle_sleep_s, settings.pinned, settings.priority
    )
    incarnation, now = str(uuid.uuid4()), int(time.time())
    recommends = settings.sampling_defaults
    return EngineIdentity(worker_id, incarnation, name, now, recommends, shared, settings.node)


async def _open_engines(
    settings: WorkerSettings,
    folder: Path,
    steps: StepObserver,
    life: LifeObserver,
    tls: Tls | None,
    open_engine: OpenEngine | None,
) -> Sequence[Engine]:
    """The engines of the process, one for each of its workers. Raises StartupError."""
    if settings.virtual_workers > 1:
        model = await open_model(settings, folder, tls)
        return [model.engine(steps, life) for _ in settings.worker_ids]
    opened = open_engine or ENGINES[settings.engine]
    return [await opened(settings, folder, steps, life, tls)]


def main() -> None:
    """Entry point of `python -m services.worker`."""
    share_heap()
    run_service("worker", WorkerSettings, serve)
