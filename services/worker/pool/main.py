"""The supervisor of a pod with several models: a worker server for each, restarted when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass

import grpc.aio
from prometheus_client import CollectorRegistry, Counter

from services.common.heap import freeze_started
from services.common.lifecycle import run_service
from services.common.metrics import new_registry, serve_metrics
from services.common.processes.process import ManagedProcess, ProcessEndedError, ProcessSpec
from services.common.processes.restarts import Restarts
from services.common.processes.workers import grpc_alive, grpc_serving, put_to_sleep, start_in_turns
from services.common.tasks import running_loops
from services.common.tls.credentials import Tls, export_end
from services.worker.pool.settings import PoolSettings

COMPONENT = "worker"
_STOP_S = 12.0  # besides the time for running requests
_LOOK_S = 1.0
_STEADY_LOOK_S = 5.0  # while all workers are ready: each look opens a connection

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelProcess(ProcessSpec):
    """The server of one model."""

    priority: float = 0.0  # infinite: it never sleeps


def lay_out(settings: PoolSettings, tls: Tls | None) -> tuple[ModelProcess, ...]:
    """The workers' processes in the order of the models."""
    loopback = "[::1]" if ":" in settings.host else "127.0.0.1"
    specs = []
    for worker, env in zip(settings.workers(), settings.environments(), strict=True):
        address = f"{loopback}:{worker.worker_port}"
        specs.append(
            ModelProcess(
                name=worker.worker_id,
                command=(sys.executable, "-m", "services.worker"),
                address=address,
                ready=grpc_serving(address, COMPONENT, tls),
                alive=grpc_alive(address, COMPONENT, tls),
                env=env,
                stop_s=settings.drain_s + _STOP_S,
                priority=math.inf if worker.pinned else worker.priority,
            )
        )
    return tuple(specs)


def restart_counter(registry: CollectorRegistry) -> Counter:
    """Restarts by worker."""
    about = "Restarts of a worker in a pod with several models"
    return Counter("ryzanstein_worker_restarts", about, ["worker"], registry=registry)


class ModelProcesses:
    """The workers of one pod. A worker that does not start is tried again, and never keeps the others from serving."""

    def __init__(self, settings: PoolSettings, registry: CollectorRegistry, tls: Tls | None) -> None:
        self._settings, self._tls = settings, tls
        self._workers = tuple(ManagedProcess(spec) for spec in lay_out(settings, tls))
        self._trouble = {worker.spec.name: "has not started yet" for worker in self._workers}
        self._restarts = restart_counter(registry)
        for worker in self._workers:
            self._restarts.labels(worker.spec.name)

    def waits_for(self) -> str:
        """Why a worker is not ready; empty if all are. Called from another thread."""
        return "; ".join(f"{name} {trouble}" for name, trouble in self._trouble.items() if trouble)

    async def run(self, stop: asyncio.Event) -> None:
        """Start the workers in turns and keep them running until `stop` is set, then end them."""
        try:
            async with running_loops(stop, self._run()):
                await stop.wait()
        finally:
            await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:

            async def start(batch: Sequence[ManagedProcess[ModelProcess]]) -> None:
                for worker in batch:
                    await worker.start()
                await asyncio.gather(*(self._first_start(worker) for worker in batch))
                for worker in batch:
                    group.create_task(self._keep_running(worker))

            group.create_task(self._watch())
            group.create_task(_reap(self._workers))
            await start_in_turns(self._workers, self._settings.max_awake, lambda w: w.spec.priority, start, self._sleep)

    async def _first_start(self, worker: ManagedProcess[ModelProcess]) -> None:
        """Return once the worker is ready, has ended, or has taken as long as a start may."""
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await worker.wait_ready()
        except ProcessEndedError as error:
            log.error("%s", error)
        except TimeoutError:
            log.error("%s is not ready after %.0f s", worker.spec.name, self._settings.start_timeout_s)

    async def _keep_running(self, worker: ManagedProcess[ModelProcess]) -> None:
        restarts: Restarts[ModelProcess] = Restarts(
            self._settings.start_timeout_s,
            self._report,
            after=lambda restarted: self._restarts.labels(restarted.spec.name).inc(),
        )
        await restarts.keep_running(worker, ready=worker.ready_after_s is not None)

    def _report(self, name: str, state: str) -> None:
        log.error("%s %s", name, state, extra={"worker_id": name})
        self._trouble[name] = state

    async def _sleep(self, worker: ManagedProcess[ModelProcess]) -> None:
        if worker.ready_after_s is None:
            return  # without a start it holds no memory; of a late one, routers see to it
        try:
            await put_to_sleep(worker.spec.address, self._tls)
        except grpc.aio.AioRpcError as error:
            log.warning("%s does not sleep: %s", worker.spec.name, error.details())

    async def _watch(self) -> None:
        """Ask the workers again and again whether they are ready."""
        while True:
            for worker in self._workers:
                if worker.pid and await worker.spec.ready():
                    self._trouble[worker.spec.name] = ""
                elif not self._trouble[worker.spec.name]:
                    self._trouble[worker.spec.name] = "is not ready"
            await asyncio.sleep(_LOOK_S if self.waits_for() else _STEADY_LOOK_S)


async def _reap(workers: Sequence[ManagedProcess[ModelProcess]]) -> None:
    """Reap the orphans of killed workers again and again."""
    while True:
        await asyncio.sleep(_LOOK_S)
        reap_orphans({worker.pid for worker in workers})


def reap_orphans(own: Container[int]) -> None:
    """Reap ended children that a container's first process has inherited; processes of `own` are others' to reap."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


async def serve(settings: PoolSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set."""
    registry, tls = new_registry("worker"), settings.open_tls()
    export_end(registry, tls)
    pool = ModelProcesses(settings, registry, tls)
    with serve_metrics(settings.host, settings.metrics_port, registry, pool.waits_for):
        freeze_started()
        await pool.run(stop)


def main() -> None:
    """Entry point of `python -m services.worker.pool`."""
    run_service("worker", PoolSettings, serve)
