"""The processes of a fleet: started, watched, killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import psutil
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc

from bench.fleet.counted import Messages
from services.common.ports import free_port
from services.common.rpc import open_channel
from tests.integration.router.processes import KillableRedis

HOST = "127.0.0.1"
WORKERS = "workers"
_END_S = 120.0  # the longest end of a process that is told to
_DRAIN_S = 0.5  # so that most requests of a process that ends are handed off


@dataclass(frozen=True, slots=True)
class FleetSize:
    """The sizes of an installation."""

    workers: int
    per_process: int  # workers of one process
    routers: int
    gateways: int
    model: Path
    engine_args: Mapping[str, object]
    settings: Mapping[str, str] = field(default_factory=dict)  # every service's, without RYZANSTEIN_
    coordinators: int = 1


@dataclass(slots=True)
class FleetProcess:
    """A process of a component, which can be killed and started again with the same settings."""

    component: str  # gateway, router, kv-coordinator or workers
    module: str
    environment: Mapping[str, str]
    log: Path
    messages: Path  # counts of its gRPC messages
    n_workers: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it."""
        variables = {f"RYZANSTEIN_{name}": value for name, value in self.environment.items()}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.fleet.counted", str(self.messages), self.module],
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """End it without notice."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Tell it to end, as a rollout does, and wait until it has. Raises subprocess.TimeoutExpired."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(_END_S)

    def order(self, line: str) -> None:
        """Give a process of workers a fault."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    @property
    def worker_ids(self) -> Sequence[str]:
        """The ids of the workers of a process of workers."""
        name = self.environment["WORKER_ID"]
        return [f"{name}-{index}" for index in range(self.n_workers)] if self.n_workers > 1 else [name]

    @property
    def usage(self) -> psutil.Process:
        """Its use of the machine."""
        assert self.process is not None
        return psutil.Process(self.process.pid)


class Fleet:
    """A running installation."""

    def __init__(self, size: FleetSize, folder: Path, redis: KillableRedis) -> None:
        self.size, self._folder, self.redis = size, folder, redis
        self.processes: list[FleetProcess] = []
        self.router_addresses = [f"{HOST}:{free_port()}" for _ in range(size.routers)]
        self.urls = [f"http://{HOST}:{free_port()}" for _ in range(size.gateways)]
        self._coordinators = [free_port() for _ in range(size.coordinators)]
        self._joined = 0  # processes of workers

    def start(self) -> None:
        """Start all processes but Redis."""
        for number, port in enumerate(self._coordinators):
            shard = {"COORDINATOR_SHARD": str(number), "COORDINATOR_SHARDS": str(self.size.coordinators)}
            ports = {"COORDINATOR_PORT": str(port), "METRICS_PORT": str(free_port())}
            self._add("kv-coordinator", "services.kv_coordinator", **ports, **shard)
        for address in self.router_addresses:
            self._add(
                "router",
                "services.router",
                ROUTER_PORT=address.rpartition(":")[2],
                COORDINATOR_ADDRESS=",".join(f"{HOST}:{port}" for port in self._coordinators),
                METRICS_PORT=str(free_port()),
            )
        for url in self.urls:
            self._add(
                "gateway",
                "services.gateway",
                GATEWAY_PORT=url.rpartition(":")[2],
                ROUTER_ADDRESSES=",".join(self.router_addresses),
            )
        left = self.size.workers
        while left > 0:
            self.join(min(left, self.size.per_process))
            left -= self.size.per_process

    def join(self, n_workers: int) -> FleetProcess:
        """Start a process of further workers."""
        name, self._joined = f"fleet{self._joined}", self._joined + 1
        return self._add(
            WORKERS,
            "bench.fleet.workers",
            n_workers=n_workers,
            MODEL=str(self.size.model),
            ENGINE="simulated",
            ENGINE_ARGS=json.dumps(dict(self.size.engine_args)),
            VIRTUAL_WORKERS=str(n_workers),
            WORKER_ID=name,
            DRAIN_S=str(_DRAIN_S),
            METRICS_PORT="0",
        )

    def of(self, component: str) -> Sequence[FleetProcess]:
        """The processes of a component."""
        return [process for process in self.processes if process.component == component]

    def stop(self) -> None:
        """End all processes."""
        for process in self.processes:
            if process.process is not None and process.process.poll() is None:
                process.kill()

    async def wait_serving(self, n_workers: int, within_s: float, look_s: float = 0.05) -> float:
        """Wait until every router gives work to exactly `n_workers`; returns the seconds. Raises TimeoutError."""
        began = time.monotonic()
        async with asyncio.timeout(within_s):
            for address in self.router_addresses:
                while await _eligible(address) != n_workers:  # noqa: ASYNC110  # known in another process
                    await asyncio.sleep(look_s)
        return time.monotonic() - began

    async def wait_ready(self, within_s: float) -> None:
        """Wait until every gateway can serve. Raises TimeoutError."""
        async with asyncio.timeout(within_s), httpx.AsyncClient(trust_env=False) as client:
            for url in self.urls:
                while not await _answers(client, f"{url}/readyz"):  # noqa: ASYNC110  # as above
                    await asyncio.sleep(0.05)

    async def views(self) -> Sequence[routing_pb2.WorkerView]:
        """The workers by the first router."""
        return await _views(self.router_addresses[0])

    @property
    def redis_usage(self) -> psutil.Process:
        """Redis's use of the machine."""
        return psutil.Process(self.redis.pid)

    def _add(self, component: str, module: str, n_workers: int = 0, **environment: str) -> FleetProcess:
        shared = {"REDIS_URL": self.redis.url, "HOST": HOST, **self.size.settings}
        log = self._folder / f"{component}-{len(self.processes)}.log"
        messages = log.with_suffix(".messages")
        Messages().write(messages)
        process = FleetProcess(component, module, shared | environment, log, messages, n_workers)
        process.start()
        self.processes.append(process)
        return process


@asynccontextmanager
async def running_fleet(size: FleetSize, start_s: float) -> AsyncGenerator[Fleet, None]:
    """Start a fleet and wait until it serves; prints the ends of the logs after a TimeoutError, also one of its use."""
    with tempfile.TemporaryDirectory() as folder:
        redis = KillableRedis(Path(folder))
        redis.start()
        fleet = Fleet(size, Path(folder), redis)
        try:
            fleet.start()
            await fleet.wait_serving(size.workers, start_s)
            await fleet.wait_ready(start_s)
            yield fleet
        except TimeoutError:
            for process in fleet.processes:
                print(f"== {process.log.name}\n{process.log.read_text()[-2000:]}", file=sys.stderr)
            raise
        finally:
            fleet.stop()
            redis.kill()


async def _views(router: str) -> Sequence[routing_pb2.WorkerView]:
    """The workers by a router; none while it does not answer."""
    async with open_channel(router) as channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            listed = await routing_pb2_grpc.RouterStub(channel).ListWorkers(
                routing_pb2.ListWorkersRequest(), timeout=10, wait_for_ready=True
            )
            return list(listed.workers)
    return []


async def _eligible(router: str) -> int:
    return sum(view.eligible for view in await _views(router))


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
