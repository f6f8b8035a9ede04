"""What grammars cost a decode step: batches with and without one in turn, on the same ranks, and the matchers alone.

    python -m bench.grammar /tmp/llama-100m --batches 1,16,64

`plain` and `constrained` are steps of the whole engine, in wall time; on a busy machine the lower quartile says more
than the median. `matchers` is what rank 0 adds to a step, in CPU time of its thread: masks, their application, the
tokens consumed. The grammar is a JSON Schema of long arrays of objects.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from llguidance import LLMatcher
from rich.console import Console
from rich.table import Table
from ryzanstein.v1.worker_pb2 import Sampling

from bench.engine import MeasuredEngine, Workload, make_requests
from bench.reading import Reading, lower, write_readings
from services.worker.model.loading.vocabulary import read_vocabulary
from services.worker.native.model_files import read_model_files
from services.worker.process.rank_group import RankGroup, RankGroupConfig
from services.worker.sampling.grammar import Matchers

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["person", "place", "thing"]},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["name", "kind", "score", "tags"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class Cost:
    """One batch size, microseconds of a decode step: lower quartile and median of all rounds."""

    batch: int
    plain_us: float
    plain_median_us: float
    constrained_us: float
    constrained_median_us: float
    matchers_us: float

    @property
    def share(self) -> float:
        """Of the matchers in a plain step."""
        return self.matchers_us / self.plain_us


def sampling(grammar: str, seed: int = 0) -> Sampling:
    """Noise, so that texts differ."""
    return Sampling(temperature=1.0, grammar=grammar, ignore_eos=True, seed=seed)


async def measure_steps(
    config: RankGroupConfig, batches: list[int], rounds: int
) -> dict[tuple[int, bool], list[float]]:
    """Durations of all decode steps by batch size and whether there was a grammar, in turn, on one group."""
    group, grammar = RankGroup(config), LLMatcher.grammar_from_json_schema(SCHEMA)
    started = await group.start()
    engine, durations = MeasuredEngine(group, started), dict[tuple[int, bool], list[float]]()
    try:
        for turn in range(rounds + 1):  # the first one is to warm up: kernels, the vocabulary, the grammar
            for batch in batches:
                for constrained in (True, False) if turn % 2 else (False, True):
                    text = grammar if constrained else ""
                    workload = Workload(PROMPT_TOKENS, OUTPUT_TOKENS, sampling(text))
                    requests = make_requests(batch, workload, started.model.vocab_size, turn)
                    for index, request in enumerate(requests):
                        request.sampling = sampling(text, turn * 1_000 + index)
                    steps = [step for step in await engine.measure(requests) if len(step.plan.chunks) == batch]
                    ends = [step.returned * 1e6 for step in steps if step.plan.n_tokens == batch]
                    if turn:
                        durations.setdefault((batch, constrained), []).extend(np.diff(ends).tolist())
    finally:
        await group.stop()
    return durations


def measure_matchers(config: RankGroupConfig, vocab_size: int, batch: int) -> float:
    """Median CPU time of what a rank does for `batch` requests in a step, in microseconds."""
    vocabulary = partial(read_vocabulary, Path(config.model_path), vocab_size, config.eos_token_ids)
    matchers = Matchers(vocabulary, 0, vocab_size, config.eos_token_ids)
    for slot in range(batch):
        matchers.admit(slot, sampling(LLMatcher.grammar_from_json_schema(SCHEMA)), np.empty(0, np.int32))
    rows, early = np.arange(batch), np.zeros(batch, np.bool_)
    generator, costs = torch.Generator().manual_seed(1), []
    for _ in range(OUTPUT_TOKENS):
        logits = torch.randn(batch, vocab_size, generator=generator)
        began = time.thread_time_ns()
        matchers.mask(logits, rows, rows, early)
        masked = time.thread_time_ns()
        tokens = logits.argmax(dim=-1).tolist()
        drawn = time.thread_time_ns()
        failures = matchers.advance(rows.tolist(), tokens)
        costs.append((masked - began + time.thread_time_ns() - drawn) / 1e3)
        assert not failures, failures
    return float(np.median(costs[2:]))


def readings(costs: list[Cost], where: str) -> list[Reading]:
    """Everything that was measured, as data."""
    names = [name for name in asdict(costs[0]) if name != "batch"]
    return [lower(f"{where}, {c.batch} at once/{name}", getattr(c, name), "us") for c in costs for name in names]


def main(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    ranks: int = 1,
    dtype: str = "bfloat16",
    batches: str = "1,16,64",
    rounds: int = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Measure what grammars cost on MODEL."""
    sizes, files = [int(size) for size in batches.split(",")], read_model_files(model)
    config = RankGroupConfig(
        model_path=str(model),
        ranks=ranks,
        dtype=dtype,
        kv_tokens=max(sizes) * (PROMPT_TOKENS + OUTPUT_TOKENS + 32),
        max_running=max(sizes),
        max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS + 1,
        eos_token_ids=files.eos_token_ids,
    )
    durations = asyncio.run(measure_steps(config, sizes, rounds))
    torch.set_num_threads(1)
    costs = []
    for batch in sizes:
        plain, bound = (np.percentile(durations[batch, with_grammar], (25, 50)) for with_grammar in (False, True))
        costs.append(Cost(batch, *plain, *bound, measure_matchers(config, files.spec.vocab_size, batch)))
    if json_file:
        write_readings(json_file, readings(costs, f"grammar/{model.name}, {ranks} ranks, {dtype}"))
    table = Table(title=f"{model.name}, {ranks} ranks, {dtype}: a decode step, µs")
    for column in (*asdict(costs[0]), "share"):
        table.add_column(column, justify="right")
    for cost in costs:
        table.add_row(*(f"{value:,.0f}" for value in asdict(cost).values()), f"{cost.share:.1%}")
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
