"""A coordinator process that follows real gRPC servers by their leases in a real Redis."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import grpc
import pytest
import redis.asyncio as redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ryzanstein.v1 import kv_pb2 as pb
from ryzanstein.v1 import kv_pb2_grpc, worker_pb2

from services.common.keys import RedisKeys
from services.common.ports import free_port
from services.common.rpc import open_channel
from services.kv_coordinator import main
from services.kv_coordinator.settings import CoordinatorSettings
from tests.integration.router.fake_worker import FakeWorker
from tests.integration.router.processes import KillableRedis, Service, coordinator_process, running, until


@pytest.fixture
def process(redis_server: KillableRedis) -> Iterator[Service]:
    service = coordinator_process(redis_server.url_of("coordinator"))
    yield service
    service.end()


@pytest.fixture
async def coordinator(process: Service) -> AsyncIterator[kv_pb2_grpc.KvCoordinatorStub]:
    async with open_channel(process.address) as channel:
        yield kv_pb2_grpc.KvCoordinatorStub(channel)


class Workers:
    def __init__(self, client: redis.Redis, stack: AsyncExitStack) -> None:
        self.redis = client
        self._stack = stack

    async def start(self, worker_id: str, **options: int) -> FakeWorker:
        worker = FakeWorker(worker_id, **options)
        await worker.start(self.redis, RedisKeys("default"))
        self._stack.push_async_callback(worker.stop)
        return worker


@pytest.fixture
async def workers(redis_server: KillableRedis) -> AsyncIterator[Workers]:
    client = redis.from_url(redis_server.url)
    async with AsyncExitStack() as stack:
        yield Workers(client, stack)
    await client.aclose()


async def lookup(coordinator: kv_pb2_grpc.KvCoordinatorStub, *chains: list[int]) -> list[pb.LookupResponse]:
    sent = [pb.LookupRequests(requests=[pb.LookupRequest(hashes=chain) for chain in chains])]
    return [answer async for message in coordinator.Lookup(iter(sent)) for answer in message.responses]


async def depths(coordinator: kv_pb2_grpc.KvCoordinatorStub, chain: list[int]) -> dict[str, int]:
    [answer] = await lookup(coordinator, chain)
    return {depth.worker_id: depth.blocks for depth in answer.depths}


async def until_depths(coordinator: kv_pb2_grpc.KvCoordinatorStub, chain: list[int], expected: dict[str, int]) -> None:
    async def there() -> bool:
        return await depths(coordinator, chain) == expected

    await until(there)


async def until_held(
    coordinator: kv_pb2_grpc.KvCoordinatorStub, roster: pb.Roster, expected: dict[tuple[str, int], int]
) -> pb.Roster:
    """Wait until a caller that has `roster` gets these blocks of CHAIN by worker and place; return the latest."""

    async def there() -> bool:
        sent = pb.LookupRequests(requests=[pb.LookupRequest(hashes=CHAIN, roster=roster.version)])
        [answer] = [answer async for message in coordinator.Lookup(iter([sent])) for answer in message.responses]
        assert not answer.depths
        if answer.HasField("roster"):
            assert answer.roster.version != roster.version
            roster.CopyFrom(answer.roster)
        masks = [(held.blocks, int.from_bytes(held.places, "little")) for held in answer.held]
        actual = {
            (place.worker_id, place.place): blocks
            for number, place in enumerate(roster.places)
            for blocks, mask in masks
            if mask >> number & 1
        }
        return actual == expected

    await until(there)
    return roster


async def stats(coordinator: kv_pb2_grpc.KvCoordinatorStub, hot: int = 0) -> pb.StatsResponse:
    return await coordinator.Stats(pb.StatsRequest(hot_prefixes=hot))


CHAIN = [2**64 - n for n in range(1, 9)]


async def holder(coordinator: kv_pb2_grpc.KvCoordinatorStub, workers: Workers, n: int = 8) -> FakeWorker:
    """Start the worker `w` with the first `n` blocks of CHAIN, which the coordinator knows."""
    worker = await workers.start("w")
    worker.store(CHAIN[:n])
    await until_depths(coordinator, CHAIN, {"w": n})
    return worker


async def test_depths_follow_stored_evicted_and_cleared_blocks(
    coordinator: kv_pb2_grpc.KvCoordinatorStub, workers: Workers
) -> None:
    before, after = await workers.start("before"), await workers.start("after")
    before.store(CHAIN[:3])
    await until_depths(coordinator, CHAIN, {"before": 3})
    after.store(CHAIN)
    await until_depths(coordinator, CHAIN, {"before": 3, "after": 8})
    after.evict(CHAIN[:4:-1])
    await until_depths(coordinator, CHAIN, {"before": 3, "after": 5})
    after.clear()
    await until_depths(coordinator, CHAIN, {"before": 3})
    after.store(CHAIN[:1])
    await until_depths(coordinator, CHAIN, {"before": 3, "after": 1})
    assert await depths(coordinator, []) == {}
    answers = await lookup(coordinator, CHAIN, [], CHAIN[:1])  # one call, in order
    assert [sorted(d.blocks for d in answer.depths) for answer in answers] == [[1, 3], [], [1, 1]]
    assert {d.incarnation for d in answers[0].depths} == {before.incarnation, after.incarnation}


async def test_roster_comes_with_an_answer_only_after_a_change_of_places(
    coordinator: kv_pb2_grpc.KvCoordinatorStub, workers: Workers
) -> None:
    first = await workers.start("first")
    first.store(CHAIN)
    roster = await until_held(coordinator, pb.Roster(), {("first", 0): 8})
    version = roster.version
    first.evict(CHAIN[:4:-1])
    await until_held(coordinator, roster, {("first", 0): 5})
    assert roster.version == version, "the same places hold other blocks"
    second = await workers.start("second")
    second.store(CHAIN[:2])
    await until_held(coordinator, roster, {("first", 0): 5, ("second", 0): 2})
    assert roster.version != version
    assert {place.incarnation for place in roster.places} >= {first.incarnation, second.incarnation}


async def test_places_below_the_device_have_depths_of_their_own(
    coordinator: kv_pb2_grpc.KvCoordinatorStub, workers: Workers
) -> None:
    async def places(chain: list[int]) -> dict[str, tuple[int, int, int]]:
        [answer] = await lookup(coordinator, chain)
        return {depth.worker_id: (depth.blocks, depth.host_blocks, depth.disk_blocks) for depth in answer.depths}

    async def until_places(expected: dict[str, tuple[int, int, int]]) -> None:
        async def there() -> bool:
            return await places(CHAIN) == expected

        await until(there)

    one, two = await workers.start("one"), await workers.start("two")
    one.store(CHAIN[:2])
    two.store(CHAIN[:1])
    await until_places({"one": (2, 0, 0), "two": (1, 0, 0)})
    two.clear()
    one.offload(worker_pb2.KV_PLACE_HOST, CHAIN[:4])
    one.offload(worker_pb2.KV_PLACE_DISK, CHAIN)
    two.offload(worker_pb2.KV_PLACE_DISK, CHAIN[:3])
    await until_places({"one": (2, 4, 8), "two": (0, 0, 3)})
    one.offload(9, CHAIN)  # a place of a newer version
    one.clear()  # the device only
    one.drop(worker_pb2.KV_PLACE_DISK, CHAIN[:4:-1])
    await until_places({"one": (0, 4, 5), "two": (0, 0, 3)})
    numbered = {("one", 1): 4, ("one", 2): 5, ("one", 9): 8, ("two", 2): 3}
    await until_held(coordinator, pb.Roster(), numbered)
    two.skip_events(1)
    two.store(CHAIN[:1])  # a gap: the dump of this worker names no place below the device
    await until_places({"one": (0, 4, 5), "two": (1, 0, 0)})
    assert await places(CHAIN[5:]) == {}
    assert (await stats(coordinator, hot=1)).hot[0].workers == 2, "one counts once"


async def test_a_gap_is_noticed_and_repaired_by_a_dump(
    coordinator: kv_pb2_grpc.KvCoordinatorStub, workers: Workers
) -> None:
    worker = await holder(coordinator, workers, 2)
    worker.held |= dict.fromkeys(CHAIN[2:5])  # stored by events that are lost
    worker.skip_events(3)
    worker.store(CHAIN[5:6])
    await until_depths(coordinator, CHAIN, {"w": 6})
    assert ((await stats(coordinator)).gaps, len(worker.syncs)) == (1, 2)


async def test_a_short_break_is_repaired_by_a_replay(
    coordinator: kv_pb2_grpc.KvCoordinatorStub, workers: Workers
) -> None:
    worker = await holder(coordinator, workers, 2)
    port = int(worker.address.rpartition(":")[2])
    await worker.break_streams()
    worker.store(CHAIN[2:4])
    await worker.start(port=port)
    await until_depths(coordinator, CHAIN, {"w": 4})
    assert worker.syncs[-1].next_seq == 1
    assert worker.syncs[-1].incarnation == worker.incarnation
    assert (await stats(coordinator)).resyncs == 1, "the first dump only"


async def test_the_lag_is_that_of_the_worker_that_is_away(redis_server: KillableRedis, workers: Workers) -> None:
    port = free_port()

    def lag() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = str(answer.read(), "utf-8")
        return float(text.split("\nryzanstein_coordinator_lag_seconds ")[1].split("\n")[0])

    async def away(seconds: float) -> bool:
        return await asyncio.to_thread(lag) > seconds

    async def in_step() -> bool:
        return await asyncio.to_thread(lag) == 0.0

    with running(coordinator_process(redis_server.url_of("coordinator"), METRICS_PORT=str(port))) as coordinator:
        await workers.start("steady")
        async with open_channel(coordinator.address) as channel:
            worker = await holder(kv_pb2_grpc.KvCoordinatorStub(channel), workers)
        await until(in_step)
        back = int(worker.address.rpartition(":")[2])
        await worker.break_streams()
        await until(lambda: away(1.0))
        await worker.start(port=back)  # and has nothing new to tell
        await until(in_step)


async def test_another_incarnation_has_an_empty_cache(
    coordinator: kv_pb2_grpc.KvCoordinatorStub, workers: Workers
) -> None:
    worker = await holder(coordinator, workers)
    port = int(worker.address.rpartition(":")[2])
    await worker.stop()
    restarted = FakeWorker("w")
    await restarted.start(workers.redis, RedisKeys("default"), port=port)
    restarted.store(CHAIN[:1])
    await until_depths(coordinator, CHAIN, {"w": 1})
    await restarted.stop()
    await until_depths(coordinator, CHAIN, {})


async def test_a_lost_worker_is_forgotten_and_its_memory_swept(
    coordinator: kv_pb2_grpc.KvCoordinatorStub, workers: Workers
) -> None:
    worker, other = await workers.start("w"), await workers.start("other")
    worker.store(CHAIN)
    other.store(CHAIN[:1])
    await until_depths(coordinator, CHAIN, {"w": 8, "other": 1})
    await worker.stop()
    await until_depths(coordinator, CHAIN, {"other": 1})

    async def swept() -> bool:
        return (await stats(coordinator)).blocks == 1

    await until(swept)
    assert (await stats(coordinator)).entries == 1


async def test_a_large_dump_is_taken_in(coordinator: kv_pb2_grpc.KvCoordinatorStub, workers: Workers) -> None:
    worker = await workers.start("w", kept_events=10)
    worker.store(CHAIN)
    worker.store(range(1, 50_001))
    await until_depths(coordinator, CHAIN, {"w": 8})

    async def complete() -> bool:
        return (await stats(coordinator)).entries == 50_008

    await until(complete)
    assert (await stats(coordinator)).workers[0].synced


async def test_restarted_coordinator_relearns_all_blocks(
    redis_server: KillableRedis, process: Service, workers: Workers
) -> None:
    async with open_channel(process.address) as channel:
        stub = kv_pb2_grpc.KvCoordinatorStub(channel)
        await holder(stub, workers)
        process.kill()
        again = coordinator_process(
            redis_server.url_of("coordinator"), COORDINATOR_PORT=process.address.rpartition(":")[2]
        )

        async def back() -> bool:
            try:
                return await depths(stub, CHAIN) == {"w": 8}
            except grpc.aio.AioRpcError:
                return False

        await until(back)
        await asyncio.to_thread(again.end)


async def test_without_redis_live_workers_are_followed(
    coordinator: kv_pb2_grpc.KvCoordinatorStub, workers: Workers, redis_server: KillableRedis
) -> None:
    worker = await holder(coordinator, workers, 1)
    redis_server.kill()
    worker.store(CHAIN[1:2])
    await until_depths(coordinator, CHAIN, {"w": 2})
    redis_server.start()
    await asyncio.sleep(0.3)
    worker.store(CHAIN[2:3])
    await until_depths(coordinator, CHAIN, {"w": 3})


async def test_hot_and_pinned_prefixes_are_told(coordinator: kv_pb2_grpc.KvCoordinatorStub, workers: Workers) -> None:
    await holder(coordinator, workers, 2)
    for i in range(20):
        await depths(coordinator, [*CHAIN[:2], 1000 + i])
    await coordinator.Pin(pb.PinRequest(hashes=[7, 8, 9], ttl_s=60))
    await coordinator.Pin(pb.PinRequest(hashes=[7], ttl_s=0))
    hot = (await stats(coordinator, hot=2)).hot
    assert [(p.hash, p.workers) for p in hot] == [(9, 0), (CHAIN[0], 1), (CHAIN[1], 1)]
    assert hot[1].lookups >= hot[2].lookups >= 20
    with pytest.raises(grpc.aio.AioRpcError) as nothing:
        await coordinator.Pin(pb.PinRequest())
    assert nothing.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_pins_beyond_the_limit_are_refused(redis_server: KillableRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "MAX_PINS", 1)
    settings = CoordinatorSettings(redis_url=redis_server.url_of("coordinator"), coordinator_port=free_port())
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group, open_channel(f"127.0.0.1:{settings.coordinator_port}") as channel:
        group.create_task(main.serve(settings, stop))
        coordinator = kv_pb2_grpc.KvCoordinatorStub(channel)
        await coordinator.Pin(pb.PinRequest(hashes=[10], ttl_s=60), wait_for_ready=True)
        with pytest.raises(grpc.aio.AioRpcError) as full:
            await coordinator.Pin(pb.PinRequest(hashes=[11], ttl_s=60))
        assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stop.set()


async def test_coordinator_serves_after_reading_leases(process: Service) -> None:
    async with open_channel(process.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "ryzanstein.v1.KvCoordinator"):
            request = health_pb2.HealthCheckRequest(service=service)
            async with asyncio.timeout(60):
                async for response in health.Watch(request):
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        break
    assert await asyncio.to_thread(process.end) == 0
