"""Measures a worker's sleep: the time from asleep to the first token, and the memory of its processes.

    python -m bench.sleep models/ryzanstein-tiny --rounds 5
    python -m bench.sleep /tmp/llama-0.5b --ranks 2 --quantization int8

The wake is set against reading the weights' files once from the page cache, which is the least that it has to do.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import psutil
import typer
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table
from ryzanstein.v1 import worker_pb2 as pb

from bench.reading import Reading, lower, write_readings
from bench.stats import median
from services.common.heap import freeze_started, share_heap
from services.compute.model.files import weight_files
from services.worker.api.life_metrics import LifeMetrics
from services.worker.api.metrics import WorkerMetrics
from services.worker.engine.base import Engine
from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.output import Output
from services.worker.engine.request import EngineRequest
from services.worker.native.opening import open_native
from services.worker.settings import WorkerSettings

_MIB = 1 << 20
_PIECE = 16 * _MIB
_LOOK_S = 0.005
_PROMPT = tuple(range(5, 21))
_SIZES = ("Rss", "Pss", "Anonymous")  # fields of smaps_rollup


class FirstToken:
    """Implements OutputSink for one request; a handoff or an error ends the bench."""

    def __init__(self) -> None:
        self.came = asyncio.Event()

    def add(self, request: EngineRequest, output: Output) -> None:
        """Take a step's output."""
        self.came.set()

    def announce_trial(self, request: EngineRequest) -> None:
        """No request is a suspect."""

    def hand_off(self, request: EngineRequest, handoff: pb.Handoff) -> None:
        """Raises RuntimeError."""
        raise RuntimeError(f"the request was handed off: {handoff.detail}")

    def refuse(self, request: EngineRequest, error: InvalidRequestError) -> None:
        """Raises the error."""
        raise error

    def flush(self, step: int) -> None:
        """A step is complete."""


@asynccontextmanager
async def serving(settings: WorkerSettings) -> AsyncGenerator[Engine, None]:
    """Run an engine of our own until the end of the block."""
    registry, folder = CollectorRegistry(), Path(settings.model)
    engine = await open_native(settings, folder, WorkerMetrics(registry), LifeMetrics(registry))
    running = asyncio.create_task(engine.run())
    try:
        await until(engine, running, pb.PHASE_SERVING)
        freeze_started()  # as a worker does: a collection of all that is imported would be a step of 0.1 s
        yield engine
    finally:
        running.cancel()
        await asyncio.wait([running])


async def until(engine: Engine, running: asyncio.Task[None], phase: pb.Phase) -> None:
    """Wait for a phase; raises the engine's error if it ends."""
    with engine.changes.watch() as changed:
        while engine.phase != phase:
            waiting = asyncio.create_task(changed.wait())
            await asyncio.wait((waiting, running), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if running.done():
                running.result()
            changed.clear()


async def idle(engine: Engine) -> None:
    """Wait until no request is alive."""
    with engine.changes.watch() as changed:
        while engine.state().running or engine.state().waiting:
            await changed.wait()
            changed.clear()


async def first_token(engine: Engine) -> None:
    """Return when a request has its first token."""
    sink = FirstToken()
    engine.submit(EngineRequest("r", _PROMPT, pb.Sampling(max_tokens=1, ignore_eos=True)), sink)
    await sink.came.wait()
    await idle(engine)


async def woken(engine: Engine) -> tuple[float, float]:
    """Seconds from asleep to awake, and to the first token."""
    began = time.perf_counter()
    engine.wake()
    with engine.changes.watch() as changed:
        while engine.phase == pb.PHASE_WAKING:
            await changed.wait()
            changed.clear()
    awake_s = time.perf_counter() - began
    await first_token(engine)
    return awake_s, time.perf_counter() - began


async def all_taken(engine: Engine) -> float:
    """Seconds until the KV cache has taken the memory that a wake has promised it."""
    began = time.perf_counter()
    while engine.state().promised_bytes:  # noqa: ASYNC110  # which announces no change
        await asyncio.sleep(_LOOK_S)
    return time.perf_counter() - began


def read_once(model: Path) -> tuple[float, int]:
    """Seconds and bytes of reading all weights' files, which are in the page cache."""
    files = [model] if model.is_file() else list(weight_files(model).files)
    buffer = bytearray(_PIECE)
    began, total = time.perf_counter(), 0
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while n_bytes := stream.readinto(buffer):
                total += n_bytes
    return time.perf_counter() - began, total


def cpu_seconds() -> tuple[float, float]:
    """Seconds that this process and its ranks have computed, and that the kernel has for them."""
    own = psutil.Process(os.getpid())
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user for each in times), sum(each.system for each in times)


