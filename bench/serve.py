"""Sends a load to any OpenAI-compatible server and measures its speed.

    python -m bench.serve --url http://127.0.0.1:8000 --concurrency 16 --prompt-tokens 128 --output-tokens 128

Prompts are token ids, so that tokenizers take no time. Workloads: `random` (prompts share no prefix), `shared-prefix`
(all prompts start with the same tokens), either closed-loop (`--concurrency`) or with Poisson arrivals (`--rate`).
Streams are read to their end with raw asyncio sockets, so that the client is not the bottleneck.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

from bench.reading import Reading, higher, lower, write_readings
from bench.stats import percentile


class Workload(StrEnum):
    """Whether prompts share a prefix."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"


@dataclass(frozen=True)
class Load:
    """The requests that are sent to the server."""

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    workload: Workload = Workload.RANDOM
    shared_tokens: int = 0
    vocab: int = 4_096
    rate: float = 0.0  # requests per second, Poisson; 0: closed loop
    seed: int = 0


@dataclass
class Answer:
    """One finished request; times are seconds since the request was sent, at `began` by time.perf_counter."""

    began: float = 0.0
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # if the request has `return_token_ids`
    workers: list[str] = field(default_factory=list)  # if its `stream_options` have `include_workers`
    total: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Summary:
    """The results of a run."""

    requests: int
    errors: int
    first_error: str
    seconds: float
    output_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    largest_gap_over_median: float
    tpot_ms_p50: float


def make_prompts(load: Load) -> list[list[int]]:
    """The prompts of a load; the seed fixes them, so that all servers get the same."""
    rng = random.Random(load.seed)

    def draw(n: int) -> list[int]:
        return [rng.randrange(300, load.vocab) for _ in range(n)]

    shared = draw(load.shared_tokens) if load.workload is Workload.SHARED_PREFIX else []
    return [shared + draw(load.prompt_tokens) for _ in range(load.requests)]


async def complete(
    url: str,
    model: str,
    prompt: list[int],
    output_tokens: int,
    fields: dict | None = None,
    header: str = "",
    answer: Answer | None = None,
) -> Answer:
    """Stream one completion, and record the arrival time of every token.

    `fields` are added to the request's body, `header` (a whole line) to its head. `answer` is filled while tokens come.
    """
    answer, parts = answer or Answer(), urlsplit(url)
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            **(fields or {}),
        }
    ).encode()
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n{header}\r\n"
    ).encode()
    started = answer.began = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=2**20)
        writer.write(head + body)
        status = await reader.readline()
        if b" 200 " not in status:
            answer.error = (status + await reader.read()).decode(errors="replace")[-300:]
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                at, event = time.perf_counter() - started, json.loads(line[6:])
                answer.token_times += [at] * _tokens_of(event)
                for choice in event.get("choices", ()):
                    answer.token_ids += choice.get("token_ids") or ()
                    answer.workers += [choice["worker"]["id"]] if "worker" in choice else []
                if "error" in event:
                    answer.error = line.decode(errors="replace")
        writer.close()
    except OSError as error:
        answer.error = str(error)
    answer.total = time.perf_counter() - started
    return answer


def _tokens_of(event: dict) -> int:
    """Tokens in one event: as many as `token_ids` has, else one for an event with a choice."""
    if not event.get("choices"):
        return 0
    choice = event["choices"][0]
    if (ids := choice.get("token_ids")) is not None:
        return len(ids)
    return int(choice.get("finish_reason") is None or bool(choice["text"]))


async def drive(url: str, model: str, load: Load) -> Summary:
    """Send the load and summarise the answers; failed requests are counted, not raised."""
    prompts = make_prompts(load)
    gc.collect()
    gc.freeze()  # otherwise a garbage collection here would count as a pause of the server
    limit = asyncio.Semaphore(load.concurrency)
    rng = random.Random(load.seed + 1)

    async def one(prompt: list[int]) -> Answer:
        async with limit:
            return await complete(url, model, prompt, load.output_tokens)

    started = time.perf_counter()
    tasks = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(one(prompt)))
        if load.rate:
            await asyncio.sleep(rng.expovariate(load.rate))
    answers = await asyncio.gather(*tasks)
    return summarise(answers, time.perf_counter() - started, load.output_tokens)


