"""Measures what the models of one machine cost each other: the steps of a stream that decodes among other models.

    python -m bench.neighbours models/ryzanstein-tiny --neighbour /tmp/llama-0.5b --neighbour c.gguf

The stream runs alone, next to neighbours that are awake without requests, while they wake in turn, and with a stream
of each of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from ryzanstein.v1 import worker_pb2 as pb

from bench.reading import Reading, lower, write_readings
from bench.sleep import FirstToken, idle, serving
from bench.stats import median, percentile
from services.worker.engine.base import Engine
from services.worker.engine.output import Output
from services.worker.engine.request import EngineRequest
from services.worker.settings import WorkerSettings

_PROMPT = tuple(range(5, 21))
_BEGIN = 8  # tokens before a neighbour wakes

Gaps = list[tuple[float, float]]  # begin and end of each step, seconds


class Stream(FirstToken):
    """Keeps the times of a request's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    def add(self, request: EngineRequest, output: Output) -> None:
        """Take a step's output."""
        super().add(request, output)
        self.times.append(perf_counter())
        if len(self.times) == _BEGIN or output.finish is not None:
            self.begun.set()
        if output.finish is not None:
            self.ended.set()

    @property
    def gaps(self) -> Gaps:
        """The steps between two outputs."""
        return list(itertools.pairwise(self.times))


@asynccontextmanager
async def decoding(engine: Engine, tokens: int) -> AsyncGenerator[Stream, None]:
    """Decode up to `tokens` until the end of the block."""
    stream = Stream()
    request = EngineRequest("r", _PROMPT, pb.Sampling(max_tokens=tokens, ignore_eos=True))
    engine.submit(request, stream)
    await stream.came.wait()
    yield stream
    engine.cancel(request)
    await idle(engine)


async def whole(engines: Sequence[Engine], tokens: int) -> list[Stream]:
    """A stream of each engine at the same time, until the first one ends."""
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(decoding(engine, tokens)) for engine in engines]
        ends = [asyncio.create_task(stream.ended.wait()) for stream in streams]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        return streams


async def during_a_wake(engine: Engine, neighbour: Engine, tokens: int) -> Gaps:
    """The steps of a stream that a neighbour's wake touches."""
    await neighbour.sleep(1)
    async with decoding(engine, tokens) as stream:
        await stream.begun.wait()
        began = perf_counter()
        neighbour.wake()
        with neighbour.changes.watch() as changed:
            while neighbour.phase == pb.PHASE_WAKING:
                await changed.wait()
                changed.clear()
        ended = perf_counter()
    return [(start, stop) for start, stop in stream.gaps if stop > began and start < ended]


def lengths(gaps: Gaps) -> list[float]:
    """The steps' times in ms."""
    return [(stop - start) * 1e3 for start, stop in gaps]


async def measure(settings: Sequence[WorkerSettings], rounds: int, tokens: int) -> dict[str, list[float]]:
    """The times of the first model's steps in ms, by what the other models do meanwhile."""
    steps: dict[str, list[float]] = {}

    async def decode(what: str, engines: Sequence[Engine]) -> None:
        streams = [(await whole(engines, tokens))[0] for _ in range(rounds)]
        steps[what] = [ms for stream in streams for ms in lengths(stream.gaps)]

    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serving(settings[0]))
        await whole([engine], tokens)
        await decode("alone", [engine])
        neighbours = [await stack.enter_async_context(serving(each)) for each in settings[1:]]
        await decode("neighbours awake", [engine])
        wakes = [await during_a_wake(engine, each, tokens) for _ in range(rounds) for each in neighbours]
        steps["a neighbour wakes"] = [ms for gaps in wakes for ms in lengths(gaps)]
        await decode("all decode", [engine, *neighbours])
    return steps


def report(steps: dict[str, list[float]]) -> list[Reading]:
    """Print the steps; return the readings."""
    table, readings = Table("", "median", "95 %", "largest", title="ms of a step", title_justify="left"), []
    for what, times in steps.items():
        figures = {"median": median(times), "95 %": percentile(times, 95), "largest": max(times, default=0.0)}
        table.add_row(what, *(f"{ms:.2f}" for ms in figures.values()))
        readings += [lower(f"neighbours/{what}/{name}", ms, "ms") for name, ms in figures.items()]
    console = Console()
    console.print(table)
    usual = median(steps["alone"])
    cost, longest = (median(steps[what]) / usual for what in ("neighbours awake", "a neighbour wakes"))
    console.print(
        f"neighbours that are awake: {cost - 1:+.1%}; while one wakes: {longest - 1:+.1f} steps", highlight=False
    )
    return readings


def main(
    model: Annotated[str, typer.Argument(help="A folder of safetensors, or a GGUF file.")],
    neighbour: Annotated[list[str], typer.Option(help="A further model, several times for several.")],
    rounds: int = 3,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of each stream.")] = 400,
    ranks: int = 1,
    quantization: str = "auto",
    kv_tokens: int = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Print the steps of MODEL's stream, alone and next to its neighbours."""
    chosen = {
        "tensor_parallel": ranks,
        "quantization": quantization,
        "kv_tokens": kv_tokens,
        "log_level": "warning",
        "speculation": "off",
    }
    settings = [WorkerSettings.model_validate({"model": each, **chosen}) for each in (model, *neighbour)]
    readings = report(asyncio.run(measure(settings, rounds, tokens)))
    if json_file:
        write_readings(json_file, readings)


if __name__ == "__main__":
    typer.run(main)
