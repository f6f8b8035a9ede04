"""Runs a local installation: starts all processes, restarts a process that ends, stops all at the end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc.aio
import psutil

from services.cli.errors import CommandError
from services.cli.stack.layout import StackProcess, lay_out
from services.cli.stack.options import StackOptions
from services.cli.stack.redis_server import redis_server
from services.cli.stack.state import StackState, run_dir, write_state
from services.common.processes.process import ManagedProcess, ProcessEndedError
from services.common.processes.restarts import Restarts
from services.common.processes.workers import put_to_sleep, start_in_turns

# Workers take longest to start, so they get all cores while they import. The others are ready sooner anyway.
_HEAD_START_S = 0.6

Report = Callable[[str, str], None]  # (process name, its new state)


class Stack:
    """All processes of one local installation."""

    def __init__(self, options: StackOptions, report: Report) -> None:
        self.options = options
        self.folder = run_dir(options.port)
        self._report = report
        specs = lay_out(options, self.folder, Path() if options.redis else redis_server())
        logs = self.folder / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
        self.processes = tuple(ManagedProcess(spec, logs / f"{spec.name}.log") for spec in specs)

    def address_of(self, name: str) -> str:
        """The address of the process called `name`."""
        return next(process.spec.address for process in self.processes if process.spec.name == name)

    async def start(self) -> None:
        """Start all processes, and wait until all are ready; raises :class:`CommandError`."""
        workers = [process for process in self.processes if process.spec.model]

        async def start(batch: Sequence[ManagedProcess[StackProcess]]) -> None:
            others = [process for process in self.processes if not (process.spec.model or process.pid)]
            await self._start([process for process in self.processes if process in batch or process in others])

        await start_in_turns(workers, self.options.max_awake, _priority, start, _put_to_sleep)

    async def _start(self, processes: Sequence[ManagedProcess[StackProcess]]) -> None:
        """Start processes, workers first, and wait until they are ready; raises :class:`CommandError`."""
        for process in processes:
            if process.spec.model or process.spec.name == "redis":
                await process.start()
        others = [process for process in processes if not process.pid]
        if others:
            await asyncio.sleep(_HEAD_START_S)
        for process in others:
            await process.start()
        self._save(supervised=False)
        waits = [asyncio.create_task(self._wait_ready(process)) for process in processes]
        try:
            async with asyncio.timeout(self.options.start_timeout):
                await asyncio.gather(*waits)
        except ProcessEndedError as error:
            raise CommandError(f"{error} (logs: {self.folder / 'logs'})") from error
        except TimeoutError as error:
            late = [f"{p.spec.name} ({p.last_error()})" for p in processes if p.ready_after_s is None]
            raise CommandError(
                f"not ready after {self.options.start_timeout:.0f} s: {', '.join(late)} (logs: {self.folder / 'logs'})"
            ) from error
        finally:
            for wait in waits:
                wait.cancel()

    async def supervise(self) -> None:
        """Restart processes that end or do not answer, with a growing delay, until cancelled."""
        self._save(supervised=True)
        restarts = Restarts(
            self.options.start_timeout,
            self._report,
            before=_remove_stale_socket,
            after=lambda _: self._save(supervised=True),
        )
        async with asyncio.TaskGroup() as group:
            for process in self.processes:
                group.create_task(restarts.keep_running(process, ready=True))

    async def stop(self) -> None:
        """Stop all processes, clients of a service before the service, and remove their files."""
        for process in reversed(self.processes):
            self._report(process.spec.name, "stopping")
        workers = [p for p in self.processes if p.spec.model]
        others = [p for p in reversed(self.processes) if p not in workers]
        for process in [p for p in others if p.spec.name == "gateway"]:
            await process.stop()
        await asyncio.gather(*(process.stop() for process in workers))
        for process in others:
            await process.stop()
            self._report(process.spec.name, "stopped")
        for leftover in ("stack.json", "redis.sock"):
            (self.folder / leftover).unlink(missing_ok=True)

    async def _wait_ready(self, process: ManagedProcess[StackProcess]) -> None:
        self._report(process.spec.name, "starting")
        await process.wait_ready()
        self._report(process.spec.name, f"ready after {process.ready_after_s:.1f} s")

    def _save(self, *, supervised: bool) -> None:
        supervisor = psutil.Process(os.getpid())
        state = StackState(
            pid=supervisor.pid,
            created=supervisor.create_time(),
            url=self.address_of("gateway"),
            router=self.address_of("router"),
            coordinator=self.address_of("kv-coordinator"),
            processes={process.spec.name: process.pid for process in self.processes},
            supervised=supervised,
        )
        write_state(self.folder, state)


def _remove_stale_socket(spec: StackProcess) -> None:
    if spec.address.startswith("unix://"):
        with contextlib.suppress(FileNotFoundError):
            Path(spec.address.removeprefix("unix://")).unlink()


async def _put_to_sleep(worker: ManagedProcess[StackProcess]) -> None:
    """Put a worker to sleep once it is idle. Raises :class:`CommandError`."""
    try:
        await put_to_sleep(worker.spec.address)
    except grpc.aio.AioRpcError as error:
        raise CommandError(f"--max-awake: {worker.spec.name} does not sleep: {error.details()}") from error


def _priority(worker: ManagedProcess[StackProcess]) -> float:
    model = worker.spec.model
    assert model is not None, "a worker has a model"
    return math.inf if model.pinned else model.priority
