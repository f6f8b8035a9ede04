"""Measures a whole installation on simulated workers under an open-loop load, and checks every answer to the byte.

    python -m bench.fleet --workers 100 --routers 1 --gateways 1 --rate 50 --seconds 20
    python -m bench.fleet --sweep 10,100,300 --rate 20 --seconds 20 --workload prefix --out docs/scale.md
    python -m bench.fleet --workers 100 --rate 50 --seconds 60 --faults 7

Redis, coordinator, routers, gateways and workers are real processes; only the ranks are simulated. With `--faults SEED`
workers, routers and Redis fail meanwhile, in an order that the seed fixes. Without, the costs of an idle installation
are measured before the load, and a tenth more workers join after it and are killed, to see how long the routers take to
notice. `--sweep` does it for several sizes. Exits with 1 if an answer is lost or altered, or if anything is held after
the last answer.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer

from bench.evaluation.report import replace_between
from bench.fleet.faults import leaks, strike
from bench.fleet.installation import Fleet, FleetSize, running_fleet
from bench.fleet.load import Load
from bench.fleet.report import Convergence, FleetRun, readings, table
from bench.fleet.usage import component_uses, decision_buckets, gateway_samples
from bench.fleet.workloads import Lengths, Workload, WorkloadName
from bench.reading import write_readings
from services.cli.stack.default_model import TINY_MODEL
from services.worker.settings import WorkerSettings
from services.worker.simulated.opening import SimulatedModel, open_model

_RESUMES = "ryzanstein_gateway_resumes_total"
_CONVERGE_S = 120.0
_GIVEN_BACK_S = 60.0
_SETTLE_S = 2.0  # from the last worker's start until gateways have read the list of workers


async def run(
    size: FleetSize, load: Load, workload: Workload, faults: tuple[int, float] | None, idle_s: float
) -> FleetRun:
    """Start a fleet, load it after `idle_s`, and measure. `faults`: a seed, and the seconds between two faults."""
    async with running_fleet(size, _CONVERGE_S) as fleet:
        load = Load(fleet.urls, load.model, load.rate, load.seconds)
        computed_before = {view.worker_id: view.state.computed_tokens for view in await fleet.views()}
        decided_before = await decision_buckets(fleet)
        await asyncio.sleep(_SETTLE_S if idle_s else 0.0)
        started = before = component_uses(fleet)
        if idle_s:
            await asyncio.sleep(idle_s)
            before = component_uses(fleet)
        striking = asyncio.create_task(strike(fleet, load, random.Random(faults[0]), faults[1])) if faults else None
        answers = await load.run(workload, random.Random(faults[0] if faults else 0), striking)
        struck = await striking if striking else []
        after, decided = component_uses(fleet), await decision_buckets(fleet)
        held = await leaks(fleet, _GIVEN_BACK_S)
        computed = [view.state.computed_tokens - computed_before.get(view.worker_id, 0) for view in await fleet.views()]
        resumes = sum(sample.value for sample in await gateway_samples(fleet, _RESUMES))
        convergence = None if faults else await _converge(fleet)
    return FleetRun(
        size,
        load,
        workload,
        answers,
        started,
        before,
        after,
        decided_before,
        decided,
        computed,
        held,
        struck,
        int(resumes),
        convergence,
    )


async def _converge(fleet: Fleet) -> Convergence:
    """Let a tenth more workers join, then kill them."""
    n_more = max(1, fleet.size.workers // 10)
    joined = fleet.join(n_more)
    join_s = await fleet.wait_serving(fleet.size.workers + n_more, _CONVERGE_S)
    began = time.monotonic()
    joined.kill()
    await fleet.wait_serving(fleet.size.workers, _CONVERGE_S)
    return Convergence(n_more, join_s, time.monotonic() - began)


def main(
    workers: int = 10,
    sweep: Annotated[str, typer.Option(help="Numbers of workers in place of --workers; commas between.")] = "",
    per_process: Annotated[int, typer.Option(help="Workers of one process.")] = 100,
    routers: int = 1,
    gateways: int = 1,
    coordinators: int = 1,
    workload: WorkloadName = "plain",
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 20.0,
    seconds: float = 10.0,
    prompt_tokens: int = 256,
    prefix_tokens: Annotated[int, typer.Option(help="The shared part of a prompt.")] = 192,
    answer_tokens: int = 32,
    speed: Annotated[float, typer.Option(help="How many times faster than the curve.")] = 1.0,
    curve: Path | None = None,
    model: Annotated[Path, typer.Option(help="A folder with config.json and tokenizer.")] = TINY_MODEL,
    faults: Annotated[int | None, typer.Option(help="Strike meanwhile, in the order of this seed.")] = None,
    fault_every: Annotated[float, typer.Option(help="Seconds from one fault to the next.")] = 2.0,
    idle_seconds: Annotated[float, typer.Option(help="Seconds without requests before the load; 0: none.")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="Write the tables into this page.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Measure a fleet."""
    sizes = sizes_of(sweep) if sweep else [workers]
    arguments = {"speed": speed} | ({"curve": str(curve)} if curve else {})
    simulated = asyncio.run(_simulated(model, arguments))
    language = simulated.simulation.language
    lengths = Lengths(prompt_tokens, prefix_tokens, answer_tokens)
    load, striking = Load((), model.name, rate, seconds), (faults, fault_every) if faults is not None else None
    runs = []
    for n_workers in sizes:
        began = time.monotonic()
        source = Workload(workload, language, language.words, lengths, random.Random(faults or 0))
        size = FleetSize(n_workers, per_process, routers, gateways, model, arguments, coordinators=coordinators)
        runs.append(asyncio.run(run(size, load, source, striking, 0.0 if striking else idle_seconds)))
        typer.echo(f"{n_workers:,} workers: {time.monotonic() - began:.0f} s", err=True)
    tokenizer = Tokenizer.from_buffer(simulated.model.tokenizer_json)
    written = table(runs, tokenizer)
    print(written)
    if out:
        replace_between(out, f"fleet with {workload} requests", written)
    if json_file:
        write_readings(json_file, (reading for done in runs for reading in readings(done)))
    if any(done.untrue(tokenizer) for done in runs):
        raise typer.Exit(1)


def sizes_of(sweep: str) -> list[int]:
    """The numbers of workers; raises typer.BadParameter."""
    sizes = [part.strip() for part in sweep.split(",")]
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise typer.BadParameter(f"--sweep: expected numbers of workers such as 10,100,300, not {sweep!r}")
    return [int(size) for size in dict.fromkeys(sizes)]


async def _simulated(model: Path, arguments: dict[str, object]) -> SimulatedModel:
    return await open_model(WorkerSettings(model=str(model), engine="simulated", engine_args=arguments), model)


if __name__ == "__main__":
    typer.run(main)
