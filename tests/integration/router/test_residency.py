"""Which workers sleep: a router's residency in front of workers that are real gRPC servers and share a host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc.aio
import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.common.tasks import end_tasks
from services.router.breaker import BreakerLimits
from services.router.fleet import Fleet
from services.router.residency import CHECK_S, Residency, WakeError
from tests.integration.router.conftest import RouterRig, ask, lists
from tests.integration.router.fake_worker import FakeWorker
from tests.integration.router.processes import until

SLEEPING, SERVING = pb.PHASE_SLEEPING, pb.PHASE_SERVING


class Host:
    """A fleet and its residency, whose clock a test moves."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.fleet = Fleet("router", 30.0, BreakerLimits(), lambda: self.residency.changed())
        self.residency = Residency(self.fleet, clock=lambda: asyncio.get_running_loop().time() + self.ahead_s)
        self.ahead_s = 0.0
        self._stack = stack

    async def worker(self, model: str, **state: object) -> FakeWorker:
        """A worker of the host, with one model that is awake at a time."""
        worker = FakeWorker(f"of-{model}", model)
        worker.update(**{"host": "here", "max_awake": 1, "phase": SLEEPING, **state})
        await worker.start()
        self._stack.push_async_callback(worker.stop)
        self.run(self.fleet.follow(worker.lease()))
        await until(lambda: self.sees(worker, worker.state.phase))
        return worker

    def run(self, work) -> asyncio.Task[None]:  # type: ignore[no-untyped-def]
        task = asyncio.create_task(work)
        self._stack.push_async_callback(end_tasks, [task])
        return task

    async def sees(self, worker: FakeWorker, phase: pb.Phase) -> bool:
        place = self.fleet.find(worker.worker_id)
        return place is not None and place[1].connected and place[1].state.phase == phase

    async def waits(self, *workers: FakeWorker) -> None:
        """Return once the router has seen the last states."""
        for worker in workers:
            await until(lambda worker=worker: self._up_to_date(worker))  # type: ignore[misc]

    async def _up_to_date(self, worker: FakeWorker) -> bool:
        place = self.fleet.find(worker.worker_id)
        return place is not None and place[1].state.seq == worker.state.seq


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with AsyncExitStack() as stack:
        yield Host(stack)


async def test_least_recently_used_idle_worker_sleeps_when_another_one_wakes(host: Host) -> None:
    old, recent, wanted, elsewhere = [
        await host.worker("old", phase=SERVING, max_awake=2),
        await host.worker("recent", phase=SERVING, max_awake=2),
        await host.worker("wanted", max_awake=2),
        await host.worker("elsewhere", phase=SERVING, host="there"),
    ]
    for worker in (elsewhere, old, recent):
        host.residency.placed(worker.worker_id, None)
        host.ahead_s += 1
    await host.residency.wake(wanted.worker_id)
    assert [worker.naps for worker in (old, recent, wanted, elsewhere)] == [["sleep"], [], ["wake"], []]


async def test_idle_worker_of_the_lowest_priority_sleeps_first_however_recent_its_use(host: Host) -> None:
    first, low, wanted = [
        await host.worker("first", phase=SERVING, max_awake=2, priority=1),
        await host.worker("low", phase=SERVING, max_awake=2, priority=-1),
        await host.worker("wanted", max_awake=2),
    ]
    for worker in (first, low):
        host.residency.placed(worker.worker_id, None)
        host.ahead_s += 1
    await host.residency.wake(wanted.worker_id)
    assert [worker.naps for worker in (first, low, wanted)] == [[], ["sleep"], ["wake"]]
    await host.waits(first, low, wanted)
    host.residency.placed(wanted.worker_id, None)
    await host.residency.wake(low.worker_id)
    assert [worker.naps for worker in (first, low, wanted)] == [[], ["sleep", "wake"], ["wake", "sleep"]]


