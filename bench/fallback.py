"""Measures how long requests for a route wait when all workers of its target are killed, and how many fail.

    python -m bench.fallback --streams 16 --rounds 3

Two pools serve the bundled model: a route's target, and its fallback on `no_worker`. Requests arrive as a Poisson
process, at a part (`--load`) of the rate at which the target serves `--streams` requests at once. Then the servers of
all its workers get SIGKILL. Clients never retry; the exit status is 1 if one of them did not get all its tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.reading import Reading, lower, write_readings
from bench.serve import Answer, Load, complete, drive
from bench.soaking.faults import Fault, FaultKind, strike
from bench.stats import median, percentile
from services.cli.stack.default_model import TINY_MODEL
from tests.stack import RunningStack, running_stack

ROUTE, TARGET, FALLBACK = "chat", "target", "fallback"
_FIELDS = {"return_token_ids": True, "stream_options": {"include_workers": True}}


@dataclass(frozen=True)
class Plan:
    """The parameters of a round."""

    workers: int  # number in each pool
    streams: int
    load: float
    prompt_tokens: int
    output_tokens: int
    seconds: float  # before the kill, and after it

    def closed_loop(self) -> Load:
        """As many requests at once as streams."""
        return Load(8 * self.streams, self.streams, self.prompt_tokens, self.output_tokens)


@dataclass(frozen=True)
class Switch:
    """The requests of one kill."""

    usual_s: float  # median time to the first token before the kill
    waits: tuple[float, ...]  # seconds to the first token of requests that found no worker of the target
    resumed: int  # streams that had tokens, and went on when a worker of the target was there again
    failed: tuple[str, ...]

    @property
    def beyond(self) -> list[float]:
        """Seconds by which the waits are longer than usual."""
        return [wait - self.usual_s for wait in self.waits]


def judge(answers: Sequence[Answer], plan: Plan, killed_at: float, fallback: frozenset[str]) -> Switch:
    """The effect of a kill at `killed_at`, by time.perf_counter, on the requests. `fallback`: ids of its workers."""
    whole = [a for a in answers if not a.error and len(a.token_times) == plan.output_tokens]
    before = [a for a in whole if a.began + a.token_times[0] <= killed_at]
    after = [a for a in whole if a.began + a.token_times[0] > killed_at]
    return Switch(
        usual_s=median([a.token_times[0] for a in before]),
        waits=tuple(a.token_times[0] for a in after if a.began < killed_at or a.workers[0] in fallback),
        resumed=sum(len(a.workers) > 1 for a in before),
        failed=tuple(a.error or "too few tokens" for a in answers if a not in whole),
    )


async def run(stack: RunningStack, plan: Plan, seed: int) -> Switch:
    """Send requests as they are due, and kill the target's workers in mid-way."""
    closed = await drive(stack.url, TARGET, plan.closed_loop())
    if closed.errors:
        raise RuntimeError(f"{closed.errors} requests failed before the kill: {closed.first_error}")
    rng, rate = random.Random(seed), plan.load * closed.requests / closed.seconds
    views = await asyncio.to_thread(stack.workers)
    victims = [view.worker_id for view in views if view.model == TARGET]

    async def arrive(until: float) -> list[asyncio.Task[Answer]]:
        clients = []
        while time.perf_counter() < until:
            prompt = [rng.randrange(300, 4_000) for _ in range(plan.prompt_tokens)]
            call = complete(stack.url, ROUTE, prompt, plan.output_tokens, _FIELDS)
            clients.append(asyncio.create_task(call))
            await asyncio.sleep(rng.expovariate(rate))
        return clients

    clients = await arrive(time.perf_counter() + plan.seconds)
    killed_at = time.perf_counter()
    for victim in victims:
        strike(stack, Fault(FaultKind.KILL_WORKER, victim))
    clients += await arrive(killed_at + plan.seconds)
    answers = await asyncio.gather(*clients)
    return judge(answers, plan, killed_at, frozenset(view.worker_id for view in views if view.model == FALLBACK))


def measure(plan: Plan, rounds: int) -> list[Switch]:
    """Run all rounds on one installation."""
    route = {"targets": [{"model": TARGET}], "fallbacks": [{"model": FALLBACK, "when": ["no_worker"]}]}
    names = ("--served-model-name", TARGET, "--served-model-name", FALLBACK)
    pools = ("--model", str(TINY_MODEL), *names, "--workers", str(plan.workers), "--tensor-parallel", "1")
    with tempfile.TemporaryDirectory(prefix="rz-") as folder:
        routes = Path(folder) / "routes.json"
        routes.write_text(json.dumps({"routes": {ROUTE: route}}))
        os.environ["RYZANSTEIN_ROUTES_FILE"] = str(routes)
        switches = []
        with running_stack(Path(folder), *pools) as stack:
            for seed in range(rounds):
                stack.wait_serving(2 * plan.workers)
                switches.append(asyncio.run(run(stack, plan, seed)))
    return switches


def readings(beyond: Sequence[float], failed: int) -> list[Reading]:
    """The median and the 99th percentile, and the failed requests."""
    return [
        lower("fallback/beyond the usual first token, median", 1e3 * median(beyond), "ms"),
        lower("fallback/beyond the usual first token, p99", 1e3 * percentile(beyond, 99), "ms"),
        lower("fallback/failed", failed, "requests"),
    ]


def main(
    workers: Annotated[int, typer.Option(min=1, help="Of each pool.")] = 2,
    streams: Annotated[int, typer.Option(min=1)] = 16,
    load: Annotated[float, typer.Option(help="Part of the rate that the target serves.")] = 0.8,
    rounds: Annotated[int, typer.Option(min=1, help="Kills.")] = 3,
    prompt_tokens: int = 64,
    output_tokens: int = 64,
    seconds: Annotated[float, typer.Option(help="Length of the load before the kill, and after it.")] = 4.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Kill the workers of a route's target under load."""
    switches = measure(Plan(workers, streams, load, prompt_tokens, output_tokens, seconds), rounds)
    table = Table("usual ms", "switched", "beyond, p50 ms", "p99 ms", "longest ms", "resumed", "failed")
    table.title = "first tokens of requests that found no worker of the target"
    for switch in switches:
        beyond = switch.beyond
        times = (switch.usual_s, percentile(beyond, 50), percentile(beyond, 99), max(beyond, default=0.0))
        usual, *later = (f"{1e3 * seconds:.0f}" for seconds in times)
        table.add_row(usual, str(len(beyond)), *later, str(switch.resumed), str(len(switch.failed)))
    Console(width=120).print(table)
    beyond, failed = [b for switch in switches for b in switch.beyond], [f for s in switches for f in s.failed]
    if not beyond:
        raise SystemExit("the kills met no request: choose more streams, or a longer time")
    if json_file:
        write_readings(json_file, readings(beyond, len(failed)))
    Console().print(f"all: p50 {1e3 * median(beyond):.0f} ms, p99 {1e3 * percentile(beyond, 99):.0f} ms")
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")


if __name__ == "__main__":
    typer.run(main)
