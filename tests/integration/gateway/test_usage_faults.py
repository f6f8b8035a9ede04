"""Counts of usage survive killed gateways, restarts of Redis, and lost answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
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
from tests.integration.gateway.fleet import MODEL, Worker
from tests.integration.gateway.gateways import eventually, fast_settings, running_stack
from tests.integration.gateway.placing import running_fleet
from tests.integration.gateway.process import GatewayProcess, gateway_process
from tests.integration.gateway.redis_server import RedisServer
from tests.integration.gateway.usage import BODIES, KEYS, USAGE, Bill, ask, read, sums, usage_of, waiting
from tests.integration.router import processes

T = TypeVar("T")


@asynccontextmanager
async def two_gateways(folder: Path, redis_url: str) -> AsyncIterator[tuple[GatewayProcess, GatewayProcess]]:
    environment = {"REDIS_URL": redis_url, "TENANCY": "true", "API_KEYS": json.dumps(KEYS)}
    async with (
        running_fleet([Worker("w0", step_s=0.002)]) as router,
        gateway_process(router.address, folder / "a.log", **environment) as one,
        gateway_process(router.address, folder / "b.log", **environment) as other,
    ):
        yield one, other


ALIKE = {  # requests of each key, so that the counted tokens of a key tell how many were counted whole
    "a1": BODIES[0],
    "a2": BODIES[2],
    "b1": BODIES[4],
    "root": BODIES[5],
}


@pytest.mark.timeout(300)
async def test_killed_gateway_loses_and_repeats_no_count(tmp_path: Path, server: RedisServer) -> None:
    answered: dict[str, list[dict[str, Any]]] = {key: [] for key in ALIKE}
    broken: Counter[str] = Counter()
    async with two_gateways(tmp_path, server.url) as (victim, other), httpx.AsyncClient(timeout=120) as http:

        async def client(number: int) -> None:
            key = list(ALIKE)[number % len(ALIKE)]
            path, body = ALIKE[key]
            for turn in range(8):
                stream = turn % 2 == 0
                gateway = victim if turn % 4 < 2 and victim.process.returncode is None else other
                try:
                    usage = await ask(http, key, gateway.url + path, body, stream=stream)
                except httpx.TransportError:
                    broken[key] += 1
                    usage = await ask(http, key, other.url + path, body, stream=stream)
                answered[key].append(usage)

        clients = [asyncio.create_task(client(number)) for number in range(24)]
        await eventually(lambda: sum(map(len, answered.values())) >= 40)
        victim.process.kill()
        await asyncio.gather(*clients)
        report = sums(await read(http, other.url + USAGE, group_by="api_key_id"), "api_key_id")
    for key, usages in answered.items():
        counted = report[digest_of(key)[:12],]
        assert len(usages) <= counted["num_model_requests"] <= len(usages) + broken[key], (
            "a broken answer may have been counted, no other"
        )
        for name in ("input_tokens", "output_tokens"):
            (each,) = {usage_of(usage)[name] for usage in usages}
            assert counted[name] == counted["num_model_requests"] * each


async def test_counts_wait_while_redis_is_away_and_are_written_once(tmp_path: Path) -> None:
    broken = processes.RedisServer(tmp_path, "--appendonly", "yes", "--appendfsync", "always")
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
    month = server.client.get(keys.quota("acme", time.strftime("%Y%m", time.gmtime())))
    assert int(month) == 4 * 10 + 6
    await client.aclose()


async def test_ending_gateway_writes_its_last_counts(tmp_path: Path) -> None:
    broken = processes.RedisServer(tmp_path)
    broken.start()
    try:
        async with running_stack([Worker("w0")], redis_url=broken.url_of("gateway"), redis_timeout_s=0.2) as stack:
            broken.kill()
            usage = (await stack.complete(prompt="a", max_tokens=3)).json()["usage"]
            broken.start()
        async with running_stack([Worker("w1")], redis_url=broken.url_of("gateway")) as stack:
            (counts,) = sums(await read(stack.http)).values()
            assert counts["input_tokens"] == usage["prompt_tokens"]
    finally:
        broken.kill()