def summarise(answers: list[Answer], seconds: float, output_tokens: int) -> Summary:
    """Latencies and throughput of the successful requests."""
    good = [answer for answer in answers if not answer.error and answer.token_times]
    errors = [answer.error or "no token" for answer in answers if answer not in good]
    gaps = [
        (later - earlier) * 1e3
        for answer in good
        for earlier, later in zip(answer.token_times, answer.token_times[1:], strict=False)
    ]
    ttft = [answer.token_times[0] * 1e3 for answer in good]
    tpot = [(a.token_times[-1] - a.token_times[0]) * 1e3 / max(output_tokens - 1, 1) for a in good]
    median_gap = percentile(gaps, 50)
    return Summary(
        requests=len(answers),
        errors=len(errors),
        first_error=errors[0] if errors else "",
        seconds=seconds,
        output_tokens_per_s=len(good) * output_tokens / seconds,
        ttft_ms_p50=percentile(ttft, 50),
        ttft_ms_p99=percentile(ttft, 99),
        itl_ms_p50=median_gap,
        itl_ms_p99=percentile(gaps, 99),
        largest_gap_over_median=max(gaps, default=0.0) / median_gap if median_gap else 0.0,
        tpot_ms_p50=percentile(tpot, 50),
    )


def readings(summary: Summary, load: Load) -> list[Reading]:
    """The summary as readings."""
    arrivals = f"{load.rate:g}/s" if load.rate else f"{load.concurrency} at once"
    shared = f"{load.shared_tokens}+" if load.workload is Workload.SHARED_PREFIX else ""
    name = f"serve/{arrivals}, {shared}{load.prompt_tokens}+{load.output_tokens} tokens"
    return [
        higher(f"{name}/output", summary.output_tokens_per_s, "tokens/s"),
        lower(f"{name}/first token p50", summary.ttft_ms_p50, "ms"),
        lower(f"{name}/first token p99", summary.ttft_ms_p99, "ms"),
        lower(f"{name}/between tokens p50", summary.itl_ms_p50, "ms"),
        lower(f"{name}/between tokens p99", summary.itl_ms_p99, "ms"),
        lower(f"{name}/time per output token p50", summary.tpot_ms_p50, "ms"),
    ]


async def first_model(url: str) -> str:
    """The id of the first model the server lists."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(f"GET /v1/models HTTP/1.0\r\nHost: {parts.hostname}\r\n\r\n".encode())
    raw = await reader.read()
    writer.close()
    return str(json.loads(raw.partition(b"\r\n\r\n")[2])["data"][0]["id"])


def main(
    url: Annotated[str, typer.Option(help="Base URL of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Default: the first one served.")] = "",
    requests: int = 32,
    concurrency: int = 16,
    prompt_tokens: int = 128,
    output_tokens: int = 128,
    workload: Workload = Workload.RANDOM,
    shared_tokens: int = 1_024,
    vocab: int = 4_096,
    rate: float = 0.0,
    seed: int = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Measure one server under one load."""
    load = Load(requests, concurrency, prompt_tokens, output_tokens, workload, shared_tokens, vocab, rate, seed)

    async def run() -> Summary:
        return await drive(url, model or await first_model(url), load)

    summary = asyncio.run(run())
    if summary.errors and json_file:
        raise SystemExit(f"no readings: {summary.errors} of {requests} requests failed: {summary.first_error}")
    if json_file:
        write_readings(json_file, readings(summary, load))
    table = Table(title=f"{url}: {requests} requests, {concurrency} at once, {workload}")
    for name, value in asdict(summary).items():
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
