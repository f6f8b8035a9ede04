"""Measures how long a stream pauses when its worker is killed, and how much of the pause is re-prefill.

    python -m bench.failover --streams 64 --rounds 4

Streams run on three workers; in mid-stream, the busiest worker's rank or server process is killed. The trace of a moved
stream divides its pause into parts: until it was submitted to another worker, queue and re-prefill there, and the rest.
Clients never retry; the exit status is 1 if a client did not get all its tokens.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.reading import Reading, lower, write_readings
from bench.serve import Answer, complete
from bench.soaking.faults import Fault, FaultKind, strike
from bench.stats import median, percentile
from tests.otlp import Collector, collecting
from tests.stack import RunningStack, running_stack

KINDS = (FaultKind.KILL_RANK, FaultKind.KILL_WORKER)
_ARRIVAL = "POST /v1/completions"
_SPANS = {_ARRIVAL, "worker.queue", "worker.prefill"}


@dataclass(frozen=True)
class Plan:
    """The parameters of a round."""

    workers: int
    streams: int
    prompt_tokens: int
    output_tokens: int
    kill_after_s: float
    vocab: int = 4_000


@dataclass(frozen=True)
class Pause:
    """The pause of one moved stream, in milliseconds."""

    whole: float  # from the last token before the kill to the next one, at the client
    usual: float  # the stream's median gap between events
    submitted: float  # from the kill to the submission at another worker
    prefill: float  # queue and re-prefill at that worker

    @property
    def beyond(self) -> float:
        """The pause without queue and re-prefill."""
        return self.whole - self.prefill


def divide(answer: Answer, spans: dict, killed_ns: int, offset_ns: int) -> Pause | None:
    """Compute the pause of a stream from its trace; None if the stream was not interrupted.

    `offset_ns` converts the clock of the answer's times to the time since the epoch, which spans use.
    """
    submitted = _submitted(spans)
    if len(submitted) < 2:
        return None
    times = [int((answer.began + at) * 1e9) + offset_ns for at in answer.token_times]
    after = next(index for index, at in enumerate(times) if at > submitted[-1])
    queue, prefill = spans["worker.queue"][1], spans["worker.prefill"][1]
    return Pause(
        whole=(times[after] - times[after - 1]) / 1e6 if after else 0.0,
        usual=median([later - earlier for earlier, later in pairwise(sorted(set(answer.token_times)))]) * 1e3,
        submitted=(submitted[-1] - killed_ns) / 1e6,
        prefill=(prefill.end_time_unix_nano - queue.start_time_unix_nano) / 1e6,
    )


def spans_of(collector: Collector, trace_id: str) -> dict:
    """Wait for a stream's spans, including the worker's spans of the last attempt, which arrive last."""
    submitted = _submitted(collector.wait(trace_id, {_ARRIVAL}))
    return collector.wait(trace_id, _SPANS, {"worker.queue", "worker.prefill"}, submitted[-1])


def _submitted(spans: dict) -> list[int]:
    return [event.time_unix_nano for event in spans[_ARRIVAL][1].events if event.name == "submitted"]


async def run(
    stack: RunningStack, collector: Collector, plan: Plan, kind: FaultKind, seed: int
) -> tuple[list[Pause], list[int]]:
    """Kill once in mid-stream; return the pauses, and the workers' streams before the kill, the busiest first.

    Raises RuntimeError if a client did not get all its tokens.
    """
    rng = random.Random(seed)
    traces = [secrets.token_hex(16) for _ in range(plan.streams)]
    prompts = [[rng.randrange(300, plan.vocab) for _ in range(plan.prompt_tokens)] for _ in traces]

    async def stream(index: int) -> Answer:
        # Sessions spread the streams over all workers; token ids show how many tokens an event has.
        fields = {"session_id": f"{seed}-{index}", "return_token_ids": True}
        header = f"traceparent: 00-{traces[index]}-{secrets.token_hex(8)}-01\r\n"
        return await complete(stack.url, "ryzanstein-tiny", prompts[index], plan.output_tokens, fields, header)

    clients = [asyncio.create_task(stream(index)) for index in range(plan.streams)]
    await asyncio.sleep(plan.kill_after_s)
    loads = sorted((view.state.running for view in await asyncio.to_thread(stack.workers)), reverse=True)
    fault = Fault(kind, await asyncio.to_thread(stack.busiest))
    offset_ns = time.time_ns() - time.perf_counter_ns()
    struck = await asyncio.to_thread(strike, stack, fault)
    answers = await asyncio.gather(*clients)
    if short := [a for a in answers if a.error or len(a.token_times) != plan.output_tokens]:
        raise RuntimeError(f"{len(short)} of {len(answers)} streams are not whole: {short[0].error or 'too short'}")
    pauses_of = [
        divide(a, spans_of(collector, t), struck.at_ns, offset_ns) for a, t in zip(answers, traces, strict=True)
    ]
    return [pause for pause in pauses_of if pause is not None], loads


def measure(plan: Plan, rounds: int, console: Console) -> dict[FaultKind, list[Pause]]:
    """Run all rounds on one installation, alternating the kinds of kill."""
    pauses_of: dict[FaultKind, list[Pause]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="rz-") as folder, collecting() as (collector, variables):
        os.environ.update(variables)
        with running_stack(Path(folder), "--workers", str(plan.workers), "--tensor-parallel", "1") as stack:
            for turn in range(rounds):
                for number, kind in enumerate(KINDS):
                    stack.wait_serving(plan.workers)
                    pauses, loads = asyncio.run(run(stack, collector, plan, kind, seed=turn * len(KINDS) + number))
                    before = ", ".join(map(str, loads))
                    console.print(
                        f"{kind}: {len(pauses)} streams moved; before it workers had {before}", highlight=False
                    )
                    pauses_of[kind] += pauses
            stack.wait_serving(plan.workers)
    return pauses_of


def readings(pauses_of: dict[FaultKind, list[Pause]]) -> list[Reading]:
    """Medians, 95th percentiles and maxima, as readings."""
    rows = [(f"failover/{kind}", part, values) for kind, pauses in pauses_of.items() for part, values in parts(pauses)]
    return [
        lower(f"{name}/{part}, {which}", value, "ms")
        for name, part, values in rows
        for which, value in (("median", median(values)), ("p95", percentile(values, 95)), ("longest", max(values)))
    ]


def parts(pauses: Sequence[Pause]) -> list[tuple[str, list[float]]]:
    """The reported parts of the pauses."""
    return [
        ("whole pause", [pause.whole for pause in pauses]),
        ("until submitted elsewhere", [pause.submitted for pause in pauses]),
        ("queue and re-prefill", [pause.prefill for pause in pauses]),
        ("beyond re-prefill", [pause.beyond for pause in pauses]),
        ("usual gap", [pause.usual for pause in pauses]),
    ]


def main(
    workers: Annotated[int, typer.Option(min=2)] = 3,
    streams: Annotated[int, typer.Option(min=1)] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Kills of each kind.")] = 4,
    prompt_tokens: int = 128,
    output_tokens: int = 400,
    kill_after: Annotated[float, typer.Option(help="Seconds from the first request to the kill.")] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Kill workers of the bundled model in mid-stream."""
    console = Console(width=120)
    pauses_of = measure(Plan(workers, streams, prompt_tokens, output_tokens, kill_after), rounds, console)
    if not all(pauses_of.values()):
        raise SystemExit("a kill met no stream: choose more streams, or another moment")
    if json_file:
        write_readings(json_file, readings(pauses_of))
    for kind, pauses in pauses_of.items():
        table = Table(title=f"{kind}: {len(pauses)} streams that moved, of {rounds} x {streams}; ms")
        for column in ("", "median", "p95", "longest"):
            table.add_column(column, justify="right" if column else "left")
        for part, values in parts(pauses):
            table.add_row(part, *(f"{n:.1f}" for n in (median(values), percentile(values, 95), max(values))))
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
