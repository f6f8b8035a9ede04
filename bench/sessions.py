"""Conversations on several workers: do they stay, do they hit, is the work even, and does a new worker get some?

    python -m bench.sessions --workers 3 --clients 24 --seconds 40

Clients hold conversations one after another, each a session of its tenant; one tenant of eight starts half of them. All
share a system prompt, each tenant under its own key and so in its own prefix cache. Prompts are token ids, so that what
could be hit is known exactly. Who served a turn is read from the session's binding in Redis, its hit from the usage.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import httpx
import redis.asyncio as redis
import typer
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc

from bench.conversations import TENANTS, Clients, Load, Turn, imbalance, kept_share
from bench.reading import Reading, higher, lower, write_readings
from bench.servers import Peer, start
from bench.stats import median
from services.cli.stack.options import BUNDLED_MODEL
from services.cli.stack.probes import Probe, http_ready
from services.cli.stack.state import read_state, run_dir
from services.common.keys import RedisKeys
from services.common.ports import free_port
from services.common.rpc import open_channel
from services.common.tasks import end_tasks

WARM_UP_S = 15.0  # caches fill, workers measure themselves
JOINED_S = 5.0  # how long a worker that joined is left in before it is drained


@asynccontextmanager
async def installation(workers: int, folder: Path) -> AsyncIterator[int]:
    """`ryzanstein up` with API keys (a tenant's key is its name) and all workers eligible; gives its port."""
    keys = [{"key_sha256": hashlib.sha256(name.encode()).hexdigest(), "name": name, "models": []} for name in TENANTS]
    (folder / "keys.json").write_text(json.dumps(keys))
    command = Path(sys.executable).with_name("ryzanstein")
    environment = {"RYZANSTEIN_TENANCY": "true", "RYZANSTEIN_API_KEYS_FILE": str(folder / "keys.json")}
    peer = Peer(
        "ryzanstein",
        f"{command} up --port {{port}} --workers {workers} --tensor-parallel 1",
        "/readyz",
        env=environment,
    )
    server = await start(peer, "", str(BUNDLED_MODEL), 1, folder / "up.log")
    try:
        port = int(server.url.rpartition(":")[2])
        await _until(lambda: _eligible(port, workers), 0.2)
        yield port
    finally:
        await server.stop()


async def _until(condition: Probe, pause_s: float) -> None:
    while True:
        if await condition():
            return
        await asyncio.sleep(pause_s)


async def _eligible(port: int, workers: int) -> bool:
    async with open_channel(read_state(port).router) as channel:
        stub = routing_pb2_grpc.RouterStub(channel)
        listed = await stub.ListWorkers(routing_pb2.ListWorkersRequest(), timeout=5)
    return sum(worker.eligible for worker in listed.workers) >= workers


async def join(port: int, name: str, clients: Clients, log: Path) -> float:
    """Start a worker as the operations guide has it, end it later; seconds from its readiness to its first token.

    Raises RuntimeError when it has no work.
    """
    metrics = free_port()
    environment = {
        "RYZANSTEIN_REDIS_URL": f"unix://{run_dir(port) / 'redis.sock'}",
        "RYZANSTEIN_NAMESPACE": f"up-{port}",
        "RYZANSTEIN_MODEL": str(BUNDLED_MODEL),
        "RYZANSTEIN_TENSOR_PARALLEL": "1",
        "RYZANSTEIN_WORKER_ID": name,
        "RYZANSTEIN_METRICS_PORT": str(metrics),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.worker.api", env=os.environ | environment, stdout=output, stderr=output
        )
    try:
        async with asyncio.timeout(120):
            await _until(http_ready(f"http://127.0.0.1:{metrics}/readyz"), 0.01)
        since = time.monotonic()
        await asyncio.sleep(JOINED_S)
        tokens = [turn.first_token for turn in clients.turns if turn.worker == name]
        if not tokens:
            raise RuntimeError(f"{name} was ready and had no work for {JOINED_S:g} s")
        return min(tokens) - since
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def measure(workers: int, load: Load, seconds: float, joins: int) -> tuple[list[Turn], list[float]]:
    """The turns of the steady state, and for each worker that joined afterwards how long it was without work."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            installation(workers, Path(folder)) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as http,
            redis.Redis(unix_socket_path=str(run_dir(port) / "redis.sock")) as bindings,
        ):
            clients = Clients(http, bindings, RedisKeys(f"up-{port}"), load)

            async def phases() -> tuple[list[Turn], list[float]]:
                await asyncio.sleep(WARM_UP_S)
                since = time.monotonic()
                await asyncio.sleep(seconds)
                steady = [turn for turn in clients.turns if turn.began >= since]
                return steady, [
                    await join(port, f"joining-{i}", clients, Path(folder) / f"joining-{i}.log") for i in range(joins)
                ]

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(clients.converse(index)) for index in range(load.clients)]
                found = await phases()
                await end_tasks(tasks)
            return found


def readings(workers: int, load: Load, turns: Sequence[Turn], joined: Sequence[float]) -> list[Reading]:
    """The promises as numbers."""
    tokens, requests = Counter({f"worker-{i}": 0 for i in range(workers)}), Counter[str]()
    for turn in turns:
        tokens[turn.worker] += turn.work
        requests[turn.worker] += 1
    hits = sum(turn.hit for turn in turns) / sum(turn.ideal for turn in turns)
    name = f"sessions/{workers} workers, {load.clients} clients"
    found = [
        higher(f"{name}/turns on their session's worker", kept_share(turns) * 100, "%"),
        higher(f"{name}/prefix hits of the ideal", hits * 100, "%"),
        lower(f"{name}/imbalance of tokens computed", imbalance(tokens.values()) * 100, "%"),
        lower(f"{name}/imbalance of requests", imbalance(requests[worker] for worker in tokens) * 100, "%"),
    ]
    return found + ([lower(f"{name}/ready to first token of a joining worker", median(joined), "s")] if joined else [])


def main(
    workers: int = 3,
    clients: int = 24,
    turns: Annotated[int, typer.Option(help="Questions of a conversation.")] = 6,
    system_tokens: int = 250,
    question_tokens: int = 40,
    answer_tokens: int = 32,
    seconds: Annotated[float, typer.Option(help="Length of the steady state.")] = 40.0,
    joins: Annotated[int, typer.Option(help="Workers that join afterwards, one after another.")] = 3,
    seed: int = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Print the readings, and every join."""
    load = Load(clients, turns, system_tokens, question_tokens, answer_tokens, seed)
    steady, joined = asyncio.run(measure(workers, load, seconds, joins))
    found = readings(workers, load, steady, joined)
    for reading in found:
        print(f"{reading.name}: {reading.value:.2f} {reading.unit}")
    print(f"{len(steady)} turns in {seconds:g} s; joins: {', '.join(f'{s:.2f} s' for s in joined)}")
    if json_file:
        write_readings(json_file, found)


if __name__ == "__main__":
    typer.run(main)
