"""Counts of usage survive killed gateways, restarts of Redis, and lost answers."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import redis.asyncio

from services.common.keys import RedisKeys
from services.gateway.billing.account import Account, Counts
from services.gateway.billing.ledger import UsageLedger
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.keys import digest_of
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard
from tests.integration.gateway.fleet import MODEL, Fault, Worker
from tests.integration.gateway.gateways import eventually, fast_settings, running_stack
from tests.integration.gateway.placing import running_fleet
from tests.integration.gateway.process import GatewayProcess, gateway_process
from tests.integration.gateway.redis_server import RedisServer
from tests.integration.gateway.usage import BODIES, KEYS, USAGE, Bill, ask, read, sums, usage_of, waiting
from tests.integration.router import processes

T = TypeVar("T")


REQUESTS = int(os.environ.get("RYZANSTEIN_TEST_REQUESTS", "192"))
KILLS = 1 + REQUESTS // 2500
ALIKE = {  # requests of each key, so that the counted tokens of a key tell how many were counted whole
    "a1": BODIES[0],
    "a2": BODIES[2],
    "b1": BODIES[4],
    "root": BODIES[5],
}


class Killed:
    """A gateway that lives on, and one after the other that is killed while workers break."""

    def __init__(self, folder: Path, redis_url: str, workers: list[Worker], router: str) -> None:
        self._environment = {"REDIS_URL": redis_url, "TENANCY": "true", "API_KEYS": json.dumps(KEYS)}
        self._folder, self._workers, self._router = folder, workers, router
        self._held = AsyncExitStack()
        self.answers = 0

    async def __aenter__(self) -> Killed:
        self.survivor, self.victim = await self._gateway("survivor"), await self._gateway("0")
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._held.aclose()

    async def _gateway(self, name: str) -> GatewayProcess:
        log = self._folder / f"{name}.log"
        return await self._held.enter_async_context(gateway_process(self._router, log, **self._environment))

    async def kill(self) -> None:
        """Kill gateways, and break a worker's streams before each."""
        for number in range(1, KILLS + 1):
            due = number * REQUESTS // (KILLS + 2)
            await eventually(lambda due=due: self.answers >= due, timeout_s=600)  # type: ignore[misc]
            self._workers[number % len(self._workers)].faults.append(Fault("break", 2))
            self.victim.process.kill()
            if number < KILLS:
                self.victim = await self._gateway(str(number))


@pytest.mark.timeout(300 + REQUESTS // 5)
async def test_killed_gateways_and_workers_lose_and_repeat_no_count(tmp_path: Path, server: RedisServer) -> None:
    answered: dict[str, list[dict[str, Any]]] = {key: [] for key in ALIKE}
    broken: Counter[str] = Counter()
    workers = [Worker(name, step_s=0.002) for name in ("w0", "w1")]
    async with (
        running_fleet(workers) as router,
        Killed(tmp_path, server.url, workers, router.address) as gateways,
        httpx.AsyncClient(timeout=120) as http,
    ):

        async def client(number: int) -> None:
            key = list(ALIKE)[number % len(ALIKE)]
            path, body = ALIKE[key]
            for turn in range(-(-REQUESTS // 24)):
                stream, victim = turn % 2 == 0, gateways.victim
                gateway = victim if turn % 4 < 2 and victim.process.returncode is None else gateways.survivor
                try:
                    usage = await ask(http, key, gateway.url + path, body, stream=stream)
                except httpx.TransportError:
                    broken[key] += 1
                    usage = await ask(http, key, gateways.survivor.url + path, body, stream=stream)
                answered[key].append(usage)
                gateways.answers += 1

        await asyncio.gather(gateways.kill(), *(client(number) for number in range(24)))
        report = sums(await read(http, gateways.survivor.url + USAGE, group_by="api_key_id"), "api_key_id")
    assert not any(worker.faults for worker in workers), "each fault has broken a worker"
    for key, usages in answered.items():
        counted = report[digest_of(key)[:12],]
        assert len(usages) <= counted["num_model_requests"] <= len(usages) + broken[key], (
            "a broken answer may have been counted, no other"
        )
        for name in ("input_tokens", "output_tokens"):
            (each,) = {usage_of(usage)[name] for usage in usages}
            assert counted[name] == counted["num_model_requests"] * each


async def test_counts_wait_while_redis_is_away_and_are_written_once(tmp_path: Path) -> None:
    broken = processes.KillableRedis(tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    broken.start()
    try:
        async with running_stack([Worker("w0")], redis_url=broken.url_of("gateway")) as stack:
            bill = Bill()

            async def some(count: int) -> None:
                for number in range(count):
                    path, body = BODIES[number % 4]
                    bill.add("", await ask(stack.http, "", path, body, stream=number % 2 == 0))

            await some(8)
            running = asyncio.create_task(some(40))
            await asyncio.sleep(0)
            broken.kill()  # in the middle of writes
            await running
            await some(4)
            assert waiting(stack) > 0
            broken.start()
            await eventually(lambda: waiting(stack) == 0)
            await some(4)
            assert sums(await read(stack.http)) == {(): bill.of[""]}
            assert not stack.gateway.metrics.registry.get_sample_value("ryzanstein_gateway_unaccounted_tokens_total")
    finally:
        broken.kill()


class LossyGuard(RedisGuard):
    """Every other operation is done at Redis, and its answer is lost."""

    lost = False

    async def run(self, operation: Callable[[], Awaitable[T]]) -> T:
        result = await super().run(operation)
        self.lost = not self.lost
        if self.lost:
            raise RedisAwayError("the answer is lost")
        return result


async def test_write_counts_once_when_its_answer_is_lost(server: RedisServer) -> None:
    client = redis.asyncio.Redis.from_url(server.url)
    settings, metrics, keys = fast_settings(redis_url=server.url), GatewayMetrics(), RedisKeys("default")
    guard = LossyGuard(client, settings.redis, 5.0, metrics)
    ledger = UsageLedger(guard, keys, "gateway", settings.retention, metrics)
    account = Account("completions", "acme", "key", MODEL, batch=False)
    for number in range(4):
        ledger.add(account, Counts(1, 10, 0, number))
        await ledger.aclose()
        await ledger.aclose()
    assert server.sum_of(keys.quota("acme", "*")) == 4 * 10 + 6
    await client.aclose()


async def test_ending_gateway_writes_its_last_counts(tmp_path: Path) -> None:
    broken = processes.KillableRedis(tmp_path)
    broken.start()
    try:
        async with running_stack([Worker("w0")], redis_url=broken.url_of("gateway")) as stack:
            broken.kill()
            usage = (await stack.complete(prompt="a", max_tokens=3)).json()["usage"]
            broken.start()
        async with running_stack([Worker("w1")], redis_url=broken.url_of("gateway")) as stack:
            (counts,) = sums(await read(stack.http)).values()
            assert counts["input_tokens"] == usage["prompt_tokens"]
    finally:
        broken.kill()
