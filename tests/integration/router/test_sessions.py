"""Bindings of sessions as one router remembers them, and as Redis has them for all."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator

import pytest

from services.common.keys import RedisKeys
from services.common.redis_client import RedisAccess, open_redis
from services.router.sessions import MAX_REMEMBERED, REMEMBERED_S, Binding, Sessions, SessionsAway
from tests.integration.router.processes import KillableRedis

ONE, TWO = Binding("w1", "first"), Binding("w2", "second")
TIMEOUT_S = 5.0


class RouterSessions:
    """Two routers' sessions on one Redis, and their clock."""

    def __init__(self, server: KillableRedis) -> None:
        self.now, self.asked = 0.0, 0
        access = RedisAccess(server.url)
        self.clients = [open_redis(access, TIMEOUT_S, timed_by_caller=True) for _ in range(2)]
        self.here, self.there = (
            Sessions(client, RedisKeys("default"), access, TIMEOUT_S, self._observe, lambda: self.now)
            for client in self.clients
        )

    def _observe(self, seconds: float) -> None:
        self.asked += 1


@pytest.fixture
async def routers(redis_server: KillableRedis) -> AsyncIterator[RouterSessions]:
    routers = RouterSessions(redis_server)
    yield routers
    for client in routers.clients:
        await client.aclose()


async def read(sessions: Sessions) -> Binding | None:
    held = await sessions.read("t", "s", touch=True)
    return held.binding if held else None


async def test_turns_of_a_session_ask_redis_once_in_five_minutes(routers: RouterSessions) -> None:
    await routers.here.bind("t", "s", None, ONE)
    assert routers.asked == 1
    for _ in range(10):
        assert await read(routers.here) == ONE
    assert routers.asked == 1
    routers.now += REMEMBERED_S
    assert await read(routers.here) == await read(routers.here) == ONE
    assert routers.asked == 2


async def test_router_that_remembers_a_moved_session_is_corrected_by_its_write_and_by_time(
    routers: RouterSessions,
) -> None:
    await routers.here.bind("t", "s", None, ONE)
    held = await routers.there.read("t", "s", touch=True)
    assert held
    await routers.there.bind("t", "s", held, TWO)
    assert await read(routers.here) == ONE
    assert (await routers.here.bind("t", "s", held, Binding("w3", "third"))).binding == TWO, "the first one wins"
    assert await read(routers.here) == TWO
    moved = await routers.there.read("t", "s", touch=True)
    await routers.there.bind("t", "s", moved, ONE)
    routers.now += REMEMBERED_S
    assert await read(routers.here) == ONE


async def test_session_moves_while_redis_is_away_and_redis_hears_of_its_next_move(
    routers: RouterSessions, redis_server: KillableRedis
) -> None:
    held = await routers.here.bind("t", "s", None, ONE)
    redis_server.kill()
    assert await read(routers.here) == ONE
    with pytest.raises(SessionsAway):
        await routers.here.bind("t", "s", held, TWO)
    moved = await routers.here.read("t", "s", touch=True)
    assert moved
    assert moved.binding == TWO
    with pytest.raises(SessionsAway):
        await routers.there.read("t", "s", touch=True)
    redis_server.start()
    third = Binding("w3", "third")
    for _ in range(100):
        try:
            assert (await routers.here.bind("t", "s", moved, third)).binding == third
            break
        except SessionsAway:  # the breaker of the outage, which time alone closes
            routers.now += 1.0
    assert await read(routers.there) == third


async def test_memory_of_sessions_is_bounded(routers: RouterSessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.sessions.MAX_REMEMBERED", 3)
    assert MAX_REMEMBERED * 1_000 < 64 << 20, "a kilobyte each"
    for number in range(4):
        await routers.here.bind("t", f"s{number}", None, ONE)
    n_asked = routers.asked
    assert await routers.here.read("t", "s3", touch=False)
    assert routers.asked == n_asked
    assert await routers.here.read("t", "s0", touch=False)
    assert routers.asked == n_asked + 1


async def test_remembered_sessions_are_no_work_for_the_garbage_collector(routers: RouterSessions) -> None:
    await routers.here.bind("t", "s", None, ONE)  # opens the connection
    gc.collect()
    n_before = len(gc.get_objects())
    for number in range(1000):
        await routers.here.bind("t", f"s{number}", None, ONE)
    gc.collect()
    assert len(gc.get_objects()) < n_before + 500
