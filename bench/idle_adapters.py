"""What slots for adapters cost steps in which no row has one.

    python -m bench.idle_adapters /tmp/llama-0.5b --rows 16 --steps 200

One process holds the model twice, with a loaded adapter in every slot and without slots. Both compute the same decode
steps, through a rank's runner, in turns: what disturbs the machine disturbs both. Printed are the smallest and the
median time of a step, the median of the quotients of neighbouring steps, and how many functions Python calls in a step.
`--slots 0` compares the model with itself: the two copies lie elsewhere in memory, which alone makes a difference.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from ryzanstein.v1.worker_pb2 import Sampling

from bench.random_adapters import write_adapter
from services.compute.backends.cpu.collectives import ReplayedLoneRank
from services.compute.backends.opening import open_backend
from services.compute.ranks.config import RankGroupConfig
from services.compute.ranks.line import RankLine
from services.compute.ranks.segment import Segment
from services.worker.protocol.adapter_codec import AdapterOrder
from services.worker.protocol.plan import Admission, Chunk, StepPlan
from services.worker.rank.loading import load
from services.worker.rank.runner import Runner

_PROMPT = 31  # tokens; a decode step begins with the last token of a block
_BLOCK = 16


def open_runner(model: Path, rows: int, steps: int, slots: int, rank: int) -> Runner[Any]:
    """Load the model, with an adapter in each of the `slots`, and compute the prompts of `rows` sequences."""
    length = _PROMPT + steps + 1
    blocks = -(-length // _BLOCK)
    config = RankGroupConfig(
        str(model), n_blocks=rows * blocks, max_running=rows, max_model_len=length, adapter_slots=slots,
        adapter_max_rank=rank,
    )  # fmt: skip
    comm = ReplayedLoneRank(RankLine(Segment.create("bench", 4096), 0, 0))
    loaded = load(config, comm, open_backend(torch.bfloat16, torch.device("cpu")))
    with TemporaryDirectory() as folder:
        for slot in range(slots):
            write_adapter(model, path := Path(folder) / str(slot), rank, slot)
            loaded.load_adapter(AdapterOrder(slot, str(path)))
    cache = loaded.make_cache(rows * blocks)
    runner = Runner(
        loaded.decoder, cache, comm, n_blocks=rows * blocks, block_tokens=_BLOCK, max_running=rows,
        max_model_len=length, device=torch.device("cpu"),
    )  # fmt: skip
    greedy, tokens = Sampling(temperature=0.0), tuple(range(5, 5 + _PROMPT))
    for row in range(rows):
        admission = Admission(row, greedy, tokens, n_prompt=_PROMPT)
        table = tuple(range(1 + row * blocks, 1 + (row + 1) * blocks))
        runner.execute(StepPlan(row, admissions=(admission,), chunks=(Chunk(row, 0, _PROMPT, 1, table),)))
    return runner


def decode(runner: Runner[Any], rows: int) -> Callable[[int], float]:
    """Return what computes the decode step after so many others; it returns the seconds."""

    def step(number: int) -> float:
        plan = StepPlan(rows + number, chunks=tuple(Chunk(row, _PROMPT + number, 1, 1) for row in range(rows)))
        began = time.perf_counter()
        runner.execute(plan)
        return time.perf_counter() - began

    return step


def n_calls(step: Callable[[int], float], number: int) -> int:
    """Return how many functions Python calls in a step, its own and C's."""
    events = list[str]()
    sys.setprofile(lambda _, event, __: events.append(event))
    try:
        step(number)
    finally:
        sys.setprofile(None)
    return events.count("call") + events.count("c_call")


def main(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder with the names of transformers' Llama.")],
    rows: int = 16,
    steps: int = 200,
    slots: int = 8,
    rank: int = 16,
    threads: int = 0,
) -> None:
    """Measure on MODEL."""
    if threads:
        torch.set_num_threads(threads)
    pair = [decode(open_runner(model, rows, steps, of, rank), rows) for of in (0, slots)]
    times: list[list[float]] = [[], []]
    for number in range(steps - 1):
        for one in (0, 1) if number % 2 else (1, 0):
            times[one].append(pair[one](number))
    without, with_slots = times
    quotients = [later / earlier for earlier, later in zip(without, with_slots, strict=True)]
    for name, found in (("without slots", without), (f"{slots} slots, none active", with_slots)):
        print(f"{name}: smallest {min(found) * 1e3:.3f} ms, median {median(found) * 1e3:.3f} ms")
    calls = [n_calls(step, steps - 1) for step in pair]
    print(f"calls: {calls[0]:,} without slots, {calls[1]:,} with")
    print(f"smallest over smallest {min(with_slots) / min(without):.4f}, median quotient {median(quotients):.4f}")


if __name__ == "__main__":
    typer.run(main)
