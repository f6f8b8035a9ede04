"""Measures a whole installation on simulated workers under an open-loop load, and checks every answer to the byte.

    python -m bench.fleet --workers 100 --routers 1 --gateways 1 --rate 50 --seconds 20
    python -m bench.fleet --sweep 10,100,300 --rate 20 --seconds 20 --workload prefix --out docs/scale.md
    python -m bench.fleet --workers 100 --rate 10 --seconds 10 --knee
    python -m bench.fleet --workers 20 --speed 20 --trace trace.jsonl --seconds 60
    python -m bench.fleet --workers 100 --rate 50 --seconds 60 --faults 7
    python -m bench.fleet --workers 100 --rate 20 --seconds 200 --streams 2000 --prompt-tokens 64 --faults 7

Redis, coordinator, routers, gateways and workers are real processes; only the ranks are simulated. With `--faults SEED`
workers, routers and Redis fail meanwhile, in an order that the seed fixes. Without, the costs of an idle installation
are measured before the load. After it a tenth more workers join and are killed, and a router, a coordinator and Redis
are replaced, to see how long the others take. `--sweep` does it for several sizes, `--knee` at rising rates. Exits
with 1 if an answer is lost or altered, or if anything is held after the last answer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer

from bench.evaluation.report import replace_between
from bench.fleet.faults import Striking
from bench.fleet.installation import FleetSize
from bench.fleet.knee import find_knee, holds
from bench.fleet.lifecycle import write_lifecycles
from bench.fleet.load import Load
from bench.fleet.report import FleetRun, readings, table
from bench.fleet.running import Conditions, run
from bench.fleet.sizing import SCALED_CURVE, SILENCE_S, ScaledTime, settings_of, sized_model, sizes_of
from bench.fleet.traces import TracedWorkload
from bench.fleet.workloads import AGENTS, Arrivals, Lengths, Workload, WorkloadName
from bench.reading import write_readings
from services.cli.stack.default_model import TINY_MODEL
from services.common.lifecycle import allow_descriptors
from services.planner.trace import TraceError
from services.worker.settings import WorkerSettings
from services.worker.simulated.curve import DEFAULT_CURVE
from services.worker.simulated.language import Language
from services.worker.simulated.opening import SimulatedModel, open_model

_AGENTS_OF_A_STREAM = 2  # so that few wait for their turn before
_CUT_OFF_LONGER_S = 0.5  # than the silence after which gateways go on elsewhere


def main(
    workers: int = 10,
    sweep: Annotated[str, typer.Option(help="Numbers of workers in place of --workers; commas between.")] = "",
    per_process: Annotated[int, typer.Option(help="Workers of one process.")] = 100,
    routers: int = 1,
    gateways: int = 1,
    coordinators: int = 1,
    workload: WorkloadName = "plain",
    trace: Annotated[Path | None, typer.Option(help="Requests of this file, Mooncake's or Azure's, instead.")] = None,
    faster: Annotated[float, typer.Option("--load", help="The trace's requests come so many times as fast.")] = 1.0,
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 20.0,
    knee: Annotated[bool, typer.Option(help="Double the rate until it does not hold; measure at half of it.")] = False,
    seconds: float = 10.0,
    prompt_tokens: int = 256,
    prefix_tokens: Annotated[int, typer.Option(help="The shared part of a prompt.")] = 192,
    long_tokens: Annotated[int, typer.Option(help="The shared part of a long prompt.")] = 100_000,
    answer_tokens: int = 32,
    speed: Annotated[float, typer.Option(help="How many times faster than the curve.")] = 1.0,
    streams: Annotated[int, typer.Option(help="Keep so many streams open, by steps as slow as it takes.")] = 0,
    given: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, a setting of every service without RYZANSTEIN_.")
    ] = None,
    curve: Path = DEFAULT_CURVE,
    model: Annotated[Path, typer.Option(help="A folder with config.json and tokenizer.")] = TINY_MODEL,
    faults: Annotated[int | None, typer.Option(help="Strike meanwhile, in the order of this seed.")] = None,
    fault_every: Annotated[float, typer.Option(help="Seconds from one fault to the next.")] = 2.0,
    idle_seconds: Annotated[float, typer.Option(help="Seconds without requests before the load; 0: none.")] = 5.0,
    out: Annotated[Path | None, typer.Option(exists=True, help="Write the tables into this page.")] = None,
    lifecycles: Annotated[Path | None, typer.Option(help="Write inference-perf's reports into this folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Measure a fleet."""
    allow_descriptors()
    sizes = sizes_of(sweep) if sweep else [workers]
    if knee and (len(sizes) > 1 or trace or faults is not None):
        raise typer.BadParameter("--knee: expected one number of workers, and neither --trace nor --faults")
    if streams and trace:
        raise typer.BadParameter("--streams: expected no --trace, whose answers have lengths of their own")
    chosen = settings_of(given or ())
    lengths = Lengths(prompt_tokens, prefix_tokens, answer_tokens, long_tokens)
    load = Load((), model.name, rate, seconds)
    if streams:
        scaled = ScaledTime.of(streams, rate, answer_tokens)
        curve, speed, chosen = SCALED_CURVE, scaled.speed, scaled.settings | chosen
        load = replace(load, streams=streams, patience_s=scaled.patience_s)
    arguments: dict[str, object] = {"speed": speed, "curve": str(curve)}
    simulated = asyncio.run(_simulated(model, arguments))
    language, tokenizer = simulated.simulation.language, Tokenizer.from_buffer(simulated.model.tokenizer_json)
    traced = _read(trace, language, faster) if trace else None

    def arrivals() -> Arrivals:
        draw, n_agents = random.Random(faults or 0), max(AGENTS, _AGENTS_OF_A_STREAM * streams)
        return traced or Workload(workload, language, language.words, lengths, draw, n_agents)

    load = replace(load, rate=traced.rate) if traced else load
    cut_off_s = float(chosen.get("SILENCE_TIMEOUT_S", SILENCE_S)) + _CUT_OFF_LONGER_S
    striking = Striking(faults, fault_every, cut_off_s) if faults is not None else None
    with sized_model(model, traced.longest if traced else lengths.longest(workload)) as (sized, settings):
        settings |= chosen
        fleets = [FleetSize(n, per_process, routers, gateways, sized, arguments, settings, coordinators) for n in sizes]
        around = Conditions(0.0 if striking or knee else idle_seconds, striking, converges=not knee)
        measures = [_measuring(size, load, arrivals, around) for size in fleets]
        runs = _at_knee(measures[0], rate, tokenizer) if knee else [measure(load.rate) for measure in measures]
    written = table(runs, tokenizer)
    print(written)
    if out:
        replace_between(out, f"fleet with {workload} requests", written)
    _write(runs, lifecycles, json_file)
    if any(done.untrue(tokenizer) for done in runs):
        raise typer.Exit(1)


