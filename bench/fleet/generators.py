"""The processes that send a load: one has neither the descriptors nor the time for tens of thousands of streams."""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import uvloop

from bench.fleet.generator import Generator, Share
from bench.fleet.interruptions import Blow
from bench.fleet.load import FleetAnswer, Load
from bench.fleet.workloads import Arrivals, FleetRequest

_STREAMS = 8_000  # the most of a process


@dataclass(frozen=True, slots=True)
class _Begin:
    """Send requests from now on."""


@dataclass(frozen=True, slots=True)
class _MayStrike:
    """Whether all open answers bear a blow: True or False."""

    blow: Blow


@dataclass(frozen=True, slots=True)
class _Strike:
    """Count a blow: the number of open answers."""

    blow: Blow


@dataclass(frozen=True, slots=True)
class _End:
    """Send no requests after the load's seconds: all answers, when the last one has ended."""


class Generators:
    """The processes. Methods raise EOFError if one has ended too soon."""

    def __init__(self, orders: list[Connection], replies: list[Connection]) -> None:
        self._to, self._from = orders, replies

    async def ready(self) -> None:
        """Wait until all can send."""
        await self._replies()

    def begin(self) -> None:
        """Send requests from now on."""
        self._tell(_Begin())

    async def bears(self, blow: Blow) -> bool:
        """Whether no request would be given up if the blow struck now."""
        self._tell(_MayStrike(blow))
        return all(await self._replies())

    async def strike(self, blow: Blow) -> int:
        """Count a blow; returns the number of open answers."""
        self._tell(_Strike(blow))
        return sum(await self._replies())

    async def end(self) -> list[FleetAnswer]:
        """Send no requests after the load's seconds; returns all answers, in their order, when they have ended."""
        self._tell(_End())
        shares: list[list[FleetAnswer]] = await self._replies()
        return sorted(itertools.chain(*shares), key=lambda answer: answer.at)

    def _tell(self, message: object) -> None:
        for orders in self._to:
            orders.send(message)

    async def _replies(self) -> list[Any]:
        return [await asyncio.to_thread(replies.recv) for replies in self._from]


@asynccontextmanager
async def running_generators(load: Load, workload: Arrivals, draw: random.Random) -> AsyncGenerator[Generators, None]:
    """Start as many processes as the load's streams need."""
    context, n_processes = multiprocessing.get_context("spawn"), max(1, math.ceil(load.streams / _STREAMS))
    processes, orders, replies = list[SpawnProcess](), list[Connection](), list[Connection]()
    try:
        for number in range(n_processes):
            (orders_in, orders_out), (replies_in, replies_out) = context.Pipe(False), context.Pipe(False)
            share = Share(number, n_processes)
            arguments = (load, workload, draw, share, orders_in, replies_out)
            process = context.Process(target=_generate, args=arguments, daemon=True)
            process.start()
            orders_in.close()
            replies_out.close()
            orders.append(orders_out)
            replies.append(replies_in)
            processes.append(process)
        yield Generators(orders, replies)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _generate(
    load: Load, workload: Arrivals, draw: random.Random, share: Share, orders: Connection, replies: Connection
) -> None:
    """Send a share of a load, as the orders say."""
    uvloop.run(_serve(load, _arrivals(load, workload, draw), share, orders, replies))


def _arrivals(load: Load, workload: Arrivals, draw: random.Random) -> Iterator[tuple[float, FleetRequest]]:
    """The arrivals of a load. To be in time, those within its seconds are made beforehand.

    Not those of a load with a bound of its streams: it is long, and nothing is measured by its times.
    """
    further = workload.arrivals(load.rate, draw)
    if load.streams:
        return further
    return itertools.chain(list(itertools.takewhile(lambda arrival: arrival[0] < load.seconds, further)), further)


async def _serve(
    load: Load,
    arrivals: Iterator[tuple[float, FleetRequest]],
    share: Share,
    orders: Connection,
    replies: Connection,
) -> None:
    generator, begun, end = Generator(load, share), asyncio.Event(), asyncio.Event()

    def obey() -> None:
        match orders.recv():
            case _Begin():
                begun.set()
            case _MayStrike(blow):
                replies.send(generator.bears(blow))
            case _Strike(blow):
                replies.send(generator.strike(blow))
            case _End():
                end.set()

    asyncio.get_running_loop().add_reader(orders.fileno(), obey)
    replies.send("ready")
    await begun.wait()
    answers = await generator.run(arrivals, end)
    await end.wait()
    replies.send(answers)
