"""Real processes for tests: Redis, routers, coordinators."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from services.common.ports import free_port
from tests.forked import ForkedService
from tests.redis_users import SERVER, add_users, url_of


class KillableRedis:
    """A Redis that can be killed, stopped and started again under the same URL, which is that of an administrator."""

    def __init__(self, directory: Path, *options: str) -> None:
        """`options`: of the server; by default it keeps nothing."""
        self._options = options
        self._socket = directory / "redis.sock"
        self.url = f"unix://{self._socket}?db=0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--dir", str(self._socket.parent)]
        command = [str(SERVER), *options, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with Redis.from_url(self.url) as client:
            while True:
                with contextlib.suppress(RedisError):
                    add_users(client)
                    return
                time.sleep(0.02)

    def url_of(self, component: str) -> str:
        """The URL of a component, which may do no more there than in the chart's Redis."""
        return url_of(component, self._socket)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, signum: int) -> None:
        assert self._process is not None
        self._process.send_signal(signum)


class Service:
    """`python -m services.<name>`, where it listens, and what it has logged."""

    def __init__(self, module: str, *, forked: bool = True, **environment: str) -> None:
        """`forked` from a process that has imported it, which is quicker; gRPC reads its variables for TLS before."""
        fields = os.environ | {f"RYZANSTEIN_{name}": value for name, value in environment.items()}
        # A file and not a pipe: a pipe without a reader blocks the writer.
        self._log = tempfile.NamedTemporaryFile("w")  # noqa: SIM115  # lives as long as this
        self._module = module
        self.process: ForkedService | subprocess.Popen[bytes]
        if forked and "RYZANSTEIN_TLS_FOLDER" not in fields:
            self.process = ForkedService(module, fields, Path(self._log.name))
        else:
            command = [sys.executable, "-m", module]
            self.process = subprocess.Popen(command, stdout=self._log, env=fields, stdin=subprocess.DEVNULL)
        self.address = self._wait_until_listening()

    def logs(self) -> list[dict[str, str]]:
        with Path(self._log.name).open() as lines:
            return [json.loads(line) for line in lines if line.endswith("\n")]

    def _wait_until_listening(self) -> str:
        while self.process.poll() is None:
            for line in self.logs():
                if "listens" in line["message"]:
                    return line["address"]
            time.sleep(0.05)
        raise RuntimeError(f"{self._module} ended with status {self.process.poll()}")

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout=180)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def router_process(redis_url: str, *, forked: bool = True, **environment: str) -> Service:
    environment.setdefault("ROUTER_PORT", str(free_port()))
    return Service("services.router", forked=forked, REDIS_URL=redis_url, **environment)


def coordinator_process(redis_url: str, *, forked: bool = True, **environment: str) -> Service:
    environment.setdefault("COORDINATOR_PORT", str(free_port()))
    return Service("services.kv_coordinator", forked=forked, REDIS_URL=redis_url, **environment)


@contextlib.contextmanager
def running(service: Service) -> Iterator[Service]:
    try:
        yield service
    finally:
        service.end()


def page(port: int, path: str = "/metrics") -> str:
    """A page of a service's port for metrics and probes."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return str(answer.read(), "utf-8")


async def metrics_with(port: int, sample: str) -> str:
    """The metrics of a service, as soon as they have the sample."""
    async with asyncio.timeout(60):
        while sample not in (text := await asyncio.to_thread(page, port)):  # noqa: ASYNC110  # as below
            await asyncio.sleep(0.02)
    return text


async def until(true: Callable[[], Awaitable[bool]], within_s: float = 60.0, every_s: float = 0.02) -> None:
    """Wait for a state of affairs; raises TimeoutError when it does not come about."""
    async with asyncio.timeout(within_s):
        while not await true():  # noqa: ASYNC110  # the event happens in another process
            await asyncio.sleep(every_s)