def _write(runs: Sequence[FleetRun], lifecycles: Path | None, json_file: Path | None) -> None:
    if lifecycles:
        write_lifecycles(lifecycles, runs)
    if json_file:
        write_readings(json_file, (reading for done in runs for reading in readings(done)))


def _measuring(
    size: FleetSize, load: Load, arrivals: Callable[[], Arrivals], conditions: Conditions
) -> Callable[[float], FleetRun]:
    """Measures at a rate of requests."""

    def measure(rate: float) -> FleetRun:
        began = time.monotonic()
        done = asyncio.run(run(size, replace(load, rate=rate), arrivals(), conditions))
        typer.echo(f"{size.workers:,} workers, {rate:g} requests/s: {time.monotonic() - began:.0f} s", err=True)
        return done

    return measure


def _at_knee(measure: Callable[[float], FleetRun], rate: float, tokenizer: Tokenizer) -> Sequence[FleetRun]:
    """Print the knee; returns the run at half of it. Exits with 1 if not even the first rate holds."""
    knee = find_knee(measure, lambda done, first: holds(done, first, tokenizer), rate)
    print(f"{knee.table()}\n")
    if knee.half is None:
        raise typer.Exit(1)
    return [knee.half]


def _read(trace: Path, language: Language, faster: float) -> TracedWorkload:
    try:
        return TracedWorkload.read(trace, language, faster)
    except TraceError as error:
        raise typer.BadParameter(str(error)) from error


async def _simulated(model: Path, arguments: dict[str, object]) -> SimulatedModel:
    return await open_model(WorkerSettings(model=str(model), engine="simulated", engine_args=arguments), model)


if __name__ == "__main__":
    typer.run(main)