async def test_busy_worker_of_the_lowest_priority_makes_room_first(host: Host) -> None:
    longest = await host.worker("longest", phase=SERVING, max_awake=2, running=1, priority=1)
    low = await host.worker("low", phase=SERVING, max_awake=2, running=1)
    wanted = await host.worker("wanted", max_awake=2)
    for worker in (longest, low):
        host.residency.placed(worker.worker_id, None)
    waking = host.run(host.residency.wake(wanted.worker_id))

    async def rests() -> bool:
        host.ahead_s += 0.1
        return host.fleet.pool("low").members[low.worker_id].resting

    await until(rests)
    assert not host.fleet.pool("longest").members[longest.worker_id].resting
    low.update(running=0)
    await waking
    assert [worker.naps for worker in (longest, low, wanted)] == [[], ["sleep"], ["wake"]]


async def test_pinned_worker_never_sleeps_and_the_refusal_says_so(host: Host) -> None:
    pinned = await host.worker("pinned", phase=SERVING, pinned=True, idle_sleep_s=1)
    wanted = await host.worker("wanted")
    host.residency.placed(pinned.worker_id, 0)
    with pytest.raises(WakeError, match="no worker of host here may sleep: all that are awake are pinned"):
        await host.residency.wake(wanted.worker_id)
    assert (pinned.naps, wanted.naps) == ([], [])


async def test_busy_worker_gets_no_more_requests_after_its_turn_and_sleeps_once_idle(host: Host) -> None:
    busy = await host.worker("busy", phase=SERVING, running=1)
    wanted = await host.worker("wanted")
    pool = host.fleet.pool("busy")
    host.residency.placed(busy.worker_id, None)
    waking = host.run(host.residency.wake(wanted.worker_id))

    async def rests() -> bool:
        host.ahead_s += 0.1
        return pool.members[busy.worker_id].resting

    await until(rests)
    assert not busy.naps
    busy.cannot_sleep = "a request of another router runs"
    busy.update(running=0)

    async def refused() -> bool:
        return bool(busy.refused_sleeps)

    await until(refused)
    await until(rests)
    busy.cannot_sleep = ""
    await waking
    assert (busy.naps, wanted.naps) == (["sleep"], ["wake"])
    busy.update(phase=SERVING)
    await host.waits(busy)
    assert not pool.snapshot().why_not.any(), "it takes requests again when it serves again"


async def test_worker_gives_its_memory_when_the_memory_does_not_suffice(host: Host) -> None:
    idle = await host.worker("idle", phase=SERVING, max_awake=0)
    wanted = await host.worker("wanted", max_awake=0)
    wanted.cannot_wake = "needs 2 GiB, 1 GiB is available"
    host.residency.placed(idle.worker_id, None)
    waking = host.run(host.residency.wake(wanted.worker_id))
    await until(lambda: host.sees(idle, SLEEPING))
    with pytest.raises(WakeError, match="does not wake: needs 2 GiB, 1 GiB is available"):
        await waking
    wanted.cannot_wake = ""
    await host.residency.wake(wanted.worker_id)
    assert (idle.naps, wanted.naps) == (["sleep"], ["wake"])


async def test_worker_wakes_only_after_the_one_that_takes_its_memory_now(host: Host) -> None:
    first, second = [await host.worker(name, max_awake=0) for name in ("first", "second")]
    first.woken_phase = pb.PHASE_WAKING
    await host.residency.wake(first.worker_id)
    waking = host.run(host.residency.wake(second.worker_id))
    await asyncio.wait([waking], timeout=3 * CHECK_S)
    assert (first.naps, second.naps) == (["wake"], []), "a prediction would not see what the first one still takes"
    first.update(phase=SERVING)
    await waking
    assert second.naps == ["wake"]


async def test_wake_is_told_the_memory_promised_to_awake_workers_of_the_host(host: Host) -> None:
    for name, where, promised in (("a", "here", 10), ("b", "here", 200), ("c", "there", 3000)):
        await host.worker(name, max_awake=0, host=where, phase=SERVING, promised_bytes=promised)
    wanted, lone = await host.worker("wanted", max_awake=0), await host.worker("lone", host="")
    for worker in (wanted, lone):
        await host.residency.wake(worker.worker_id)
    assert (wanted.promised, lone.promised) == ([210], [0])


