"""Holds simulated workers and plans against real workers on the same requests.

    python -m bench.fidelity                                # a real worker, its simulated twin, and the plan's forecast
    python -m bench.fidelity --workers 2 --no-simulated     # real workers and the plan's forecast
    python -m bench.fidelity --workers 4 --no-real          # simulated workers, each on its own machine, and the plan
    python -m bench.fidelity --worker-cores 1               # workers on a core of their own, all else on the others

It records the curve of a worker, then starts two installations, whose workers compute and are simulated on this curve.
At each share of the capacity the same trace of requests is sent to one after the other, round by round, and replayed
by the planner. The table has the first tokens, the pace and the whole answers of all, and how far the simulation and
the plan are from the real workers.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from bench.mixture import MixedRequest, ServedRequest, draw_trace, send
from bench.reading import Reading, lower, write_readings
from bench.serve import complete
from bench.servers import ModelTarget, Peer, started
from bench.stats import percentile
from bench.suite.machine import machine
from bench.worker_cores import WorkerCores
from services.cli.stack.default_model import default_model
from services.planner.replay import Replayed, VirtualFleet
from services.planner.workers import WorkerKind
from services.router.policies.registry import make_policy
from services.worker.settings import DEFAULT_KV_TOKENS
from services.worker.simulated.curve import StepCurve

REAL, SIMULATED, PLANNED = "real", "simulated", "planned"
_NAME = "measured"  # the model in the API
_KEEPS_UP_S = 0.05
_WARM_UP_S = 120.0
_REPLAY_S = 64.0  # length of the trace that the capacity comes from, before its requests come at once

Runs = Mapping[str, Sequence[Sequence[ServedRequest]]]  # by side: the requests of each round


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of each side."""

    workers: int
    cores: WorkerCores

    def __str__(self) -> str:
        own = len(self.cores.workers) if self.cores.own else 0
        placed = f" alone on {own} {'core' if own == 1 else 'cores'}" if own else ""
        return f"{self.workers} {'worker' if self.workers == 1 else 'workers'}{placed}"


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """The runs of each side."""

    shares: tuple[float, ...]  # parts of the capacity
    seconds: float  # time in which requests of a run arrive
    rounds: int
    seed: int


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs at a load."""

    share: float  # part of the capacity
    rate: float  # requests a second
    runs: Runs

    @property
    def reference(self) -> str:
        """The side that the others are compared with: the first one."""
        return next(iter(self.runs))

    @property
    def others(self) -> list[str]:
        """The sides that are compared with the reference."""
        return [side for side in self.runs if side != self.reference]

    def error(self, side: str, measure: str, rounds: slice = slice(None)) -> float:
        """By how much a side is above the reference, as a part of it."""
        other, reference = (measures(self.runs[each][rounds])[measure] for each in (side, self.reference))
        return other / reference - 1


def measures(runs: Sequence[Sequence[ServedRequest]]) -> dict[str, float]:
    """Seconds at p50 and p95 over the requests of all rounds, and output tokens a second."""
    served = list(itertools.chain.from_iterable(runs))
    values = {
        "first token": [each.first_token_s for each in served],
        "pace": [each.pace_s for each in served],
        "whole answer": [each.seconds for each in served],
    }
    span_s = sum(max(each.at + each.seconds for each in run) for run in runs)
    return {f"{name} p{at}": percentile(of, at) for name, of in values.items() for at in (50, 95)} | {
        "output": sum(each.tokens for each in served) / span_s
    }


def record_curve(model: str, threads: int, n_own: int, rounds: int, path: Path) -> None:
    """Record the curve of a worker of so many threads, with `n_own` cores of its own."""
    options = ("--batches", "1,2,4,8,16", "--rounds", str(rounds), "--curve", str(path), "--worker-cores", str(n_own))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, "-m", "bench.engine", model, *options], env=environment, check=True)


def replay(kind: WorkerKind, workers: int, trace: Sequence[MixedRequest]) -> Replayed:
    """The planner's forecast for a trace."""
    return VirtualFleet(kind, make_policy("cost"), workers).run([each.to_replay() for each in trace])


