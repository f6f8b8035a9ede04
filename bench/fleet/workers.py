"""One process of simulated workers, whose faults come as lines: `lose INDEX` or `stall INDEX SECONDS`."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from services.common.lifecycle import run_service
from services.common.metrics import new_registry
from services.worker.api.card import EngineIdentity
from services.worker.api.life_metrics import LifeMetrics
from services.worker.api.metrics import WorkerMetrics
from services.worker.api.readiness import Readiness
from services.worker.api.virtual_worker import VirtualWorker, serve_all
from services.worker.process.failure import FailureKind, RankFailure
from services.worker.settings import WorkerSettings
from services.worker.simulated.opening import SimulatedEngine, open_model


async def serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Serve the workers of the settings until `stop` is set."""
    folder, registry, tls = Path(settings.model), new_registry("worker"), settings.open_tls()
    model, life = await open_model(settings, folder, tls), LifeMetrics(registry)
    steps = WorkerMetrics(registry)
    engines = [model.engine(steps, life) for _ in settings.worker_ids]
    workers = [
        VirtualWorker(
            engine,
            EngineIdentity(worker_id, str(uuid.uuid4()), folder.name, int(time.time())),
            0,
            settings.drain_s,
            life.handed_off,
            tls,
            settings.step_merge_ms / 1e3,
        )
        for worker_id, engine in zip(settings.worker_ids, engines, strict=True)
    ]
    reader = asyncio.create_task(_follow(engines))
    await serve_all(workers, settings, Readiness(), stop)
    reader.cancel()


async def _follow(engines: Sequence[SimulatedEngine]) -> None:
    """Execute the lines of stdin."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        match line.decode().split():
            case ["lose", index]:
                engines[int(index)].ranks.lose(RankFailure(0, FailureKind.EXITED, "a fault of the bench"))
            case ["stall", index, seconds]:
                engines[int(index)].ranks.stall(float(seconds))
            case words:
                raise ValueError(f"unknown fault: {' '.join(words)}")


if __name__ == "__main__":
    run_service("worker", WorkerSettings, serve)
