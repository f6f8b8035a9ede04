"""Faults in a fleet at times and in an order that a seed fixes, and what must be empty after them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from redis.asyncio import Redis

from bench.fleet.generators import Generators
from bench.fleet.installation import WORKERS, Fleet, FleetProcess
from bench.fleet.interruptions import Blow
from bench.fleet.usage import gateway_samples

_STALL_S = 0.6  # below the limit at which ranks count as lost
_LONG_STALL_S = 30.0
_DOWN_S = 0.3
_WHOLE_S = 300.0
_LOOK_S = 0.5
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


_KILLED = {FleetFault.KILL_ROUTER: "router", FleetFault.KILL_COORDINATOR: "kv-coordinator"}
_OF_A_PROCESS = (FleetFault.KILL_WORKERS, FleetFault.ROLL_WORKERS, FleetFault.CUT_OFF)
_DEADLY = (FleetFault.LOSE, FleetFault.HANG, FleetFault.KILL_WORKERS)
_OF_WORKERS = (FleetFault.LOSE, FleetFault.STALL, FleetFault.HANG, *_OF_A_PROCESS)


@dataclass(frozen=True, slots=True)
class Striking:
    """Faults during a load."""

    seed: int
    every_s: float
    cut_off_s: float  # above the silence after which gateways go on elsewhere


@dataclass(frozen=True, slots=True)
class StruckFault:
    """A fault, and the streams that were open then."""

    fault: FleetFault
    open_streams: int


@dataclass(frozen=True, slots=True)
class _Victim:
    """The part of a fleet that a fault strikes."""

    process: FleetProcess | None  # None: Redis
    blow: Blow = field(default_factory=Blow)
    index: int = 0  # the worker in its process, if one alone


async def strike(fleet: Fleet, generators: Generators, striking: Striking, seconds: float) -> list[StruckFault]:
    """Strike for `seconds`, and until every kind has come; returns the faults. Processes are started again.

    Every kind comes once before any comes twice. A fault of workers waits until all serve again after the one before,
    and until every answer bears it: a request that loses worker after worker is given up, and rightly. Raises
    TimeoutError if workers do not come back.
    """
    draw, struck, began = random.Random(striking.seed), list[StruckFault](), time.monotonic()
    left: list[FleetFault] = []
    while time.monotonic() - began < seconds or len(struck) < len(FleetFault):
        await asyncio.sleep(striking.every_s)
        left = left or draw.sample(list(FleetFault), len(FleetFault))
        fault = left.pop()
        if fault in _OF_WORKERS:
            await _wait_whole(fleet, struck)
        victim = await _victim(fleet, fault, draw)
        while not await generators.bears(victim.blow):  # noqa: ASYNC110  # known in other processes
            await asyncio.sleep(_LOOK_S)
        struck.append(StruckFault(fault, await generators.strike(victim.blow)))
        await _strike(fleet, fault, victim, striking.cut_off_s)
    return struck


async def _wait_whole(fleet: Fleet, struck: Sequence[StruckFault]) -> None:
    """Wait until every router gives work to all workers."""
    try:
        await fleet.wait_serving(fleet.size.workers, _WHOLE_S, _LOOK_S)
    except TimeoutError:
        faults = ", ".join(each.fault for each in struck)
        raise TimeoutError(f"not all workers serve {_WHOLE_S:g} s after the last of these: {faults}") from None


async def _victim(fleet: Fleet, fault: FleetFault, draw: random.Random) -> _Victim:
    if fault is FleetFault.KILL_REDIS:
        return _Victim(None)
    if fault in _KILLED:
        return _Victim(draw.choice(fleet.of(_KILLED[fault])))
    if fault in _OF_A_PROCESS:
        process = draw.choice(fleet.of(WORKERS))
        return _Victim(process, Blow(frozenset(process.worker_ids), fault in _DEADLY))
    process, index = await _busy_worker(fleet, draw)
    return _Victim(process, Blow(frozenset({process.worker_ids[index]}), fault in _DEADLY), index)


async def _strike(fleet: Fleet, fault: FleetFault, victim: _Victim, cut_off_s: float) -> None:
    process = victim.process
    if process is None:
        fleet.redis.kill()
        await asyncio.sleep(_DOWN_S)
        await asyncio.to_thread(fleet.redis.start)
        return
    match fault:
        case FleetFault.ROLL_WORKERS:
            await asyncio.to_thread(process.end)
            process.start()
        case FleetFault.CUT_OFF:
            process.usage.suspend()
            await asyncio.sleep(cut_off_s)
            process.usage.resume()
        case FleetFault.LOSE:
            process.order(f"lose {victim.index}")
        case FleetFault.STALL | FleetFault.HANG:
            process.order(f"stall {victim.index} {_STALL_S if fault is FleetFault.STALL else _LONG_STALL_S}")
        case _:
            process.kill()
            await asyncio.sleep(_DOWN_S)
            process.start()


async def _busy_worker(fleet: Fleet, draw: random.Random) -> tuple[FleetProcess, int]:
    """A worker that has requests, else any: its process, and its index there."""
    busy = sorted(view.worker_id for view in await fleet.views() if view.state.running)
    workers = {name: (each, index) for each in fleet.of(WORKERS) for index, name in enumerate(each.worker_ids)}
    return workers[draw.choice(busy or list(workers))]


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
