"""Measures what speculation gains, and checks that it changes no text.

    python -m bench.speculation                                  # SmolLM2, as its file stores it
    python -m bench.speculation --bf16                           # converted to bfloat16
    python -m bench.speculation FILE.gguf --llama none --llama ngram-simple --llama ngram-mod

Every round starts two installations, with speculation and without, and sends each the same requests in turns, so that
one computes at a time. Answers of the two are compared byte for byte; the exit status is 1 if any differ. A speed is
the tokens of all answers over the mean time of an answer, prompts included, times the number at once: the throughput
of so many clients who always ask again. The end of a run, when fewer are left, would count against answers that end
at different times. For requests alone, the tables show the speed without prompts also. They have medians over the
rounds.

A small model repeats some files and gets lost in others. So before the rounds, an installation without speculation
edits `--candidates` files, and the rounds edit those that it repeated best. The table shows which share of the answers'
8-grams of words stands in their sources. `--llama` measures the edits of one user on llama.cpp's server with each of
its ways to draft; it needs the package `xllamacpp`.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from bench.reading import write_readings
from bench.serve import first_model
from bench.servers import LLAMA_DRAFTERS, ModelTarget, Peer, started
from bench.speculation_report import Answer, Cell, Run, Totals, peer_table, readings, speed_table
from bench.speculation_workloads import (
    CONCURRENCIES,
    N_EDITS,
    NAMES,
    Ask,
    Workload,
    edits,
    repeated_share,
    warm_up,
    workloads,
)
from services.cli.stack.default_model import default_model
from services.cli.stack.options import StackOptions
from services.cli.stack.supervisor import Stack
from services.common.ports import free_port
from services.common.processes.process import ManagedProcess
from services.common.worker_options import Speculation
from services.tools.converter.run import ConversionOptions, convert
from services.worker.native.startup import read_model

_START_S = 300.0
_KV_TOKENS = 65_536
_SETTINGS: tuple[Speculation, Speculation] = ("auto", "off")  # the first to start changes with each round
_LLAMA_FIELDS = ("messages", "prompt", "max_tokens", "stop", "temperature")
# Requests queue without limit, as in bench/peers.toml.
_PATIENCE = ["queue_timeout_s=3600", "route_timeout_s=3700"]


@dataclass(frozen=True)
class Target:
    """A running server."""

    url: str
    model: str
    metrics_url: str = ""  # empty: the server has none

    async def send(self, asks: Sequence[Ask], concurrency: int) -> Run:
        """Send the requests; raises RuntimeError for an answer that is an error."""
        limit = asyncio.Semaphore(concurrency)
        durations: list[float] = []
        async with httpx.AsyncClient(trust_env=False, timeout=3600) as client:

            async def post(ask: Ask) -> dict[str, Any]:
                async with limit:
                    began = time.perf_counter()
                    got = await client.post(f"{self.url}/v1/{ask.path}", json={"model": self.model, **ask.body})
                    durations.append(time.perf_counter() - began)
                if got.is_error:
                    raise RuntimeError(f"{self.url}/v1/{ask.path}: {got.status_code} {got.text}")
                body: dict[str, Any] = got.json()
                return body

            before = await self._totals(client)
            bodies = await asyncio.gather(*map(post, asks))
            after = await self._totals(client)
        answers, seconds = [_read(body) for body in bodies], sum(durations) / concurrency
        if not self.metrics_url:
            return Run(answers, seconds, _llama_totals(bodies))
        return Run(answers, seconds, after.since(before))

    async def _totals(self, client: httpx.AsyncClient) -> Totals:
        """The worker's totals since its start."""
        text = (await client.get(self.metrics_url)).raise_for_status().text if self.metrics_url else ""
        measured = {f"ryzanstein_worker_{name}": Counter[str]() for name in ("drafted_tokens", "accepted_tokens")}
        prompts_s = 0.0
        for sample in (sample for metric in text_string_to_metric_families(text) for sample in metric.samples):
            if (totals := measured.get(sample.name.removesuffix("_total"))) is not None:
                totals[sample.labels["drafter"]] += int(sample.value)
            elif sample.name == "ryzanstein_worker_ttft_seconds_sum":
                prompts_s = sample.value
        return Totals(*measured.values(), prompts_s)