async def test_request_for_a_model_that_cannot_wake_is_refused_with_the_reason(fleet: RouterRig) -> None:
    worker = await fleet.worker("asleep", phase=SLEEPING)
    worker.cannot_wake = "needs 2 GiB, 1 GiB is available"
    router = await fleet.router(workers=0)
    await until(lambda: lists(router, "asleep"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.Route(ask(timeout_ms=5000, patience_ms=3000))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "1 sleeping, worker asleep does not wake: needs 2 GiB, 1 GiB is available" in str(refused.value.details())
    worker.cannot_wake = ""
    assert (await router.Route(ask(patience_ms=60_000))).worker_id == "asleep"


async def test_worker_that_refuses_to_sleep_is_passed_over(host: Host) -> None:
    refuses = await host.worker("refuses", phase=SERVING, max_awake=2)
    other = await host.worker("other", phase=SERVING, max_awake=2)
    wanted = await host.worker("wanted", max_awake=2)
    for worker in (refuses, other):
        host.residency.placed(worker.worker_id, None)
        host.ahead_s += 1
    refuses.cannot_sleep = "a request of another router runs"
    await host.residency.wake(wanted.worker_id)
    assert (refuses.naps, other.naps, wanted.naps) == ([], ["sleep"], ["wake"])
    assert not host.fleet.pool("refuses").snapshot().why_not.any(), "it goes on taking requests"


@pytest.mark.parametrize(
    ("state", "keep_alive_s", "idle_s", "sleeps"),
    [
        ({"idle_sleep_s": 60}, None, 59, False),
        ({"idle_sleep_s": 60}, None, 61, True),
        ({"idle_sleep_s": 60}, 0.0, 0, True),
        ({"idle_sleep_s": 60}, 90.0, 89, False),
        ({"idle_sleep_s": 60}, -1.0, 1e6, False),
        ({"idle_sleep_s": 60, "running": 1}, 0.0, 1e6, False),
        ({"idle_sleep_s": 60, "pinned": True}, 0.0, 1e6, False),
        ({}, None, 1e6, False),
        ({}, 30.0, 31, True),
        ({"host": ""}, 30.0, 31, True),
    ],
)
async def test_idle_worker_sleeps_after_the_time_of_its_setting_or_of_the_last_request_that_named_one(
    host: Host, state: dict[str, object], keep_alive_s: float | None, idle_s: float, sleeps: bool
) -> None:
    worker = await host.worker("one", phase=SERVING, **state)
    witness = await host.worker("witness", phase=SERVING, host="there")
    for each, keep_alive in ((worker, keep_alive_s), (worker, None), (witness, 0.0)):
        host.residency.placed(each.worker_id, keep_alive)
    host.ahead_s += idle_s
    host.run(host.residency.run())
    await until(lambda: host.sees(witness, SLEEPING))
    if sleeps:
        await until(lambda: host.sees(worker, SLEEPING))
    assert worker.naps == (["sleep"] if sleeps else [])


async def test_too_many_awake_workers_sleep_except_the_most_recently_used(host: Host) -> None:
    workers = [await host.worker(f"m{i}", phase=SERVING) for i in range(3)]
    for worker in workers:
        host.residency.placed(worker.worker_id, None)
        host.ahead_s += 1
    host.run(host.residency.run())
    for worker in workers[:2]:
        await until(lambda worker=worker: host.sees(worker, SLEEPING))  # type: ignore[misc]
    assert [worker.naps for worker in workers] == [["sleep"], ["sleep"], []]


async def test_workers_that_many_want_to_wake_take_turns(host: Host) -> None:
    workers = [await host.worker(f"m{i}") for i in range(3)]

    async def wake(worker: FakeWorker) -> None:
        await host.residency.wake(worker.worker_id)
        assert sum(each.state.phase == SERVING for each in workers) == 1
        host.residency.placed(worker.worker_id, None)

    await asyncio.gather(*(wake(worker) for worker in workers for _ in range(2)))
    assert all(worker.naps[0] == "wake" for worker in workers)