def memory() -> tuple[float, float, float]:
    """MiB of this process and its ranks: with mapped files, with their parts of shared pages, and their own."""
    sizes = [0.0] * len(_SIZES)
    for process in (psutil.Process(os.getpid()), *psutil.Process(os.getpid()).children(recursive=True)):
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        for place, key in enumerate(_SIZES):
            match = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
            sizes[place] += int(match.group(1)) / 1024 if match else 0.0
    rss, pss, own = sizes
    return rss, pss, own


async def measure(settings: WorkerSettings, rounds: int) -> list[Reading]:
    """Measure, print, and return the readings."""
    table = Table("", "RSS", "PSS", "own", title="MiB of server and ranks", title_justify="left")
    async with serving(settings) as engine:
        await first_token(engine)
        seconds, spent, asleep = list[tuple[float, float]](), list[tuple[float, float]](), memory()
        table.add_row("before", *(f"{size:.0f}" for size in memory()))
        for _ in range(rounds):
            await engine.sleep(1)
            asleep, before = memory(), cpu_seconds()
            seconds.append(await woken(engine))
            after = cpu_seconds()
            spent.append((after[0] - before[0], after[1] - before[1]))
        taken_s = await all_taken(engine)
        table.add_row("asleep", *(f"{size:.0f}" for size in asleep))
        table.add_row("after", *(f"{size:.0f}" for size in memory()))
    began = time.process_time()
    reading, n_bytes = read_once(Path(settings.model))
    read_cpu, wake_cpu = time.process_time() - began, median([sum(each) for each in spent])
    console = Console()
    console.print(table)
    awake_s, token_s = (median([each[part] for each in seconds]) for part in (0, 1))
    for what, measured, part in (("awake", awake_s, 0), ("the first token", token_s, 1)):
        every = ", ".join(f"{times[part]:.3f}" for times in seconds)
        console.print(
            f"asleep to {what}: {measured:.3f} s (median of {every}), {measured / reading:.2f}x of reading "
            f"{n_bytes / _MIB:.0f} MiB once, {reading:.3f} s",
            highlight=False,
        )
    user, system = (median([each[part] for each in spent]) for part in (0, 1))
    console.print(
        f"CPU time to the first token: {wake_cpu:.2f} s (computing {user:.2f} s, the kernel {system:.2f} s), "
        f"{wake_cpu / read_cpu:.2f}x of the reading's {read_cpu:.3f} s",
        highlight=False,
    )
    console.print(f"the KV cache had all its memory {taken_s:.2f} s after the token", highlight=False)
    return [
        lower("sleep/from asleep to awake", awake_s, "s"),
        lower("sleep/from asleep to the first token", token_s, "s"),
        lower("sleep/CPU time from asleep to the first token", wake_cpu, "s"),
        lower("sleep/own memory asleep", asleep[2], "MiB"),
    ]


def main(
    model: Annotated[str, typer.Argument(help="A folder of safetensors, or a GGUF file.")],
    rounds: int = 5,
    ranks: int = 1,
    quantization: str = "auto",
    kv_tokens: int = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Print the memory before, asleep and after, and the time of a wake."""
    chosen = {"tensor_parallel": ranks, "quantization": quantization, "kv_tokens": kv_tokens}
    settings = WorkerSettings.model_validate({"model": model, "log_level": "warning", **chosen})
    share_heap()  # as a worker does
    readings = asyncio.run(measure(settings, rounds))
    if json_file:
        write_readings(json_file, readings)


if __name__ == "__main__":
    typer.run(main)