def _read(body: dict[str, Any]) -> Answer:
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Answer(text, body["usage"]["completion_tokens"], choice["finish_reason"])


def _llama_totals(bodies: Sequence[dict[str, Any]]) -> Totals:
    """The totals of llama.cpp's answers, which name no drafter."""
    names = ("draft_n", "draft_n_accepted", "prompt_ms")
    proposed, accepted, prompts_ms = (sum(body["timings"].get(name, 0) for body in bodies) for name in names)
    return Totals(Counter({"n-grams": proposed}), Counter({"n-grams": accepted}), prompts_ms / 1e3)


@asynccontextmanager
async def installation(model: str, speculation: Speculation) -> AsyncIterator[Target]:
    """Run an installation with one worker, which has metrics, while the block runs."""
    port, metrics_port = free_port(), free_port()
    options = StackOptions(
        [model], kv_tokens=_KV_TOKENS, speculation=speculation, port=port, start_timeout=_START_S, settings=_PATIENCE
    )
    stack = Stack(options, lambda name, state: None)
    own = {"RYZANSTEIN_METRICS_PORT": str(metrics_port)}
    stack.processes = tuple(
        ManagedProcess(replace(each.spec, env=each.spec.env | own), each.log_file)
        if each.spec.name == "worker-0"
        else each
        for each in stack.processes
    )
    try:
        await stack.start()
        yield Target(
            stack.options.url, await first_model(stack.options.url), f"http://127.0.0.1:{metrics_port}/metrics"
        )
    finally:
        await stack.stop()


@dataclass(frozen=True)
class Plan:
    """A measured case."""

    model: str  # folder or file
    chat: bool
    rounds: int
    candidates: int
    max_tokens: int  # longest answer
    concurrencies: Sequence[int]
    drafters: Sequence[str]  # llama.cpp's


async def choose_edits(plan: Plan) -> list[Ask]:
    """Send candidates without speculation; returns those whose answers are nearest to their files, in chance order."""
    tried = [ask.capped(plan.max_tokens) for ask in islice(edits(chat=plan.chat), plan.candidates)]
    async with installation(plan.model, "off") as target:
        answers = (await target.send(tried, max(CONCURRENCIES))).answers
    shares = [_nearness(ask.source, answer.text) for ask, answer in zip(tried, answers, strict=True)]
    best = sorted(range(len(tried)), key=lambda index: -shares[index])[:N_EDITS]
    spread = f"{shares[best[0]]:.2f} to {shares[best[-1]]:.2f}"
    print(f"{len(best)} of {len(tried)} edits are used, whose nearness to their files is {spread}", flush=True)
    return [tried[index] for index in random.Random(0).sample(best, len(best))]


def _nearness(source: str, answer: str) -> float:
    """The share of the answer that stands in the source, times the share of the source that stands in the answer."""
    return repeated_share(source, answer) * repeated_share(answer, source)


async def measure(plan: Plan, loads: Sequence[Workload], logs: Path) -> tuple[list[Cell], dict[str, list[Run]]]:
    """Run all rounds; returns the cells, and the runs of llama.cpp by drafter."""
    work = [
        (Cell(load.name, n), [ask.capped(plan.max_tokens) for ask in asks])
        for load in loads
        for n, asks in load.cells()
        if n in plan.concurrencies
    ]
    peers: dict[str, list[Run]] = {name: [] for name in plan.drafters}
    for turn in range(plan.rounds):
        first, second = _SETTINGS[:: -1 if turn % 2 else 1]
        async with installation(plan.model, first) as older, installation(plan.model, second) as younger:
            on, off = (older, younger) if first == "auto" else (younger, older)
            for target in (on, off):
                await target.send([warm_up(chat=plan.chat)], 1)
            for place, (cell, asks) in enumerate(work, turn):
                await _measure_cell(cell, asks, ((on, cell.on), (off, cell.off))[:: 1 if place % 2 else -1])
                print(f"round {turn + 1}: {cell.name} {cell.ratio:.2f}", file=sys.stderr, flush=True)
        for name in plan.drafters:
            peers[name].append(await _measure_llama(plan.model, name, work[0][1], logs / f"llama-{name}.log"))
    return [cell for cell, _ in work], peers


