"""Gateways log lengths, arrivals and hashes of requests, from which `ryzanstein plan` makes a plan."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from redis import Redis

from services.common.keys import RedisKeys
from services.common.ports import free_port
from services.common.redis_client import RedisAccess, open_redis
from services.common.request_log import LOG_BLOCK_TOKENS, LoggedRequest
from services.common.tasks import end_tasks
from services.gateway.generation import request_log
from services.gateway.generation.request import Caller, GenerationRequest, SamplingOptions
from services.gateway.generation.request_log import RequestLog
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.redis_guard import RedisGuard
from services.gateway.text.codec import ServedModel
from tests.integration.gateway.fleet import MODEL, Worker
from tests.integration.gateway.gateways import eventually, running_stack
from tests.integration.gateway.redis_server import RedisServer, running_redis
from tests.integration.router.processes import KillableRedis
from tests.shell import captured

KEY = RedisKeys("default").request_log
SECRET = "a confidential sentence about nobody in particular "
COMMAND = str(Path(sys.executable).parent / "ryzanstein")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as running:
        yield running


def logged(client: Redis) -> list[LoggedRequest]:
    return [LoggedRequest.read(fields) for _, fields in client.xrange(KEY)]


async def test_served_requests_become_a_plan_and_their_texts_stay_out_of_the_log(server: RedisServer) -> None:
    most = 6
    async with running_stack([Worker("w0")], redis_url=server.url, request_log_entries=most) as stack:
        prompt = SECRET * 4
        answer = await stack.complete(prompt=prompt, max_tokens=7, user="someone")
        assert answer.status_code == 200, answer.text
        used = answer.json()["usage"]
        await eventually(lambda: server.client.xlen(KEY) == 1)
        (first,) = logged(server.client)
        assert (first.model, first.prompt_tokens, first.answer_tokens) == (MODEL, used["prompt_tokens"], 7)
        assert len(first.blocks) == used["prompt_tokens"] // LOG_BLOCK_TOKENS > 0
        await stack.http.post("/v1/embeddings", json={"input": SECRET})
        await stack.http.post("/v1/completions", json={"prompt": SECRET}, headers={"x-session-id": "my session"})
        await eventually(lambda: server.client.xlen(KEY) == 2)
        assert logged(server.client)[1].session not in ("", "my session")
        entries = b" ".join(value for _, fields in server.client.xrange(KEY) for value in fields.values())
        assert not [word for word in (b"confidential", b"nobody", b"session") if word in entries]
        for number in range(most + 2):
            await stack.complete(prompt=f"{prompt} {number}", max_tokens=3)
    assert server.client.xlen(KEY) == most, "the log is bounded, and what waited is written at the end"
    assert 0 < server.client.ttl(KEY) <= 8 * 24 * 3600
    assert all(entry.blocks == first.blocks for entry in logged(server.client)), "equal prefixes have equal hashes"
    env = os.environ | {"RYZANSTEIN_REDIS_URL": server.url}
    done = captured([COMMAND, "plan", "--target", "first_token_p95=5s", "--target", "pace_p95=1s", "--json"], env=env)
    assert done.returncode == 0, done
    rows = json.loads(done.stdout)
    assert sum(row["requests"] for row in rows) == most
    assert all(row["need"]["workers"] >= 1 for row in rows)
    other = captured([COMMAND, "plan", "--target", "pace_p95=1s", "--model", "other"], env=env)
    assert (other.returncode, MODEL in other.stderr) == (2, True)
    await assert_is_served(env)


async def assert_is_served(env: dict[str, str]) -> None:
    """An autoscaler gets the plan of this log from the endpoint, which ends by SIGTERM."""
    port = free_port()
    command = [COMMAND, "plan", "--target", "first_token_p95=5s", "--serve", f"127.0.0.1:{port}"]
    process = await asyncio.create_subprocess_exec(*command, env=env)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:

        def answered() -> bool:
            with contextlib.suppress(httpx.ConnectError):
                return client.get("/v1/plan").status_code == httpx.codes.OK
            return False

        await eventually(answered)
        plan = await asyncio.to_thread(lambda: client.get("/v1/plan").json())
    assert (len(plan["schedule"]) >= 1, plan["unplanned"], plan["error"]) == (True, [], "")
    process.terminate()
    assert await process.wait() == 0


async def test_log_is_off_by_choice(server: RedisServer) -> None:
    async with running_stack([Worker("w0")], redis_url=server.url) as stack:
        await stack.complete(prompt=SECRET, max_tokens=2)
    assert not server.client.exists(KEY)


Logging = tuple[RequestLog, GatewayMetrics]


@pytest.fixture
async def log(redis_server: KillableRedis) -> AsyncIterator[Logging]:
    access, metrics = RedisAccess(redis_server.url_of("gateway")), GatewayMetrics()
    redis = open_redis(access, 5.0)
    guard = RedisGuard(redis, access, 5.0, metrics)
    yield RequestLog(guard, RedisKeys("default"), 10, 60, metrics), metrics
    await redis.aclose()


def ended_request() -> GenerationRequest:
    model = cast(ServedModel, SimpleNamespace(pool=MODEL))
    return GenerationRequest("r", model, [1] * 5, SamplingOptions(9), Caller(tenant="acme"), [])


def unlogged(metrics: GatewayMetrics) -> float:
    return metrics.unlogged.collect()[0].samples[0].value


async def test_requests_wait_to_be_logged_while_redis_is_away(redis_server: KillableRedis, log: Logging) -> None:
    writer, metrics = log
    redis_server.kill()
    writer.add(ended_request(), 3, 2.0)
    writing = asyncio.create_task(writer.run())
    await eventually(lambda: not metrics.redis_up.collect()[0].samples[0].value)
    redis_server.start()
    await end_tasks([writing])
    await writer.aclose()
    with Redis.from_url(redis_server.url) as client:
        entries = logged(client)
    assert {(entry.model, entry.prompt_tokens, entry.answer_tokens) for entry in entries} == {(MODEL, 5, 3)}
    assert entries[0].tenant not in ("", "acme")
    assert unlogged(metrics) == 0


async def test_requests_beyond_the_memory_or_the_gateway_s_end_are_counted_as_unlogged(
    redis_server: KillableRedis, log: Logging, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, metrics = log
    monkeypatch.setattr(request_log, "_MOST_WAITING", 2)
    redis_server.kill()
    for _ in range(3):
        writer.add(ended_request(), 3, 2.0)
    assert unlogged(metrics) == 1
    await writer.aclose()
    assert unlogged(metrics) == 3