def forecast(kind: WorkerKind, workers: int, trace: Sequence[MixedRequest]) -> list[ServedRequest]:
    """How the planner says that the trace is served."""
    outcomes = replay(kind, workers, trace).outcomes
    return [
        ServedRequest(request.at, outcome.first_token_s, outcome.pace_s, request.answer_tokens)
        for request, outcome in zip(trace, outcomes, strict=True)
    ]


def capacity(kind: WorkerKind) -> float:
    """Requests a second that one worker ends when all requests wait from the begin, by the planner's replay."""
    trace = [replace(each, at=0.0) for each in draw_trace(1.0, _REPLAY_S, seed=0)]
    return len(trace) / replay(kind, 1, trace).span_s


def _peer(name: str, workers: int, *more: str) -> Peer:
    options = f"--workers {workers} --served-model-name {_NAME} --dtype bfloat16 --speculation off"
    command = f"{{home}}/bin/ryzanstein up {{model}} --port {{port}} {options} --kv-tokens {DEFAULT_KV_TOKENS}"
    return Peer(name, " ".join([command, *more]), "/health")


async def _warm_up(url: str, workers: int) -> None:
    """Send requests until every worker has answered. Raises TimeoutError."""
    fields = {"stream_options": {"include_workers": True}}
    seen: set[str] = set()
    async with asyncio.timeout(_WARM_UP_S):
        for number in itertools.count():
            sending = (complete(url, _NAME, [300 + number, 301 + n], 16, fields) for n in range(2 * workers))
            for answer in await asyncio.gather(*sending):
                seen.update(answer.workers)
            if len(seen) >= workers:
                return


async def measure(model: str, curve: Path, fleet: Fleet, sides: Sequence[str], load: MixedLoad) -> list[Measured]:
    """Send the traces to all sides, round by round."""
    # Simulated workers compute nothing: each has a machine of its own.
    workers, cores = fleet.workers, fleet.cores.n_workers if REAL in sides else 0
    kind = WorkerKind(StepCurve.read(curve), shared_cores=cores)
    most = (min(workers, cores) if cores else workers) * capacity(kind)
    simulated = ("--engine simulated --engine-arg", f"curve={curve}")
    placed: tuple[str, ...] = ()
    if fleet.cores.own:
        placed = ("--engine-python", str(fleet.cores.write_python(curve.with_name("python"), workers)))
    runs = {share: defaultdict[str, list[list[ServedRequest]]](list) for share in load.shares}
    async with AsyncExitStack() as stack:
        urls = {}
        for side in sides:
            peer = _peer(side, workers, *placed, *(simulated if side == SIMULATED else ()))
            log = curve.with_name(f"{side}.log")
            server = await stack.enter_async_context(started(peer, sys.prefix, ModelTarget(model), log))
            urls[side] = server.url
            await _warm_up(server.url, workers)
        for turn, share in itertools.product(range(load.rounds), load.shares):
            seed = load.seed + len(load.shares) * turn + load.shares.index(share)  # no two runs share prompts
            trace = draw_trace(share * most, load.seconds, seed)
            for side in sides if turn % 2 == 0 else reversed(sides):
                runs[share][side].append(await send(urls[side], _NAME, trace))
            runs[share][PLANNED].append(forecast(kind, workers, trace))
    return [Measured(share, share * most, runs[share]) for share in load.shares]


