"""Leases in a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import redis.asyncio as redis

from services.common.keys import RedisKeys
from services.common.leases import Lease, LeaseKeeper, LeaseTable, LeaseWatcher
from services.common.redis_client import Batcher, RedisAccess, open_redis
from services.common.tasks import end_tasks
from services.common.worker_watcher import WorkerHooks, WorkerWatcher
from tests.integration.router.processes import KillableRedis, until

KEYS, ACCESS = RedisKeys("test"), RedisAccess("unix:///a")
FAST_S = 0.5  # longest time of a command


def lease(worker_id: str, address: str = "host:1", phase: str = "serving") -> Lease:
    return Lease(worker_id, "incarnation", address, "tiny", phase)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KillableRedis]:
    server = KillableRedis(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def client(server: KillableRedis) -> AsyncIterator[redis.Redis]:
    async with open_redis(RedisAccess(server.url), 5) as client:
        yield client


@contextlib.asynccontextmanager
async def running(work: Coroutine[None, None, None]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        await end_tasks([task])


def test_a_lease_survives_its_way_through_redis() -> None:
    assert Lease.from_json(lease("a").to_json()) == lease("a")
    assert Lease.from_json(json.dumps(asdict(lease("a")) | {"of another version": 1})) == lease("a")
    for text in ("{}", "[]", "nonsense", '{"worker_id": "a", "more": 1}'):
        with pytest.raises(ValueError, match=r"lease|JSON|Expecting"):
            Lease.from_json(text)


async def test_renewed_lease_is_read_until_released(client: redis.Redis) -> None:
    watcher, current = LeaseWatcher(client, KEYS, ACCESS), [lease("a")]
    async with running(LeaseKeeper(client, KEYS, ACCESS, lambda: current[0]).run()):

        async def read(expected: dict[str, Lease]) -> bool:
            return await watcher.read() == expected

        await until(lambda: read({"a": lease("a")}))
        current[0] = lease("a", phase="draining")
        await until(lambda: read({"a": lease("a", phase="draining")}))
    assert await watcher.read() == {}
    assert await client.zcard(KEYS.workers) == await client.hlen(KEYS.leases) == 0


async def redis_time(client: redis.Redis) -> float:
    seconds, microseconds = await client.time()
    return seconds + microseconds / 1e6


async def test_leases_end_and_come_back_by_the_clock_of_redis(client: redis.Redis) -> None:
    watcher, table = LeaseWatcher(client, KEYS, ACCESS), LeaseTable(client, KEYS)
    for worker_id in ("a", "b"):
        await table.write(lease(worker_id))
    assert set(await watcher.read()) == {"a", "b"}
    now = await redis_time(client)
    await client.zadd(KEYS.workers, {"a": now - 4.0, "b": now - 5.1})
    assert set(await watcher.read()) == {"a"}
    await table.write(lease("b"))
    await client.zadd(KEYS.workers, {"a": now - 5.1})
    assert set(await watcher.read()) == {"b"}, "as many as before, but others"


async def test_leases_are_sent_only_when_a_lease_appears_changes_or_ends(client: redis.Redis) -> None:
    table = LeaseTable(client, KEYS)
    seen, leases = await table.read(b"")
    assert leases == []
    for change in (
        lambda: table.write(lease("a")),
        lambda: table.write(lease("b")),
        lambda: table.write(lease("a", phase="draining")),
        lambda: table.remove("b"),
        client.flushall,
        lambda: table.write(lease("a")),
    ):
        await change()
        state, leases = await table.read(seen)
        assert state != seen
        assert leases is not None
        assert await table.read(state) == (state, None)
        seen = state
    await table.write(lease("a"))
    assert await table.read(seen) == (seen, None), "prolonged, not changed"


async def test_a_thousand_leases_and_more_are_read(client: redis.Redis) -> None:
    table = LeaseTable(client, KEYS)
    async with client.pipeline(transaction=False) as pipe:
        for i in range(2001):
            await table.write(lease(f"w{i}"), pipe)
        await pipe.execute()
    assert set(await LeaseWatcher(client, KEYS, ACCESS).read()) == {f"w{i}" for i in range(2001)}


async def test_long_dead_workers_are_removed_when_a_worker_registers(client: redis.Redis) -> None:
    table = LeaseTable(client, KEYS)
    await table.write(lease("long dead"))
    await client.zadd(KEYS.workers, {"long dead": await redis_time(client) - 601})
    await table.write(lease("a"))
    assert await client.zrange(KEYS.workers, 0, -1) == [b"a"]
    assert await client.hkeys(KEYS.leases) == [b"a"]


async def test_a_keeper_outlives_redis(client: redis.Redis, server: KillableRedis) -> None:
    watcher = LeaseWatcher(client, KEYS, ACCESS)
    async with running(LeaseKeeper(client, KEYS, ACCESS, lambda: lease("a")).run()) as keeper:
        seen = []
        async with contextlib.aclosing(watcher.watch()) as watch:
            async for leases in watch:
                seen.append(leases)
                if len(seen) == 1:
                    server.kill()
                if leases is None:
                    server.start()
                if None in seen and leases:
                    break
        assert not keeper.done()
        assert seen[-1] == {"a": lease("a")}


async def test_commands_fail_fast(tmp_path: Path) -> None:
    async with open_redis(RedisAccess(f"unix://{tmp_path}/nobody"), 0.05) as client:
        with pytest.raises((redis.RedisError, OSError)):
            await client.get("x")


class Log:
    def __init__(self) -> None:
        self.following: dict[str, str] = {}
        self.lost: list[str] = []
        self.live: set[str] = set()

    async def follow(self, lease: Lease) -> None:
        self.following[lease.worker_id] = lease.address
        try:
            await asyncio.Event().wait()
        finally:
            del self.following[lease.worker_id]

    def watch(self, watcher: LeaseWatcher) -> WorkerWatcher:
        return WorkerWatcher(watcher, WorkerHooks(self.follow, self.live.__contains__, self.lost.append))


class Script(LeaseWatcher):
    """Leases as a test gives them."""

    trouble = ""

    def __init__(self) -> None:
        self.leases: asyncio.Queue[dict[str, Lease] | None] = asyncio.Queue()

    async def watch(self):  # type: ignore[no-untyped-def]
        while True:
            yield await self.leases.get()

    async def give(self, *leases: Lease) -> None:
        self.leases.put_nowait({one.worker_id: one for one in leases})
        for _ in range(10):
            await asyncio.sleep(0)


async def test_workers_come_move_and_go_with_leases() -> None:
    log, script = Log(), Script()
    workers = log.watch(script)
    async with running(workers.run()):
        assert workers.waits_for == "leases are not read: asking Redis"
        await script.give(lease("a"), lease("b"))
        assert not workers.waits_for
        assert log.following == {"a": "host:1", "b": "host:1"}
        await script.give(lease("a", phase="draining"), lease("b", address="host:2"))
        assert log.following == {"a": "host:1", "b": "host:2"}
        assert log.lost == ["b"]
        script.leases.put_nowait(None)
        await script.give(lease("b", address="host:2"))
        assert log.following == {"b": "host:2"}
        assert log.lost == ["b", "a"]
    assert log.following == {}


async def test_a_live_stream_outweighs_a_missing_lease_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("services.common.worker_watcher.time.monotonic", lambda: now[0])
    log, script = Log(), Script()
    log.live.add("a")
    async with running(log.watch(script).run()):
        await script.give(lease("a"))
        await script.give()
        now[0] += 4.9
        await script.give()
        assert log.lost == []
        await script.give(lease("a"))
        await script.give()
        now[0] += 4.9
        await script.give()
        assert log.lost == []
        now[0] += 0.2
        await script.give()
        assert log.lost == ["a"]


async def test_a_task_that_swallows_a_cancellation_is_ended() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 2:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_tasks([task])
    assert task.cancelled()


async def test_commands_of_a_burst_share_a_connection(client: redis.Redis) -> None:
    batcher = Batcher(client, 5)
    await asyncio.gather(*(batcher.run("SET", f"key {i}", i) for i in range(100)))
    assert await asyncio.gather(*(batcher.run("GET", f"key {i}") for i in range(100))) == [
        str(i).encode() for i in range(100)
    ]
    assert int((await client.info("clients"))["connected_clients"]) <= 2
    assert (await client.info("stats"))["total_connections_received"] <= 3


async def test_bad_command_of_a_batch_fails_alone(client: redis.Redis) -> None:
    batcher = Batcher(client, 5)
    bad, good, abandoned = (
        asyncio.ensure_future(batcher.run(*command)) for command in (("NONSENSE",), ("PING",), ("PING",))
    )
    await asyncio.sleep(0)
    abandoned.cancel()
    assert await good
    with pytest.raises(redis.ResponseError):
        await bad


async def test_stopped_redis_costs_a_single_time_out_for_any_number_of_callers(server: KillableRedis) -> None:
    async with open_redis(RedisAccess(server.url), 5, timed_by_caller=True) as client:
        batcher = Batcher(client, 5.0)
        await batcher.run("SET", "key", "value")
        server.signal(signal.SIGSTOP)
        first = asyncio.ensure_future(batcher.run("PING"))
        await asyncio.sleep(0.1)  # it is on its way, the next ones wait behind it
        began = asyncio.get_running_loop().time()
        others = [asyncio.ensure_future(batcher.run("PING")) for _ in range(5)]
        for result in await asyncio.gather(first, *others, return_exceptions=True):
            assert isinstance(result, OSError)
        assert asyncio.get_running_loop().time() - began < 9.5, "and not one time-out after the other"
        server.signal(signal.SIGCONT)
        assert await batcher.run("GET", "key") == b"value", "and not the answer to an earlier command"


@contextlib.asynccontextmanager
async def far_away(server: KillableRedis) -> AsyncIterator[RedisAccess]:
    """A Redis whose connections take three times as long to make as a command may."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3 * FAST_S)
        answers, commands = await asyncio.open_unix_connection(RedisAccess(server.url).place)
        await asyncio.gather(_pass_on(reader, commands), _pass_on(answers, writer))

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as proxy:
        yield RedisAccess(f"redis://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")


