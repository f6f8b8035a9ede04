"""Measures what the models of one machine cost each other: the steps of a stream that decodes among other models.

    python -m bench.neighbours models/ryzanstein-tiny --neighbour /tmp/llama-0.5b --neighbour c.gguf

The stream runs alone, next to neighbours that are awake without requests, while they wake in turn, while the KV cache
takes its memory after each wake, and with a stream of each of them. The last columns say for how much of the longest
step a thread of the stream's ranks was ready to run and had no core, and how much core time the host of a virtual
machine took from it meanwhile (steal).
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Self

import psutil
import typer
from rich.console import Console
from rich.table import Table
from ryzanstein.v1 import worker_pb2 as pb

from bench.reading import Reading, lower, write_readings
from bench.sleep import FirstToken, all_taken, idle, serving
from bench.stats import median, percentile
from services.worker.engine.base import Engine
from services.worker.engine.output import Output
from services.worker.engine.request import EngineRequest
from services.worker.settings import WorkerSettings

_PROMPT = tuple(range(5, 21))
_BEGIN = 8  # tokens before a neighbour wakes
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Moment:
    """The time of an output, in seconds, and what has kept the stream from computing until then."""

    at: float
    waits: list[int]  # nanoseconds for which each thread waited for a core, since its start
    stolen: float  # seconds that the host took from all cores together, since the machine's start


class CoreWaits:
    """The waits of all threads that a process's children have now, and of the machine."""

    def __init__(self) -> None:
        ranks = psutil.Process(os.getpid()).children(recursive=True)
        tasks = (task for rank in ranks for task in Path(f"/proc/{rank.pid}/task").iterdir())
        self._files = [(task / "schedstat").open("rb", buffering=0) for task in tasks]
        self._machine = Path("/proc/stat").open("rb", buffering=0)  # noqa: SIM115 - read at every output

    def read(self) -> Moment:
        """The current moment."""
        waits = [int(os.pread(file.fileno(), 64, 0).split()[1]) for file in self._files]
        stolen = int(os.pread(self._machine.fileno(), 256, 0).split()[8]) * _TICK_S
        return Moment(perf_counter(), waits, stolen)


@dataclass(frozen=True, slots=True)
class Step:
    """A step between two outputs; times in seconds."""

    start: float
    stop: float
    waited: float  # for a core, of the thread that waited longest
    stolen: float  # by the host, from all cores together

    @classmethod
    def between(cls, before: Moment, after: Moment) -> Self:
        """The step that ended with the second output."""
        waits = (new - old for old, new in zip(before.waits, after.waits, strict=True))
        return cls(before.at, after.at, max(waits, default=0) / 1e9, after.stolen - before.stolen)

    @property
    def ms(self) -> float:
        """Its length."""
        return (self.stop - self.start) * 1e3


Steps = list[Step]


class Stream(FirstToken):
    """Keeps the times of a request's outputs."""

    def __init__(self, waits: CoreWaits) -> None:
        super().__init__()
        self._waits = waits
        self._outputs: list[Moment] = []
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    def add(self, request: EngineRequest, output: Output) -> None:
        """Take a step's output."""
        super().add(request, output)
        self._outputs.append(self._waits.read())
        if len(self._outputs) == _BEGIN or output.finish is not None:
            self.begun.set()
        if output.finish is not None:
            self.ended.set()

    @property
    def steps(self) -> Steps:
        """The steps between two outputs."""
        return [Step.between(before, after) for before, after in itertools.pairwise(self._outputs)]


@asynccontextmanager
async def decoding(engine: Engine, tokens: int, waits: CoreWaits) -> AsyncGenerator[Stream, None]:
    """Decode up to `tokens` until the end of the block."""
    stream = Stream(waits)
    request = EngineRequest("r", _PROMPT, pb.Sampling(max_tokens=tokens, ignore_eos=True))
    engine.submit(request, stream)
    await stream.came.wait()
    yield stream
    engine.cancel(request)
    await idle(engine)


async def whole(engines: Sequence[Engine], tokens: int, waits: CoreWaits) -> Steps:
    """The steps of the first engine's stream, with one of each engine at the same time, until the first one ends."""
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(decoding(engine, tokens, waits)) for engine in engines]
        ends = [asyncio.create_task(stream.ended.wait()) for stream in streams]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        return streams[0].steps


async def during_a_wake(engine: Engine, neighbour: Engine, tokens: int, waits: CoreWaits) -> tuple[list[Step], Steps]:
    """The steps of a stream that a neighbour's wake touches, and those while its KV cache takes memory afterwards."""
    await neighbour.sleep(1)
    async with decoding(engine, tokens, waits) as stream:
        await stream.begun.wait()
        began = perf_counter()
        neighbour.wake()
        with neighbour.changes.watch() as changed:
            while neighbour.phase == pb.PHASE_WAKING:
                await changed.wait()
                changed.clear()
        awake = perf_counter()
        await all_taken(neighbour)
        taken = perf_counter()
    waking = [step for step in stream.steps if step.stop > began and step.start < awake]
    return waking, [step for step in stream.steps if step.start >= awake and step.start < taken]


async def measure(settings: Sequence[WorkerSettings], rounds: int, tokens: int) -> dict[str, Steps]:
    """The steps of the first model's stream, by what the other models do meanwhile."""
    steps: dict[str, Steps] = {}
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serving(settings[0]))
        waits = CoreWaits()  # the neighbours' ranks are not there yet

        async def decode(what: str, engines: Sequence[Engine]) -> None:
            steps[what] = [step for _ in range(rounds) for step in await whole(engines, tokens, waits)]

        await whole([engine], tokens, waits)
        await decode("alone", [engine])
        neighbours = [await stack.enter_async_context(serving(each)) for each in settings[1:]]
        await decode("neighbours awake", [engine])
        wakes = [await during_a_wake(engine, each, tokens, waits) for _ in range(rounds) for each in neighbours]
        for place, what in enumerate(("a neighbour wakes", "its cache takes memory")):
            steps[what] = [step for wake in wakes for step in wake[place]]
        await decode("all decode", [engine, *neighbours])
    return steps


def report(steps: dict[str, Steps]) -> list[Reading]:
    """Print the steps; return the readings."""
    title, readings = "ms of a step", list[Reading]()
    heads = ("steps", "median", "95 %", "longest", "of it without a core", "the host took", "longest without that")
    table = Table("", *heads, title=title, title_justify="left")
    for what, every in steps.items():
        times, whole = [step.ms for step in every], [step.ms for step in every if not step.stolen]
        longest = max(every, key=lambda step: step.ms, default=Step(0.0, 0.0, 0.0, 0.0))
        figures = {"median": median(times), "95 %": percentile(times, 95), "longest": longest.ms}
        causes = (longest.waited * 1e3, longest.stolen * 1e3, max(whole, default=0.0))
        table.add_row(what, str(len(every)), *(f"{ms:.2f}" for ms in (*figures.values(), *causes)))
        readings += [lower(f"neighbours/{what}/{name}", ms, "ms") for name, ms in figures.items()]
    console = Console()
    console.print(table)
    usual = median([step.ms for step in steps["alone"]])
    awake, wakes = ([step.ms / usual for step in steps[what]] for what in ("neighbours awake", "a neighbour wakes"))
    console.print(
        f"neighbours that are awake: {median(awake) - 1:+.1%}; while one wakes: {median(wakes) - 1:+.1f} steps at the "
        f"median, {max(wakes, default=1.0) - 1:+.1f} at most",
        highlight=False,
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
