from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.queue import QueueFullError, RouteQueue


class AttemptGate:
    """Lets a number of attempts succeed, in the order they are made."""

    def __init__(self) -> None:
        self.places = 0
        self.served: list[tuple[str, int]] = []

    def attempt(self, tenant: str, i: int) -> int | None:
        if not self.places:
            return None
        self.places -= 1
        self.served.append((tenant, i))
        return i


async def enqueue(
    queue: RouteQueue[int], gate: AttemptGate, waiters: list[tuple[str, int]], timeout_s: float = 30
) -> list[asyncio.Task[int]]:
    tasks, until = [], asyncio.get_running_loop().time() + timeout_s
    for i, (tenant, priority) in enumerate(waiters):
        wait = queue.wait(tenant, priority, lambda t=tenant, i=i: gate.attempt(t, i), lambda: until, 0)  # type: ignore[misc]
        tasks.append(asyncio.create_task(wait))
        await asyncio.sleep(0)
    return tasks


async def test_a_greedy_tenant_makes_room_for_another_tenant() -> None:
    queue, gate = RouteQueue[int](3), AttemptGate()
    tasks = await enqueue(queue, gate, [("greedy", 0)] * 3 + [("modest", 0)])
    with pytest.raises(QueueFullError):
        await tasks[2]
    gate.places = 3
    queue.drain()
    assert await asyncio.gather(tasks[0], tasks[1], tasks[3]) == [0, 1, 3]


async def test_a_more_urgent_request_displaces_a_less_urgent_request() -> None:
    queue, gate = RouteQueue[int](1), AttemptGate()
    tasks = await enqueue(queue, gate, [("a", 5), ("a", 0)])
    with pytest.raises(QueueFullError):
        await tasks[0]
    gate.places = 1
    queue.drain()
    assert await tasks[1] == 1


@pytest.mark.parametrize("noticed", [True, False])
async def test_a_caller_that_goes_away_leaves_the_queue(noticed: bool) -> None:
    """Also where the queue moves on before the caller's task has noticed."""
    queue, gate = RouteQueue[int](10), AttemptGate()
    tasks = await enqueue(queue, gate, [("a", 0), ("b", 0)])
    tasks[0].cancel()
    gate.places = 1
    if noticed:
        await asyncio.wait([tasks[0]])
    queue.drain()
    assert await tasks[1] == 1
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert (gate.served, len(queue)) == ([("b", 1)], 0)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2)), max_size=30), st.integers(0, 30))
def test_a_tenant_is_served_twice_only_after_all_tenants_of_its_priority(
    waiters: list[tuple[str, int]], places: int
) -> None:
    async def run() -> list[tuple[str, int]]:
        queue, gate = RouteQueue[int](1000), AttemptGate()
        tasks = await enqueue(queue, gate, waiters)
        gate.places = places
        queue.drain()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(queue) == 0
        return gate.served

    served = asyncio.run(run())
    assert len(served) == min(places, len(waiters))
    priorities = [waiters[i][1] for _, i in served]
    assert priorities == sorted(priorities)
    for priority in set(priorities):
        counts = Counter(t for t, p in waiters if p == priority)
        got = Counter(t for t, i in served if waiters[i][1] == priority)
        for tenant, count in got.items():
            assert all(got[other] >= min(count - 1, counts[other]) for other in counts), (tenant, got)


async def test_earlier_request_of_a_tenant_is_served_first_after_a_late_arrival() -> None:
    queue, gate, until = RouteQueue[int](10), AttemptGate(), asyncio.get_running_loop().time() + 60
    arrived = [30.0, 10.0, 20.0, 10.0]
    waits = [
        queue.wait("a", 0, lambda i=i: gate.attempt("a", i), lambda: until, since)  # type: ignore[misc]
        for i, since in enumerate(arrived)
    ]
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.sleep(0)
    assert queue.since == 10.0
    gate.places = len(arrived)
    queue.drain()
    await asyncio.gather(*tasks)
    assert [i for _, i in gate.served] == [1, 3, 2, 0]
    assert queue.since is None


async def test_a_wait_goes_on_while_its_end_moves() -> None:
    loop, queue = asyncio.get_running_loop(), RouteQueue[int](10)
    ends = iter([loop.time() + 0.01, loop.time() + 0.02])
    times: list[float] = []

    def until() -> float:
        times.append(next(ends, 0.0))
        return times[-1]

    with pytest.raises(TimeoutError):
        await queue.wait("a", 0, lambda: None, until, 0)
    assert len(times) == 3
    assert len(queue) == 0
