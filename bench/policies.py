"""Compares the router's policies on the same requests, in virtual time.

    python -m bench.policies                                      # 16 workers, from hardly busy to nearly full
    python -m bench.policies --workers 300 --rates 0.067          # a large fleet with little to do

The planner's replay runs the router's policies and the workers' schedulers; a step takes as long as on the curve of a
worker. So the table is the same on every machine. The requests are those of `bench.fleet --workload prefix`: their
prompts begin with one of a few system prompts. Hits are tokens of prompts that were cached at their worker; of all
after the first of each system prompt, 75 % can be.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer

from bench.fleet.oracle import imbalance
from bench.fleet.workloads import Lengths
from bench.reading import Reading, lower, write_readings
from bench.stats import percentile
from services.common.request_log import LOG_BLOCK_TOKENS
from services.planner.replay import Replayed, VirtualFleet
from services.planner.trace import TraceRequest
from services.planner.workers import WorkerKind
from services.router.policies.registry import PolicyName, make_policy
from services.worker.simulated.curve import DEFAULT_CURVE, StepCurve


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """A trace on a fleet, placed by one policy."""

    policy: str
    rate: float  # requests a second and worker
    replayed: Replayed
    prompt_tokens: int  # sum over the requests

    def measures(self) -> dict[str, float]:
        """First tokens and pace in milliseconds, shares of hits and of busy time, busiest worker over mean."""
        outcomes, n_workers = self.replayed.outcomes, len(self.replayed.computed)
        first = [outcome.first_token_s * 1e3 for outcome in outcomes]
        return {
            "first token p50": percentile(first, 50),
            "first token p95": percentile(first, 95),
            "pace p95": percentile([outcome.pace_s * 1e3 for outcome in outcomes], 95),
            "hits": self.replayed.hit_tokens / self.prompt_tokens,
            "busiest over mean": imbalance(self.replayed.computed),
            "busy": self.replayed.busy_s / (self.replayed.span_s * n_workers),
        }


def prefixed(rate: float, seconds: float, prefixes: int, seed: int = 0) -> list[TraceRequest]:
    """Requests that arrive by chance, `rate` a second; each begins with one of `prefixes` system prompts."""
    draw, lengths, at = random.Random(seed), Lengths(), 0.0
    trace: list[TraceRequest] = []
    n_blocks = lengths.prefix // LOG_BLOCK_TOKENS
    while not trace or at < seconds:
        first = (1 + draw.randrange(prefixes)) * n_blocks
        trace.append(TraceRequest(at, lengths.prompt, lengths.answer, tuple(range(first, first + n_blocks))))
        at += draw.expovariate(rate)
    return trace


def run(policy: str, curve: StepCurve, workers: int, rate: float, trace: Sequence[TraceRequest]) -> PolicyRun:
    """Replay a trace."""
    fleet = VirtualFleet(WorkerKind(curve), make_policy(cast(PolicyName, policy)), workers)
    return PolicyRun(policy, rate, fleet.run(trace), sum(request.prompt_tokens for request in trace))


def table(runs: Sequence[PolicyRun], workers: int, curve: StepCurve) -> str:
    """The results in Markdown."""
    names = list(runs[0].measures())
    lines = [
        f"{workers} workers, steps of {curve.model} on {curve.machine}",
        "",
        f"| requests/s a worker | policy | {' | '.join(names)} |",
        "|---" * (len(names) + 2) + "|",
    ]
    for each in runs:
        cells = [_cell(name, value) for name, value in each.measures().items()]
        lines.append(f"| {each.rate:g} | {each.policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(name: str, value: float) -> str:
    if name in ("hits", "busy"):
        return f"{value:.1%}"
    return f"{value:.2f}" if name == "busiest over mean" else f"{value:.1f} ms"


def readings(runs: Sequence[PolicyRun], workers: int) -> list[Reading]:
    """The times as readings."""
    return [
        lower(f"policies/{workers} workers, {each.rate:g} requests/s a worker, {each.policy}/{name}", value, "ms")
        for each in runs
        for name, value in each.measures().items()
        if name.startswith(("first token", "pace"))
    ]


def main(
    workers: int = 16,
    policies: Annotated[str, typer.Option(help="Policies of the router.")] = "cost,least_loaded,round_robin",
    rates: Annotated[str, typer.Option(help="Requests a second for each worker.")] = "0.1,1,4,6",
    seconds: Annotated[float, typer.Option(help="Time for which requests arrive.")] = 20.0,
    prefixes: Annotated[int, typer.Option(help="Different system prompts.")] = 8,
    curve: Annotated[Path, typer.Option(help="A worker's curve, by `bench.engine --curve`.")] = DEFAULT_CURVE,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Replay the same requests under each policy."""
    of_curve = StepCurve.read(curve)
    runs = []
    for rate in map(float, rates.split(",")):
        trace = prefixed(rate * workers, seconds, prefixes)
        runs += [run(policy, of_curve, workers, rate, trace) for policy in policies.split(",")]
    print(table(runs, workers, of_curve))
    if json_file:
        write_readings(json_file, readings(runs, workers))


if __name__ == "__main__":
    typer.run(main)
