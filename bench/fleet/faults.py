"""Faults in a fleet at times and in an order that a seed fixes, and what must be empty after them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from enum import StrEnum

from redis.asyncio import Redis

from bench.fleet.installation import WORKERS, Fleet, FleetProcess
from bench.fleet.load import FleetAnswer, Load
from bench.fleet.usage import gateway_samples

_STALL_S = 0.6  # below the limit at which ranks count as lost
_LONG_STALL_S = 30.0
_DOWN_S = 0.3
_CUT_OFF_S = 3.0  # above the silence after which gateways go on elsewhere, below the end of a lease
_LOOK_S = 0.02
_LEVELS = ("running", "waiting", "kv_blocks_used", "queued_prefill_tokens")
_ROUTE = "/v1/completions"
_IN_FLIGHT = "ryzanstein_gateway_in_flight_requests"


class FleetFault(StrEnum):
    """Kinds of faults."""

    LOSE = "a worker's ranks end"
    STALL = "a worker's ranks stall"
    HANG = "a worker's ranks hang"
    KILL_WORKERS = "a process of workers is killed"
    KILL_ROUTER = "a router is killed"
    KILL_REDIS = "Redis is killed and starts empty"
    KILL_COORDINATOR = "a coordinator is killed"
    ROLL_WORKERS = "a process of workers drains, ends and starts"
    CUT_OFF = "a process of workers is cut off and comes back"


_KILLED = {
    FleetFault.KILL_ROUTER: "router",
    FleetFault.KILL_WORKERS: WORKERS,
    FleetFault.KILL_COORDINATOR: "kv-coordinator",
}


async def strike(fleet: Fleet, load: Load, draw: random.Random, every_s: float) -> list[FleetFault]:
    """Strike for the time of the load, and until every kind has come; returns the faults. Processes are started again.

    Every kind comes once before any comes twice. A strike waits until the answers that ran during the one before have
    ended, or have grown so far that gateways count deaths from zero again. Otherwise a request on a small fleet or a
    slow machine would lose worker after worker, and rightly count as poison after the third.
    """
    struck: list[FleetFault] = []
    left: list[FleetFault] = []
    running: Sequence[FleetAnswer] = ()
    began = time.monotonic()
    while time.monotonic() - began < load.seconds or len(struck) < len(FleetFault):
        await asyncio.sleep(every_s)
        while not all(answer.outlived for answer in running):  # noqa: ASYNC110  # requests of another task
            await asyncio.sleep(_LOOK_S)
        if not left:
            left = draw.sample(list(FleetFault), len(FleetFault))
        struck.append(left.pop())
        running = load.running()
        for answer in running:
            answer.strike()
        await _strike(fleet, struck[-1], draw)
    return struck


async def _strike(fleet: Fleet, fault: FleetFault, draw: random.Random) -> None:
    match fault:
        case FleetFault.KILL_REDIS:
            fleet.redis.kill()
            await asyncio.sleep(_DOWN_S)
            await asyncio.to_thread(fleet.redis.start)
        case FleetFault.ROLL_WORKERS:
            victim = draw.choice(fleet.of(WORKERS))
            await asyncio.to_thread(victim.end)
            victim.start()
        case FleetFault.CUT_OFF:
            victim = draw.choice(fleet.of(WORKERS))
            victim.usage.suspend()
            await asyncio.sleep(_CUT_OFF_S)
            victim.usage.resume()
        case FleetFault.KILL_ROUTER | FleetFault.KILL_WORKERS | FleetFault.KILL_COORDINATOR:
            victim = draw.choice(fleet.of(_KILLED[fault]))
            victim.kill()
            await asyncio.sleep(_DOWN_S)
            victim.start()
        case _:
            process, index = await _busy_worker(fleet, draw)
            stall = f"stall {index} {_STALL_S if fault is FleetFault.STALL else _LONG_STALL_S}"
            process.order(f"lose {index}" if fault is FleetFault.LOSE else stall)


async def _busy_worker(fleet: Fleet, draw: random.Random) -> tuple[FleetProcess, int]:
    """A worker that has requests, else any: its process, and its index there."""
    busy = sorted(view.worker_id for view in await fleet.views() if view.state.running)
    if busy:
        name, _, index = draw.choice(busy).rpartition("-")
        return next(each for each in fleet.of(WORKERS) if each.environment["WORKER_ID"] == name), int(index)
    process = draw.choice(fleet.of(WORKERS))
    return process, draw.randrange(process.n_workers)


async def leaks(fleet: Fleet, within_s: float) -> Sequence[str]:
    """Resources still held after the last answer; waits up to `within_s` for their release."""
    deadline = time.monotonic() + within_s
    while (measured := await _held(fleet)) and time.monotonic() < deadline:  # noqa: ASYNC110  # in other processes
        await asyncio.sleep(0.2)
    return measured


async def _held(fleet: Fleet) -> Sequence[str]:
    measured = []
    for view in await fleet.views():
        state = view.state
        held = {name: getattr(state, name) for name in _LEVELS}
        measured += [f"{view.worker_id}: {name} {level}" for name, level in held.items() if level]
        if view.unacknowledged:
            measured.append(f"{view.worker_id}: {view.unacknowledged} unacknowledged dispatches")
    # Those of other routes are the readings of the metrics themselves.
    in_flight = [each for each in await gateway_samples(fleet, _IN_FLIGHT) if each.labels["route"] == _ROUTE]
    measured += [f"{each.name} {each.value:g}" for each in in_flight if each.value]
    return [*measured, *await _endless_sessions(fleet.redis.url)]


async def _endless_sessions(redis_url: str) -> list[str]:
    """Bindings of sessions in Redis that never expire."""
    async with Redis.from_url(redis_url) as client:
        keys = [key async for key in client.scan_iter("rz:*:sess:*")]
        return [f"session without expiry: {key.decode()}" for key in keys if await client.ttl(key) == -1]