async def test_connecting_may_take_longer_than_a_command(server: KillableRedis) -> None:
    """A name is looked up, TLS negotiated, a password checked; each time a connection breaks."""
    async with far_away(server) as access, open_redis(access, FAST_S, timed_by_caller=True) as client:
        batcher = Batcher(client, FAST_S)
        for _broken in range(2):
            with pytest.raises(TimeoutError):
                await batcher.run("PING")
            connecting = batcher.connect()
            assert connecting is not None
            await connecting
            assert await batcher.run("PING") == b"PONG"
            assert batcher.connect() is None
            await client.connection_pool.disconnect()


async def test_connection_of_an_abandoned_caller_serves_the_next_caller(server: KillableRedis) -> None:
    async with far_away(server) as access, open_redis(access, 5, connects_beside=True) as client:

        async def impatient() -> bool:
            try:
                async with asyncio.timeout(FAST_S):
                    return bool(await client.ping())
            except TimeoutError:
                return False

        assert await asyncio.gather(*(impatient() for _ in range(3))) == [False] * 3
        await until(impatient)
        await client.connection_pool.disconnect()
        assert not await impatient()
        await until(impatient)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(1 << 16):
        writer.write(chunk)
    writer.close()


async def test_a_batch_fails_as_a_whole_when_redis_is_gone(client: redis.Redis, server: KillableRedis) -> None:
    batcher = Batcher(client, 5)
    await batcher.run("PING")
    server.kill()
    results = await asyncio.gather(*(batcher.run("PING") for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, (redis.RedisError, OSError)) for result in results)
    server.start()
    assert await batcher.run("PING")
