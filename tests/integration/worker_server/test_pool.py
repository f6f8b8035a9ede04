"""A pod with several models: the command and the environment that the chart renders, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

from services.common.keys import RedisKeys
from services.common.leases import Lease, LeaseWatcher
from services.common.redis_client import RedisAccess, open_redis
from services.common.rpc import open_channel
from services.common.tls.credentials import Tls
from services.common.tls.issuing import Authority
from tests.certificates import DAY, write
from tests.charts.rendering import environment, render
from tests.models import BUNDLED_MODEL
from tests.programs import program

POD = "ryzanstein-workers-default-0"
WAIT_S = 300
PORTS = 4


@dataclass(frozen=True)
class RunningPool:
    process: subprocess.Popen[bytes]
    env: dict[str, str]
    as_router: Tls
    redis_url: str

    def port(self, name: str) -> int:
        return int(self.env[f"RYZANSTEIN_{name}_PORT"])

    def get(self, path: str, index: int = -1) -> httpx.Response:
        """An answer of the supervisor, or of a worker."""
        return httpx.get(f"http://127.0.0.1:{self.port('METRICS') + 1 + index}{path}", timeout=30)

    async def leases(self) -> dict[str, Lease]:
        access = RedisAccess(self.redis_url.replace("worker:", "router:"))  # workers read no leases
        client = open_redis(access, 5)
        try:
            return await LeaseWatcher(client, RedisKeys(self.env["RYZANSTEIN_NAMESPACE"]), access).read()
        finally:
            await client.aclose()

    def servers(self) -> dict[str, int]:
        """Process ids of the workers' servers by the model's name."""
        pids = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "services.worker" in child.cmdline():
                    pids[child.environ()["RYZANSTEIN_SERVED_MODEL_NAME"]] = child.pid
        return pids


def _free_ports(count: int) -> int:
    """The first of some consecutive free ports, apart from those of other tests."""
    while True:
        first = random.randrange(10_000, 14_900)
        if all(_is_free(first + index) for index in range(count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@contextmanager
def running(folder: Path, redis_url: str) -> Iterator[RunningPool]:
    for name in ("one", "two"):
        shutil.copytree(BUNDLED_MODEL, folder / name)
    models = [
        {"model": f"file://{folder / 'one'}", "settings": {"kvTokens": 2048}},
        {"model": f"file://{folder / 'two'}", "settings": {"quantization": "int8"}},
        {"model": f"file://{folder / 'missing'}"},
    ]
    values = {"workers": {"pools": {"default": {"models": models, "maxAwake": 1, "kvTokens": 4096}}}}
    (pod,) = render(inline=json.dumps(values)).pods_of("worker")
    (container,) = pod.containers
    authority, first = Authority.new(DAY), _free_ports(2 * PORTS)
    env = {name: value for name, value in environment(container).items() if isinstance(value, str)}
    for name in ("RYZANSTEIN_REDIS_USERNAME", "RYZANSTEIN_REDIS_PASSWORD_FILE", "RYZANSTEIN_REDIS_CA_FILE"):
        del env[name]  # the URL of this Redis has the password
    env |= {
        "RYZANSTEIN_REDIS_URL": redis_url,
        "RYZANSTEIN_TLS_FOLDER": str(write(folder / "tls", "worker", authority)),
        "RYZANSTEIN_WORKER_ID": POD,
        "RYZANSTEIN_ADVERTISE_HOST": "127.0.0.1",
        "RYZANSTEIN_WORKER_PORT": str(first),
        "RYZANSTEIN_METRICS_PORT": str(first + PORTS),
        "OMP_NUM_THREADS": "1",
        "OTEL_SDK_DISABLED": "true",
    }
    command = [sys.executable, *container["command"][1:]]
    with (folder / "pool.log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield RunningPool(process, env, Tls(write(folder / "router", "router", authority)), redis_url)
    finally:
        process.kill()
        process.wait()
        sys.stdout.write((folder / "pool.log").read_text()[-6000:])


async def test_pod_serves_its_models_restarts_a_worker_and_ends_whole(tmp_path: Path, redis_url: str) -> None:
    program("helm 3")
    with running(tmp_path, redis_url) as pool:
        until(lambda: _waits_only_for_the_broken(pool), "two of three models do not start")
        leases = await pool.leases()
        assert {name: lease.model for name, lease in leases.items()} == {f"{POD}.0": "one", f"{POD}.1": "two"}
        assert "ryzanstein_worker_info{" in pool.get("/metrics", 0).text
        assert pool.get("/livez").status_code == 200

        states = [await _state(pool, leases[f"{POD}.{index}"].address) for index in range(2)]
        assert [state.phase for state in states] == [pb.PHASE_SERVING, pb.PHASE_SLEEPING]
        assert {(state.host, state.max_awake, state.pinned) for state in states} == {(POD, 1, False)}
        for index, call in ((0, "Sleep"), (1, "Wake")):
            async with open_channel(leases[f"{POD}.{index}"].address, to="worker", tls=pool.as_router) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                await (stub.Sleep(pb.SleepRequest()) if call == "Sleep" else stub.Wake(pb.WakeRequest()))

        killed = pool.servers()["two"]
        os.kill(killed, signal.SIGKILL)
        until(lambda: pool.servers().get("two", killed) != killed, "no restart")
        until(lambda: _waits_only_for_the_broken(pool), "the restarted worker is not ready")
        metrics = pool.get("/metrics").text
        assert f'ryzanstein_worker_restarts_total{{worker="{POD}.1"}} 1.0' in metrics
        assert f'ryzanstein_worker_restarts_total{{worker="{POD}.0"}} 0.0' in metrics

        children = psutil.Process(pool.process.pid).children(recursive=True)
        pool.process.terminate()
        assert pool.process.wait(WAIT_S) == 0
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert await pool.leases() == {}


def _waits_only_for_the_broken(pool: RunningPool) -> bool:
    try:
        ready = pool.get("/readyz")
    except httpx.TransportError:
        return False
    assert ready.status_code == 503
    waits = ready.text.strip().split("; ")
    return len(waits) == 1 and waits[0].startswith(f"{POD}.2 ended with status 1")


async def _state(pool: RunningPool, address: str) -> pb.WorkerState:
    async with open_channel(address, to="worker", tls=pool.as_router) as channel:
        async for state in worker_pb2_grpc.WorkerStub(channel).WatchState(pb.WatchStateRequest()):
            return state
    pytest.fail("no state")