async def _measure_cell(cell: Cell, asks: Sequence[Ask], sides: Sequence[tuple[Target, list[Run]]]) -> None:
    for target, runs in sides:
        runs.append(await target.send(asks, cell.concurrency))
    pairs = zip(asks, cell.off[-1].answers, strict=True)
    cell.repeated += [repeated_share(ask.source, answer.text) for ask, answer in pairs if ask.source]


async def _measure_llama(model: str, drafter: str, asks: Sequence[Ask], log: Path) -> Run:
    """Start llama.cpp's server, send the requests one after the other, stop it: while it is idle, it polls."""
    command = f"{sys.executable} -m bench.llama_server {{model}} --port {{port}} --threads {{threads}}"
    peer = Peer(f"llama.cpp, {drafter}", f"{command} --slots 1 --context 8192 --drafter {drafter}", "/health")
    plain = [replace(ask, body={name: ask.body[name] for name in _LLAMA_FIELDS if name in ask.body}) for ask in asks]
    async with started(peer, "", ModelTarget(model), log) as server:
        target = Target(server.url, await first_model(server.url))
        await target.send([warm_up(chat=False)], 1)
        return await target.send(plain, 1)


def main(
    model: Annotated[str, typer.Argument(help="A GGUF file or a folder.", show_default="SmolLM2")] = "",
    bf16: Annotated[bool, typer.Option("--bf16", help="Convert the file to bfloat16 first.")] = False,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    candidates: Annotated[int, typer.Option(min=N_EDITS, help="Files that are tried before the rounds.")] = 120,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer; a small number is for a quick look.")] = 1_400,
    workload: Annotated[
        list[str] | None, typer.Option(help=f"Again for each, all if left out: {'; '.join(NAMES)}.")
    ] = None,
    at_once: Annotated[list[int] | None, typer.Option(help="Concurrent requests, again for each: 1, 4, 16.")] = None,
    llama: Annotated[
        list[str] | None, typer.Option(help=f"A drafter of llama.cpp, again for each: {', '.join(LLAMA_DRAFTERS)}.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Measure MODEL with speculation and without."""
    if unknown := set(llama or []) - set(LLAMA_DRAFTERS):
        raise typer.BadParameter(f"--llama {', '.join(sorted(unknown))}: allowed: {', '.join(LLAMA_DRAFTERS)}")
    if unknown := set(workload or []) - set(NAMES):
        raise typer.BadParameter(f"--workload {', '.join(sorted(unknown))}: allowed: {'; '.join(NAMES)}")
    if unknown := set(at_once or []) - set(CONCURRENCIES):
        raise typer.BadParameter(
            f"--at-once {', '.join(map(str, unknown))}: allowed: {', '.join(map(str, CONCURRENCIES))}"
        )
    if llama and (bf16 or (workload and NAMES[0] not in workload) or (at_once and 1 not in at_once)):
        raise typer.BadParameter(f"--llama: needs a GGUF file as it is, and the workload {NAMES[0]} alone")
    with tempfile.TemporaryDirectory() as folder:
        source = model or default_model().model
        served = _converted(Path(source), Path(folder)) if bf16 else source
        chat = bool(read_model(Path(served)).chat_template)
        plan = Plan(served, chat, rounds, candidates, max_tokens, tuple(at_once or CONCURRENCIES), tuple(llama or ()))
        wanted = workload or NAMES
        edited = asyncio.run(choose_edits(plan)) if any("edit" in name for name in wanted) else []
        loads = [load for load in workloads(edited, chat=chat) if load.name in wanted]
        logs = Path(tempfile.mkdtemp(prefix="speculation-logs-"))
        cells, peers = asyncio.run(measure(plan, loads, logs))
    name = f"{Path(source).stem}{' in bfloat16' if bf16 else ''}"
    console = Console(width=180)
    console.print(speed_table(name, cells))
    if peers:
        console.print(peer_table(cells[0], peers))
    if different := [line for cell in cells for line in cell.differences()]:
        raise SystemExit("\n".join(["TEXTS DIFFER with speculation and without it:", *different]))
    if json_file:
        write_readings(json_file, readings(name, cells, peers))


def _converted(file: Path, folder: Path) -> str:
    out = folder / f"{file.stem}-bf16"
    convert(ConversionOptions(file, out, "BF16", 1 << 40, force=False), lambda done, of: None)
    return str(out)


if __name__ == "__main__":
    typer.run(main)
