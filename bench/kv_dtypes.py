"""Compares formats of the KV cache by the speed of decodes at several context lengths, interleaved.

    python -m bench.kv_dtypes /tmp/llama-100m --contexts 1000,8000 --batches 1,16

An engine per format runs at the same time; rounds alternate between them, so that a busy machine slows all alike. The
prompts of a context are computed once per engine and then found in its prefix cache.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from ryzanstein.v1.worker_pb2 import Sampling

from bench.engine import MeasuredEngine, Workload, make_requests, summarise
from bench.reading import higher, write_readings
from bench.stats import median
from services.compute.ranks.config import RankGroupConfig
from services.worker.process.rank_group import RankGroup

_FORMATS = {"bf16": "", "int8": "int8", "fp8": "fp8"}  # values of --kv-dtype; the engines compute in bfloat16


@dataclass(frozen=True)
class Case:
    """Requests that decode at once, each after a prompt of `context` tokens."""

    context: int
    batch: int


Found = dict[Case, dict[str, list[float]]]  # tokens/s of each round, by KV dtype


async def measure(configs: dict[str, RankGroupConfig], cases: list[Case], output_tokens: int, rounds: int) -> Found:
    """Return the decode tokens/s of each round, by case and KV dtype."""
    found: Found = {case: {name: [] for name in configs} for case in cases}
    async with AsyncExitStack() as stack:
        engines = {}
        for name, config in configs.items():
            group = RankGroup(config)
            engines[name] = MeasuredEngine(group, await group.start())
            stack.push_async_callback(group.stop)
        vocab = 1_000  # vocabulary of the prompts
        for case in cases:
            workload = Workload(case.context, output_tokens, Sampling())
            for turn in range(rounds + 1):
                for name, engine in engines.items():
                    began = time.perf_counter()
                    steps = await engine.measure(make_requests(case.batch, workload, vocab, seed=case.context))
                    if turn:  # the first one computes the prompts
                        summary = summarise(case.batch, case.context, steps, began)
                        found[case][name].append(summary.decode_tokens_per_s)
    return found


def show(found: Found, title: str) -> Table:
    """A table of medians; ratios are those to the first KV dtype."""
    table = Table(title=title)
    names = list(next(iter(found.values())))
    columns = [
        "context",
        "at once",
        *(f"{name}, tokens/s" for name in names),
        *(f"{n} / {names[0]}" for n in names[1:]),
    ]
    for column in columns:
        table.add_column(column, justify="right")
    for case, rates in found.items():
        middle = [median(rates[name]) for name in names]
        ratios = [f"{rate / middle[0]:.2f}" for rate in middle[1:]]
        table.add_row(f"{case.context:,}", str(case.batch), *(f"{rate:,.1f}" for rate in middle), *ratios)
    return table


def main(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    kv_dtypes: Annotated[str, typer.Option(help="Of bf16, int8 and fp8, the first one to compare with.")] = "bf16,int8",
    contexts: str = "1000,8000",
    batches: str = "1,16",
    ranks: int = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    output_tokens: int = 32,
    rounds: int = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Compare KV dtypes on MODEL."""
    cases = [Case(int(context), int(batch)) for context in contexts.split(",") for batch in batches.split(",")]
    longest = max(case.context for case in cases) + output_tokens + 1
    configs = {
        name: RankGroupConfig(
            model_path=str(model),
            ranks=ranks,
            device=device,
            kv_tokens=max(case.batch * (case.context + output_tokens + 32) for case in cases),
            kv_format=_FORMATS[name],
            max_running=max(4, *(case.batch for case in cases)),
            max_model_len=longest,
        )
        for name in kv_dtypes.split(",")
    }
    found = asyncio.run(measure(configs, cases, output_tokens, rounds))
    where = f"{model.name}, {ranks} ranks" + ("" if device == "cpu" else f", {device}")
    if json_file:
        readings = [
            higher(f"kv/{where}, {case.context} tokens, {case.batch} at once/{name}", median(rates), "tokens/s")
            for case, by_name in found.items()
            for name, rates in by_name.items()
        ]
        write_readings(json_file, readings)
    Console(width=140).print(show(found, f"{where}: decodes by KV dtype, medians of {rounds} interleaved rounds"))


if __name__ == "__main__":
    typer.run(main)
