"""Decode steps of one rank under torch's profiler, in this process: what runs on the GPU, and for how long.

    python -m bench.gpu_trace /tmp/llama-1b --batch 16 --keys 2000 --trace trace.json

prints the kernels by time and the share of the steps in which none runs; the trace opens in Perfetto.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from ryzanstein.v1.worker_pb2 import Sampling
from torch.profiler import ProfilerActivity, profile

from services.compute.backends.collectives import LoneRank, SingleRank
from services.compute.backends.opening import open_backend
from services.compute.model.build import load_model
from services.compute.model.registry import describe
from services.compute.ranks.line import RankLine
from services.compute.ranks.segment import Segment
from services.worker.protocol.plan import Admission, Chunk, StepPlan
from services.worker.rank.runner import Runner


def main(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    batch: int = 16,
    keys: Annotated[int, typer.Option(help="Keys of each sequence.")] = 128,
    steps: int = 20,
    device: str = "cuda",
    dtype: str = "bfloat16",
    trace: Annotated[Path | None, typer.Option(help="Write the trace there.")] = None,
) -> None:
    """Trace STEPS decodes of BATCH sequences."""
    where, block = torch.device(device), 16
    backend = open_backend(getattr(torch, dtype), where)
    decoder = load_model(describe(model), SingleRank(), backend)
    longest, warm_up = keys + 2 * steps, 5
    each = -(-longest // block)
    cache = decoder.make_cache(batch * each, block)
    runner = Runner(
        decoder,
        cache,
        LoneRank(RankLine(Segment.create("trace", 4096), 0, 0)),
        n_blocks=batch * each,
        block_tokens=block,
        max_running=batch,
        max_model_len=longest,
        device=where,
        transfers=backend.transfers,
        overlaps=where.type == "cuda",  # as a rank does: draws are a part of the graph
    )
    slots = range(batch)
    admissions = tuple(Admission(slot, Sampling(), (7,) * keys, n_prompt=keys) for slot in slots)
    prompts = tuple(Chunk(s, 0, keys, 1, tuple(range(1 + s * each, 1 + (s + 1) * each))) for s in slots)
    runner.execute(StepPlan(0, admissions=admissions, chunks=prompts))
    number = 0

    def decode(count: int) -> float:
        nonlocal number
        began = time.perf_counter()
        for _ in range(count):
            runner.execute(StepPlan(number + 1, chunks=tuple(Chunk(slot, keys + number, 1, 1) for slot in slots)))
            number += 1
        return (time.perf_counter() - began) / count * 1e3

    decode(warm_up)
    step_ms = decode(steps // 2)
    on_gpu = [ProfilerActivity.CUDA] if where.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as profiled:
        decode(steps // 2)
    by_time = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    averages = profiled.key_averages()
    total_ms = sum(getattr(event, by_time) for event in averages) / 1e3 / (steps // 2)
    print(averages.table(sort_by=by_time, row_limit=25))
    print(f"{batch} rows of {keys} keys: a step {step_ms:.2f} ms, kernels {total_ms:.2f} ms")
    if trace is not None:
        profiled.export_chrome_trace(str(trace))


if __name__ == "__main__":
    typer.run(main)
