"""Durations of starts outlive a router: they are in Redis, with no more rights than a router has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis

from services.common.keys import RedisKeys
from services.common.redis_client import RedisAccess, open_redis
from services.common.tasks import end_tasks
from services.router.start_history import KEPT_S, StartHistory, decode
from services.router.starts import PAST_STARTS, Starts
from tests.integration.router.processes import KillableRedis, until

KEYS = RedisKeys("default")


class Routers:
    """Routers one after another on one Redis."""

    def __init__(self, server: KillableRedis) -> None:
        self.access = RedisAccess(server.url_of("router"))
        self._clients: list[redis.Redis] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> Starts:
        """Starts that a router knows when it starts now."""
        starts = Starts()
        self._clients.append(open_redis(self.access, 5.0))
        history = StartHistory(self._clients[-1], KEYS, self.access, starts, lambda: ["m", "other"])
        self._tasks.append(asyncio.create_task(history.run()))
        return starts

    async def stop(self) -> None:
        await end_tasks(self._tasks)
        for client in self._clients:
            await client.aclose()


@pytest.fixture
async def routers(redis_server: KillableRedis) -> AsyncIterator[Routers]:
    routers = Routers(redis_server)
    yield routers
    await routers.stop()


@pytest.fixture
async def admin(redis_server: KillableRedis) -> AsyncIterator[redis.Redis]:
    client = redis.from_url(redis_server.url)
    yield client
    await client.aclose()


async def test_router_that_starts_knows_the_durations_that_another_measured(
    routers: Routers, admin: redis.Redis
) -> None:
    first = routers.start()
    first.recall("m", {"loading": [20.0, 30.0]})
    first.measured.add("m")

    async def stored() -> bool:
        return bool(await admin.exists(KEYS.start_durations("m")))

    await until(stored)
    assert 0 < await admin.ttl(KEYS.start_durations("m")) <= KEPT_S
    second = routers.start()

    async def recalled() -> bool:
        return second.durations("m") == {"loading": [20.0, 30.0]}

    await until(recalled)
    assert not second.measured, "what was read is not written again"
    assert second.durations("other") == {}


async def test_unreadable_durations_are_replaced_by_the_next_start(routers: Routers, admin: redis.Redis) -> None:
    await admin.set(KEYS.start_durations("m"), b"\xff no JSON")
    starts = routers.start()
    starts.recall("m", {"waking": [1.5]})
    starts.measured.add("m")

    async def replaced() -> bool:
        value = await admin.get(KEYS.start_durations("m"))
        return value != b"\xff no JSON" and json.loads(value) == {"waking": [1.5]}

    await until(replaced)


async def test_durations_are_stored_once_redis_is_back(
    routers: Routers, redis_server: KillableRedis, admin: redis.Redis
) -> None:
    redis_server.kill()
    starts = routers.start()
    starts.recall("m", {"loading": [7.0]})
    starts.measured.add("m")
    await asyncio.sleep(0)
    redis_server.start()

    async def stored() -> bool:
        value = await admin.get(KEYS.start_durations("m"))
        return value is not None and json.loads(value) == {"loading": [7.0]}

    await until(stored)
    assert not starts.measured


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        (b"[1, 2]", {}),
        (b"{", {}),
        (b'{"loading": [1, 2.5, "x", -1, null, 1e999], "melting": [1], "waking": 3}', {"loading": [1, 2.5]}),
        (json.dumps({"sleeping": list(range(20))}).encode(), {"sleeping": list(range(20))[-PAST_STARTS:]}),
    ],
)
def test_unknown_parts_of_stored_durations_are_left_out(stored: bytes, read: object) -> None:
    assert decode(stored) == read
