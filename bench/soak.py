"""Runs load and faults for a long time: no token may be lost or duplicated, no process may grow.

    python -m bench.soak --minutes 30 --fault-every 20s --seed 0

Clients stream fixed requests from a local installation while processes are killed and stopped. Every answer is compared
with the answer before the first fault. The exit status is 1 if a client got an error or a wrong answer, or if the
installation did not recover from a fault.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.soaking.faults import Fault, FaultKind, schedule, strike
from bench.soaking.health import Health
from bench.soaking.load import Served, keep_asking, make_cases, open_client, references
from bench.soaking.memory import Memory, growth
from bench.soaking.verdict import FaultRecord, Verdict, judge, show
from services.cli.stack.default_model import TINY_MODEL
from tests.stack import RunningStack, running_stack

# Longer than the gateway waits for a silent worker (2.5 s, silence_timeout_s). So streams have moved to other workers
# when the stopped server continues and sends tokens of them.
_STOPPED_S = 20.0
_RECOVERY_S = 90.0


@dataclass(frozen=True)
class Plan:
    """The parameters of a run."""

    seconds: float
    fault_every_s: float
    seed: int
    workers: int
    concurrency: int
    cases: int
    tokens: int
    kinds: tuple[FaultKind, ...]


def seconds_of(text: str) -> float:
    """Seconds of `20`, `20s` or `2m`; raises BadParameter."""
    factor = {"s": 1, "m": 60}.get(text[-1:], 1)
    try:
        value = float(text.rstrip("sm")) * factor
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: must look like 20s or 2m") from error
    if value <= 0:
        raise typer.BadParameter(f"{text!r}: must be more than 0")
    return value


async def disturb(stack: RunningStack, health: Health, plan: Plan, until: float, console: Console) -> list[FaultRecord]:
    """Cause one fault at a time: the next one at its time, but after recovery from the last one."""
    records: list[FaultRecord] = []
    due = time.monotonic() + plan.fault_every_s
    for fault in schedule(plan.seed, plan.workers, plan.kinds):
        if due >= until:
            return records
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + plan.fault_every_s
        records.append(await _meet(stack, health, fault))
        recovered = records[-1].recovered_s
        word = "NOT recovered" if recovered is None else f"recovered after {recovered:.1f} s"
        console.print(f"{fault.kind} ({fault.victim}): {word}", highlight=False)
        if recovered is None:
            return records  # further faults would show the same failure
    raise AssertionError("the schedule has no end")


async def _meet(stack: RunningStack, health: Health, fault: Fault) -> FaultRecord:
    at = time.monotonic()
    struck = await asyncio.to_thread(strike, stack, fault)
    try:
        if not fault.replaces:
            await asyncio.sleep(_STOPPED_S)
    finally:
        struck.release()
    before = time.monotonic() - at
    recovered = await health.recovered(struck, _RECOVERY_S)
    return FaultRecord(fault.kind, fault.victim, at, None if recovered is None else before + recovered)


async def soak(stack: RunningStack, plan: Plan, console: Console) -> Verdict:
    """Get the reference answers, then run clients, faults and the memory watch concurrently."""
    cases = make_cases(plan.cases, plan.tokens, plan.seed)
    health, memory = Health.of(stack, plan.workers), Memory(stack)
    served: list[Served] = []
    try:
        async with open_client(stack.url, plan.concurrency) as client:
            expected = await references(client, cases, plan.concurrency)
            console.print(f"{len(expected)} reference answers; now {plan.seconds:.0f} s of load", highlight=False)
            began = time.monotonic()
            until = began + plan.seconds
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(memory.watch())
                disturbing = group.create_task(disturb(stack, health, plan, until, console))
                clients = [
                    group.create_task(
                        keep_asking(client, cases, random.Random(f"{plan.seed}-{number}"), until, served.append)
                    )
                    for number in range(plan.concurrency)
                ]
                await asyncio.gather(*clients, disturbing)
                watching.cancel()
            seconds = time.monotonic() - began
    finally:
        await health.aclose()
    return judge(seconds, served, expected, disturbing.result(), growth(memory.samples))


def main(
    minutes: Annotated[float, typer.Option(min=0.1)] = 30,
    fault_every: Annotated[str, typer.Option(help="From one fault to the next, like 20s.")] = "20s",
    seed: Annotated[int, typer.Option(help="Of faults, requests and their order.")] = 0,
    workers: Annotated[int, typer.Option(min=2)] = 3,
    concurrency: Annotated[int, typer.Option(min=1, help="Streams at any time.")] = 8,
    cases: Annotated[int, typer.Option(min=1, help="Different requests.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Per answer.")] = 120,
    kind: Annotated[list[FaultKind] | None, typer.Option(help="Only these faults; default: all.")] = None,
    kv_tokens: Annotated[
        int, typer.Option(min=0, help="KV cache per worker; small: full, and evicting, soon.")
    ] = 4_096,
    model: Annotated[str, typer.Option(help="A checkpoint folder or a hub id.")] = str(TINY_MODEL),
    out: Annotated[Path | None, typer.Option(help="Write the verdict as JSON.")] = None,
) -> None:
    """Soak a local installation."""
    kinds = tuple(kind or FaultKind)
    plan = Plan(minutes * 60, seconds_of(fault_every), seed, workers, concurrency, cases, tokens, kinds)
    # A KV cache takes memory when its blocks are first used. A small one is full soon, and does not look like a leak.
    args = ["--workers", str(workers), "--tensor-parallel", "1", "--kv-tokens", str(kv_tokens)]
    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="rz-") as folder, running_stack(Path(folder), *args, model=model) as stack:
        stack.wait_serving(workers)
        verdict = asyncio.run(soak(stack, plan, console))
        if not verdict.passed:
            console.print(stack.logs(), markup=False, highlight=False)
    show(verdict, console)
    if out:
        out.write_text(json.dumps(verdict.to_json(), indent=1))
    raise typer.Exit(0 if verdict.passed else 1)


if __name__ == "__main__":
    typer.run(main)