def table(measured: Sequence[Measured], fleet: Fleet, model: str) -> str:
    """The results in Markdown."""
    n_cores = len(fleet.cores.workers | fleet.cores.others)
    lines = [f"{model}, {fleet}; {machine()['processor']}, {n_cores} cores"]
    for each in measured:
        runs = each.runs[each.reference]
        n_requests = sum(map(len, runs))
        late_s = percentile([one.late_s for one in itertools.chain.from_iterable(runs)], 99)
        kept_up = "" if late_s < _KEEPS_UP_S else ": it did not keep up"
        columns = [
            each.reference,
            *itertools.chain.from_iterable((side, "error", "error by round") for side in each.others),
        ]
        lines += [
            "",
            f"{each.share:.0%} of the capacity, {each.rate:.2f} requests/s: {n_requests} requests in "
            f"{len(runs)} rounds; generator late at p99 by {late_s * 1e3:.1f} ms{kept_up}",
            "",
            f"| | {' | '.join(columns)} |",
            "|---" * (len(columns) + 1) + "|",
            *(f"| {name} | {' | '.join(_cells(each, name))} |" for name in measures(runs)),
        ]
    return "\n".join(lines)


def _cells(measured: Measured, name: str) -> list[str]:
    def shown(side: str) -> str:
        value = measures(measured.runs[side])[name]
        if name == "output":
            return f"{value:.1f} tokens/s"
        return f"{value * 1e3:.1f} ms" if name.startswith("pace") else f"{value:.3f} s"

    cells = [shown(measured.reference)]
    for side in measured.others:
        rounds = range(len(measured.runs[side]))
        errors = [measured.error(side, name, slice(turn, turn + 1)) for turn in rounds]
        cells += [shown(side), f"{measured.error(side, name):+.1%}", f"{min(errors):+.1%} to {max(errors):+.1%}"]
    return cells


def readings(measured: Sequence[Measured], fleet: Fleet) -> list[Reading]:
    """The errors as readings."""
    own = f" on {len(fleet.cores.workers)} cores" if fleet.cores.own else ""
    return [
        lower(
            f"fidelity/{fleet.workers} workers{own}, {each.share:.0%} of the capacity, {side}/{name}, error",
            abs(each.error(side, name)) * 100,
            "%",
        )
        for each in measured
        for side in each.others
        for name in measures(each.runs[each.reference])
    ]


def main(
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a GGUF file; default: SmolLM2.")] = "",
    workers: int = 1,
    worker_cores: Annotated[int, typer.Option(help="Cores for workers alone; 0: all cores are for all.")] = 0,
    real: Annotated[bool, typer.Option(help="Measure real workers; else simulated ones are the measure.")] = True,
    simulated: Annotated[bool, typer.Option(help="Measure simulated workers.")] = True,
    curve: Annotated[Path | None, typer.Option(help="Take this curve of the worker instead of recording one.")] = None,
    curve_rounds: int = 2,
    shares: Annotated[str, typer.Option(help="Shares of the workers' capacity.")] = "0.5,0.8",
    seconds: Annotated[float, typer.Option(help="Time for which requests of a run arrive.")] = 35.0,
    rounds: int = 2,
    seed: int = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Compare simulated workers and the plan's forecast with real workers."""
    model = model or default_model().model
    load = MixedLoad(tuple(float(share) for share in shares.split(",")), seconds, rounds, seed)
    sides = [side for side, measured in ((REAL, real), (SIMULATED, simulated)) if measured]
    if not sides:
        raise typer.BadParameter("--no-real and --no-simulated leave nothing to compare the plan with")
    fleet = Fleet(workers, WorkerCores.divide(worker_cores))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "curve.json"
        if curve:
            shutil.copy(curve, path)
        else:
            threads = fleet.cores.threads(workers if real else 1)
            record_curve(model, threads, worker_cores, curve_rounds, path)
        os.sched_setaffinity(0, fleet.cores.others)  # and what starts from here on
        measured = asyncio.run(measure(model, path, fleet, sides, load))
    print(table(measured, fleet, Path(model).name))
    if json_file:
        write_readings(json_file, readings(measured, fleet))


if __name__ == "__main__":
    typer.run(main)
