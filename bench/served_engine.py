"""A worker's engine behind its gRPC server, as in an installation, whose steps are recorded.

The server runs in this process. Its gateway, router and coordinator are another process (`bench.worker_peers`), so a
step takes as long as in an installation: publishing its tokens and its state is a part of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ryzanstein.v1 import worker_pb2_grpc

from bench.worker_cores import WorkerCores
from bench.worker_peers import DONE
from services.common.heap import freeze_started
from services.common.metrics import new_registry
from services.common.rpc import bind, new_server
from services.common.tasks import end_tasks
from services.compute.ranks.config import RankGroupConfig
from services.worker.api.card import EngineIdentity
from services.worker.api.gateways import Gateways
from services.worker.api.life_metrics import LifeMetrics
from services.worker.api.metrics import WorkerMetrics
from services.worker.api.servicer import WorkerServicer
from services.worker.engine.base import OutputSink, StepReport
from services.worker.engine.request import EngineRequest
from services.worker.native.engine import NativeEngine
from services.worker.native.opening import describe_engine
from services.worker.native.startup import read_model
from services.worker.native.step_cost import StepTimer
from services.worker.process.rank_group import RankGroup
from services.worker.settings import WorkerSettings

_UNCUT_S = 3600.0  # seconds by which prompts may lengthen a step: none is cut for the pace of others


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step of the engine."""

    ended: float  # by time.perf_counter, with its outputs released
    n_rows: int


class _Steps(WorkerMetrics):
    """Counts steps as a worker does, and records them."""

    recorded: list[RecordedStep]

    def on_step(self, report: StepReport) -> None:
        super().on_step(report)
        self.recorded.append(RecordedStep(time.perf_counter(), report.n_rows))


class _Engine(NativeEngine):
    """Takes whole prompts in a step, as many as there is room for."""

    submitted = 0.0  # by time.perf_counter: the last request

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        self.submitted = time.perf_counter()
        super().submit(request, sink)

    def take_whole_prompts(self) -> None:
        """Called before the start."""
        self._step_timer = StepTimer(_UNCUT_S)

    async def serves(self) -> None:
        """Wait until it has started, and has no step in flight."""
        with self.changes.watch() as changed:
            while self._pump is None or not self._pump.scheduler.idle:
                await changed.wait()
                changed.clear()


class ServedEngine:
    """A served engine, and the process that sends it requests."""

    def __init__(self, engine: _Engine, steps: _Steps, peers: Process) -> None:
        self._engine, self._steps, self._peers = engine, steps, peers

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model knows."""
        assert self._engine.facts is not None
        return self._engine.facts.vocab_size

    async def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> tuple[float, list[RecordedStep]]:
        """Compute requests that come together; returns when the last one arrived (time.perf_counter), and their steps.

        Raises RuntimeError if they are not finished.
        """
        self._steps.recorded = []
        assert self._peers.stdin is not None
        assert self._peers.stdout is not None
        wanted = {"prompts": [list(prompt) for prompt in prompts], "output_tokens": output_tokens}
        self._peers.stdin.write(json.dumps(wanted).encode() + b"\n")
        await self._peers.stdin.drain()
        if (await self._peers.stdout.readline()).decode().strip() != DONE:
            raise RuntimeError("the process that sends requests has ended; its error is above")
        await self._engine.serves()
        return self._engine.submitted, self._steps.recorded


@asynccontextmanager
async def open_served(config: RankGroupConfig, cores: WorkerCores) -> AsyncGenerator[ServedEngine]:
    """Start an engine on the cores of workers, where this process goes for good, and its server."""
    os.sched_setaffinity(0, cores.workers)
    files = await asyncio.to_thread(read_model, Path(config.model_path))
    registry = new_registry("worker")
    steps = _Steps(registry)
    steps.recorded = []
    settings = WorkerSettings.model_validate({"model": config.model_path})
    described, model = await describe_engine(settings, files, config, None)
    described = replace(described, prefill_step_s=_UNCUT_S)
    engine = _Engine(described, model, RankGroup(config), steps, LifeMetrics(registry))
    engine.take_whole_prompts()
    server, gateways = new_server(), Gateways(engine, lambda _: None)
    identity = EngineIdentity("recorded", str(uuid.uuid4()), config.model_path, int(time.time()))
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(identity, engine, gateways), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    running = asyncio.create_task(engine.run(), name="engine")
    starting = asyncio.create_task(engine.serves())
    try:
        await asyncio.wait((running, starting), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()  # raises why it did not start
        freeze_started()  # as a worker does
        peers = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.worker_peers", str(port)),
            stdin=PIPE,
            stdout=PIPE,
            preexec_fn=lambda: os.sched_setaffinity(0, cores.others),
        )
        try:
            yield ServedEngine(engine, steps, peers)
        finally:
            peers.kill()
            await peers.wait()
    finally:
        gateways.close()
        await server.stop(0)
        await end_tasks([starting, running])
