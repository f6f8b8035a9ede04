"""Runs the benches in rounds, one after another, each in its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.make_checkpoint import SHAPES, write_checkpoint
from bench.reading import Reading, read_readings
from bench.servers import ModelTarget, read_peers, start
from bench.suite.machine import PROJECT
from bench.suite.steps import RANDOM_100M, SHAPE, Step, turned
from services.cli.benchmarks.results import Metric
from services.cli.stack.default_model import TINY_MODEL

STEP_S = 300.0  # ten times the slowest bench of the set


class BenchError(RuntimeError):
    """A bench failed; the message contains the end of its output."""


async def run_round(steps: tuple[Step, ...], number: int, folder: Path) -> list[Reading]:
    """Run every bench once; raises :class:`BenchError`.

    `folder` keeps files for all rounds: checkpoints and logs.
    """
    measured: list[Reading] = []
    for step in turned(steps, number):
        print(f"round {number + 1}: {step.name}", file=sys.stderr, flush=True)
        measured += await _serving(step, folder) if step.served else await _run(step, (), folder)
    return measured


async def _serving(step: Step, folder: Path) -> list[Reading]:
    """Run a step against an installation of the bundled model that runs for this step alone."""
    server = await start(read_peers()["ryzanstein"], sys.prefix, ModelTarget(str(TINY_MODEL), 2), folder / "serve.log")
    try:
        return await _run(step, ("--url", server.url), folder)
    finally:
        await server.stop()


async def _run(step: Step, more: tuple[str, ...], folder: Path) -> list[Reading]:
    arguments = [_checkpoint(folder) if word == RANDOM_100M else word for word in (*step.arguments, *more)]
    with tempfile.NamedTemporaryFile(suffix=".json") as handed:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", step.module, *arguments, "--json", handed.name),
            cwd=PROJECT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # so that it can be killed with its children
        )
        try:
            async with asyncio.timeout(STEP_S):
                output, _ = await process.communicate()
        except TimeoutError as error:
            raise BenchError(f"{step.name} did not end within {STEP_S:g} s") from error
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            raise BenchError(f"{step.name} ended with status {process.returncode}:\n{output.decode()[-2000:]}")
        return read_readings(Path(handed.name))


def _checkpoint(folder: Path) -> str:
    """A checkpoint with random weights of the shape; created once."""
    checkpoint = folder / f"random-{SHAPE}"
    if not checkpoint.exists():
        write_checkpoint(SHAPES[SHAPE], checkpoint)
    return str(checkpoint)


def gather(rounds: Sequence[Sequence[Reading]]) -> dict[str, Metric]:
    """Collect the readings of all rounds into metrics, grouped by area; raises ValueError if a round lacks one."""
    by_name: dict[str, list[Reading]] = {}
    for readings in rounds:
        for reading in readings:
            by_name.setdefault(reading.name, []).append(reading)
    if short := [name for name, readings in by_name.items() if len(readings) != len(rounds)]:
        raise ValueError(f"not measured once in every round: {', '.join(short)}")
    return {
        name: Metric(
            unit=measured[0].unit, better=measured[0].better, samples=tuple(reading.value for reading in measured)
        )
        for name, measured in sorted(by_name.items(), key=lambda entry: entry[0].partition("/")[0])
    }
