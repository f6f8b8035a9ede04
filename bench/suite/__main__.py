"""`make bench`: runs all benches that together take a quarter of an hour on two cores.

    python -m bench.suite --rounds 5
    python -m bench.suite --only scheduler --only router --out /tmp/results

Each round runs every bench once, each in its own process, so that a metric has one sample per round, spread over the
whole run. It writes DATE.json and DATE.md. Nothing else should run on the machine.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from bench.reading import Reading
from bench.suite.machine import PROJECT, commit, machine, versions
from bench.suite.report import write_report
from bench.suite.rounds import BenchError, gather, run_round
from bench.suite.steps import STEPS, Step, chosen
from services.cli.benchmarks.results import Results


async def measure(steps: tuple[Step, ...], rounds: int) -> list[list[Reading]]:
    """Run all rounds."""
    with tempfile.TemporaryDirectory() as folder:
        return [await run_round(steps, number, Path(folder)) for number in range(rounds)]


def results_of(rounds: list[list[Reading]], taken: time.struct_time) -> Results:
    """The results of the rounds, with the facts of the machine."""
    return Results(
        taken=time.strftime("%Y-%m-%dT%H:%M:%SZ", taken),
        commit=commit(),
        rounds=len(rounds),
        machine=machine(),
        versions=versions(),
        metrics=gather(rounds),
    )


def main(
    rounds: Annotated[int, typer.Option(min=1, help="One sample per metric each.")] = 5,
    only: Annotated[list[str] | None, typer.Option(help=f"Again for each: {', '.join(s.name for s in STEPS)}.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = PROJECT / "bench" / "results",
) -> None:
    """Run the benches in rounds and write what they measured."""
    try:
        steps = chosen(only or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    taken = time.gmtime()
    try:
        measured = asyncio.run(measure(steps, rounds))
    except BenchError as error:
        raise SystemExit(str(error)) from error
    results = results_of(measured, taken)
    for path in write_report(results, out, time.strftime("%Y-%m-%d-%H%M", taken)):
        print(path)


if __name__ == "__main__":
    typer.run(main)
