"""A run: a fleet is started, loaded and measured; afterwards parts of it join and are lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import httpx
from redis.asyncio import Redis

from bench.fleet.faults import Striking, StruckFault, leaks, strike
from bench.fleet.generators import Generators, running_generators
from bench.fleet.installation import Fleet, FleetProcess, FleetSize, running_fleet
from bench.fleet.load import FleetAnswer, Load
from bench.fleet.report import Convergence, FleetRun, IndexUse
from bench.fleet.usage import component_uses, decision_buckets, gateway_samples, index_state
from bench.fleet.workloads import Arrivals
from services.common.keys import RedisKeys

_RESUMES = "ryzanstein_gateway_resumes_total"
_CONVERGE_S = 120.0
_GIVEN_BACK_S = 60.0
_SETTLE_S = 2.0  # from the last worker's start until gateways have read the list of workers
_WATCH_S = 2.0  # coordinators bring their metrics up to date each second
_LOOK_S = 0.05
_LEASES = RedisKeys("default").workers


@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything around the load of a run."""

    idle_s: float = 0.0  # time without requests before it
    striking: Striking | None = None
    converges: bool = True  # without faults, parts join and are lost after it


async def run(size: FleetSize, load: Load, workload: Arrivals, conditions: Conditions) -> FleetRun:
    """Start a fleet, load it and measure."""
    idle_s, striking = conditions.idle_s, conditions.striking
    draw = random.Random(striking.seed if striking else 0)
    async with running_fleet(size, _CONVERGE_S) as fleet:
        load = replace(load, urls=fleet.urls)
        async with running_generators(load, workload, draw) as generators:
            computed_before = {view.worker_id: view.state.computed_tokens for view in await fleet.views()}
            decided_before = await decision_buckets(fleet)
            await asyncio.sleep(_SETTLE_S if idle_s else 0.0)
            await generators.ready()
            started = before = component_uses(fleet)
            if idle_s:
                await asyncio.sleep(idle_s)
                before = component_uses(fleet)
            generators.begin()
            index: IndexUse | None = None
            struck: Sequence[StruckFault] = ()
            if striking:
                struck = await strike(fleet, generators, striking, load.seconds)
                answers = await generators.end()
            else:
                answers, index = await _watched(fleet, generators)
        after, decided = component_uses(fleet), await decision_buckets(fleet)
        held = await leaks(fleet, _GIVEN_BACK_S)
        computed = [view.state.computed_tokens - computed_before.get(view.worker_id, 0) for view in await fleet.views()]
        resumes = int(sum(sample.value for sample in await gateway_samples(fleet, _RESUMES)))
        convergence = await converge(fleet) if conditions.converges and not striking else None
    return FleetRun(
        size, load, workload, answers, started, before, after, decided_before, decided, computed, held, struck, resumes,
        index, convergence,
    )  # fmt: skip


async def _watched(fleet: Fleet, generators: Generators) -> tuple[list[FleetAnswer], IndexUse]:
    """The answers, and what the coordinators took in meanwhile."""
    before, began, worst_s = await index_state(fleet), time.monotonic(), 0.0
    loading = asyncio.create_task(generators.end())
    while not loading.done():
        await asyncio.wait([loading], timeout=_WATCH_S)
        worst_s = max(worst_s, (await index_state(fleet)).lag_s)
    events = (await index_state(fleet)).events - before.events
    return loading.result(), IndexUse(events / (time.monotonic() - began), worst_s)


async def converge(fleet: Fleet) -> Convergence:
    """Let a tenth more workers join and kill them; then replace a router, a coordinator and Redis."""
    n_workers = fleet.size.workers
    n_more = max(1, n_workers // 10)
    joined = fleet.join(n_more)
    join_s = await fleet.wait_serving(n_workers + n_more, _CONVERGE_S)
    began = time.monotonic()
    joined.kill()
    await fleet.wait_serving(n_workers, _CONVERGE_S)
    loss_s = time.monotonic() - began
    began = time.monotonic()
    _replace(fleet.of("router")[0])
    await fleet.wait_serving(n_workers, _CONVERGE_S)
    router_s = time.monotonic() - began
    return Convergence(n_more, join_s, loss_s, router_s, await _resync_s(fleet), await _leases_s(fleet))


def _replace(process: FleetProcess) -> None:
    process.kill()
    process.start()


async def _resync_s(fleet: Fleet) -> float:
    """Seconds from the loss of a coordinator until its successor knows the blocks of all workers."""
    n_entries, began = (await index_state(fleet)).entries, time.monotonic()
    _replace(fleet.of("kv-coordinator")[0])
    async with asyncio.timeout(_CONVERGE_S):
        while not await _has_synced(fleet, n_entries):  # noqa: ASYNC110  # known in another process
            await asyncio.sleep(_LOOK_S)
    return time.monotonic() - began


async def _has_synced(fleet: Fleet, n_entries: float) -> bool:
    try:
        state = await index_state(fleet)
    except httpx.HTTPError:  # it is not there yet
        return False
    return state.synced == fleet.size.workers and state.entries >= n_entries


async def _leases_s(fleet: Fleet) -> float:
    """Seconds from the loss of Redis until its successor has the leases of all workers and all routers use these."""
    began = time.monotonic()
    fleet.redis.kill()
    await asyncio.to_thread(fleet.redis.start)
    async with asyncio.timeout(_CONVERGE_S), Redis.from_url(fleet.redis.url) as client:
        while await client.zcard(_LEASES) < fleet.size.workers:  # noqa: ASYNC110  # as above
            await asyncio.sleep(_LOOK_S)
    await fleet.wait_serving(fleet.size.workers, _CONVERGE_S)
    return time.monotonic() - began
