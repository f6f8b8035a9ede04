"""Measures a worker's engine without gRPC and gateway: scheduler and ranks, driven offline.

    python -m bench.engine /tmp/llama-100m --ranks 2 --batches 1,4,16,64
    python -m bench.engine /tmp/llama-0.5b --batches 16 --adapters 0,1,8
    python -m bench.engine /tmp/llama-0.5b --batches 1,2,4,8,16,32,64 --curve curve.json

With `--adapters`, each batch size is measured without slots for adapters, and with as many adapters as said, which the
requests share evenly; all these are interleaved round by round, on ranks that run side by side.

With `--curve`, it records instead how long steps of a worker that serves take, for simulated workers
(docs/simulate.md).

For each batch size: prefill tokens/s, decode tokens/s, and the parts of a decode step. `plan` is the scheduler's time
in the server process; `forward`, `communication`, `sample` and `wait` are rank 0's times; the rest of a step is the
hand-off between the processes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from ryzanstein.v1.worker_pb2 import Sampling

from bench.curve import record
from bench.random_adapters import write_adapter
from bench.reading import Reading, higher, lower, write_readings
from bench.stats import median
from bench.worker_cores import WorkerCores
from services.common.heap import freeze_started
from services.compute.model.loading.folder import ModelFolder
from services.compute.ranks.config import RankGroupConfig
from services.worker.engine.output import Output
from services.worker.native.offline import OfflineEngine
from services.worker.native.startup import read_model
from services.worker.process.rank_group import GroupStarted, RankGroup
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.protocol.plan import StepPlan, StepResult
from services.worker.scheduling.request import Request


@dataclass(frozen=True)
class Measured:
    """The result for one batch size. Times of a decode step are medians in microseconds."""

    batch: int
    adapters: str  # how many the requests use; "off": the ranks have no slots for any
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    step_us: float
    plan_us: float
    forward_us: float
    communication_us: float
    sample_us: float
    wait_us: float
    largest_step_over_median: float


@dataclass
class _Step:
    plan: StepPlan
    cost_us: float = 0.0
    result: StepResult | None = None
    returned: float = 0.0


class MeasuredEngine(OfflineEngine):
    """An engine that records the times of every step."""

    def __init__(self, group: RankGroup, started: GroupStarted, files: ModelFolder) -> None:
        super().__init__(group, started, files)
        self.vocab_size = started.model.vocab_size
        freeze_started()  # as a server does: a collection of all that is imported would be a step of 0.1 s
        self._steps: dict[int, _Step] = {}

    def plan(self) -> StepPlan | None:
        """Plan a step, and record the time."""
        began = time.perf_counter()
        plan = super().plan()
        if plan is not None:
            self._steps[plan.step] = _Step(plan, (time.perf_counter() - began) * 1e6)
        return plan

    def apply(self, result: StepResult) -> list[tuple[Request, Output]]:
        """Apply a result, and record the time."""
        began = time.perf_counter()
        outputs = super().apply(result)
        step = self._steps[result.step]
        step.result, step.returned = result, began
        step.cost_us += (time.perf_counter() - began) * 1e6
        return outputs

    async def measure(self, requests: list[Request]) -> list[_Step]:
        """Run the requests to their end; return their steps in order."""
        self._steps.clear()
        await self.run(requests)
        return [self._steps[number] for number in sorted(self._steps)]


@dataclass(frozen=True, slots=True)
class Workload:
    """The size and sampling of all requests of a run."""

    prompt_tokens: int
    output_tokens: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters of a run: `counts` are how many requests use at a time; () measures ranks without slots only."""

    counts: tuple[int, ...] = ()
    rank: int = 16

    @property
    def most(self) -> int:
        """How many slots the ranks need."""
        return max(self.counts, default=0)


def make_requests(batch: int, workload: Workload, vocab: int, seed: int, adapters: int = 0) -> list[Request]:
    """Requests with random prompts that share no prefix; they take the first `adapters` slots in turn."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab) for _ in range(workload.prompt_tokens)] for _ in range(batch)]
    requests = [Request(p, len(p), workload.sampling, max_tokens=workload.output_tokens) for p in prompts]
    for index, request in enumerate(requests):
        request.adapter = index % adapters if adapters else -1
    return requests


def summarise(batch: int, prompt_tokens: int, steps: list[_Step], started: float, adapters: str = "off") -> Measured:
    """Split a run into prefill (steps with a chunk of several rows) and decode (all others)."""
    last_prefill = max((i for i, s in enumerate(steps) if any(c.n_tokens > 1 for c in s.plan.chunks)), default=0)
    decode = [step for step in steps[last_prefill + 2 :] if len(step.plan.chunks) == batch]
    durations = [
        (later.returned - earlier.returned) * 1e6
        for earlier, later in zip(steps[last_prefill + 1 :], steps[last_prefill + 2 :], strict=False)
        if len(later.plan.chunks) == batch
    ]
    times = [step.result.times for step in decode if step.result is not None]
    step_us = median(durations)
    return Measured(
        batch=batch,
        adapters=adapters,
        prefill_tokens_per_s=batch * prompt_tokens / (steps[last_prefill].returned - started),
        decode_tokens_per_s=batch * 1e6 / step_us if step_us else 0.0,
        step_us=step_us,
        plan_us=median([step.cost_us for step in decode]),
        forward_us=median([t.forward for t in times]),
        communication_us=median([t.communication for t in times]),
        sample_us=median([t.sample for t in times]),
        wait_us=median([t.wait for t in times]),
        largest_step_over_median=max(durations, default=0.0) / step_us if step_us else 0.0,
    )


@asynccontextmanager
async def open_engine(config: RankGroupConfig, workload: Workload) -> AsyncGenerator[MeasuredEngine, None]:
    """Start ranks, with random adapters in all their slots, and warm them up."""
    group = RankGroup(config)
    started = await group.start()
    try:
        with TemporaryDirectory() as folder:
            for slot in range(config.adapter_slots):
                write_adapter(Path(config.model_path), path := Path(folder) / str(slot), config.adapter_max_rank, slot)
                if error := await group.load_adapter(AdapterOrder(slot, str(path))):
                    raise SystemExit(error)
        engine = MeasuredEngine(group, started, await asyncio.to_thread(read_model, Path(config.model_path)))
        await engine.measure(
            make_requests(4, replace(workload, output_tokens=8), engine.vocab_size, 1, config.adapter_slots)
        )
        yield engine
    finally:
        await group.stop()


async def measure(
    config: RankGroupConfig, batches: list[int], workload: Workload, rounds: int, adapters: Adapters
) -> list[Measured]:
    """Measure each batch size in rounds that are interleaved over the numbers of adapters; return the median rounds."""
    async with AsyncExitStack() as running:
        plain = await running.enter_async_context(open_engine(config, workload))
        runs = [("off", 0, plain)]
        if adapters.most:
            slots = replace(config, adapter_slots=adapters.most, adapter_max_rank=adapters.rank)
            adapted = await running.enter_async_context(open_engine(slots, workload))
            runs += [(str(count), count, adapted) for count in adapters.counts]
        measured = defaultdict[tuple[int, str], list[Measured]](list)
        for batch, turn in itertools.product(batches, range(rounds)):
            for place, (name, count, engine) in enumerate(runs, 1):
                seed = 1_000 * place + turn  # engines keep prefixes, so no two runs have the same prompts
                requests = make_requests(batch, workload, engine.vocab_size, seed, count)
                began = time.perf_counter()
                steps = await engine.measure(requests)
                measured[batch, name].append(summarise(batch, workload.prompt_tokens, steps, began, name))
    return [sorted(runs, key=lambda run: run.decode_tokens_per_s)[len(runs) // 2] for runs in measured.values()]


def readings(measured: list[Measured], where: str) -> list[Reading]:
    """The results as readings."""
    listed = []
    for m in measured:
        name = f"{where}, {m.batch} at once" + ("" if m.adapters == "off" else f", {m.adapters} adapters")
        parts = ("step", "plan", "forward", "communication", "sample")
        listed += [higher(f"{name}/{at}", getattr(m, f"{at}_tokens_per_s"), "tokens/s") for at in ("prefill", "decode")]
        listed += [lower(f"{name}/{part}", getattr(m, f"{part}_us"), "us") for part in parts]
        listed.append(lower(f"{name}/largest step over median", m.largest_step_over_median, "x"))
    return listed


def main(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    ranks: int = 1,
    dtype: str = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    quantization: Annotated[
        Literal["none", "int8", "int4"], typer.Option(help="Round weights that are stored unquantized.")
    ] = "none",
    kv_format: Annotated[
        Literal["", "int8", "fp8"], typer.Option(help="Codes of 8 bits in the KV cache; fp8 for GPUs.")
    ] = "",
    gpu_kernels: Annotated[
        Literal["auto", "torch"], typer.Option(help="On GPUs our kernels in Triton, or only torch's.")
    ] = "auto",
    gpu_graphs: Annotated[bool, typer.Option(help="On GPUs replay decodes.")] = True,
    overlap: Annotated[
        Literal["auto", "on", "off"], typer.Option(help="Launch a step before the tokens of the one before are read.")
    ] = "auto",
    batches: str = "1,4,16,64",
    prompt_tokens: int = 128,
    output_tokens: int = 64,
    rounds: int = 3,
    temperature: float = 0.0,
    top_p: float = 1.0,
    adapters: Annotated[str, typer.Option(help="Numbers of adapters in addition to none, such as 0,1,8.")] = "",
    adapter_rank: int = 16,
    curve: Annotated[Path | None, typer.Option(help="Record the times of steps there instead.")] = None,
    worker_cores: Annotated[int, typer.Option(help="With --curve, cores for the worker alone; 0: all, for all.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Measure the engine on MODEL."""
    sizes = [int(size) for size in batches.split(",")]
    config = RankGroupConfig(
        model_path=str(model),
        ranks=ranks,
        dtype=dtype,
        device=device,
        quantization=quantization,
        kv_format=kv_format,
        gpu_kernels=gpu_kernels,
        gpu_graphs=gpu_graphs,
        overlap=overlap,
        kv_tokens=max(sizes) * (prompt_tokens + output_tokens + 32),
        max_running=max(*sizes, 4),
        max_model_len=prompt_tokens + output_tokens + 1,
    )
    if curve is not None:
        cores = WorkerCores.divide(worker_cores)
        asyncio.run(record(config, sizes, model.name, rounds, cores)).write(curve)
        return
    workload = Workload(prompt_tokens, output_tokens, Sampling(temperature=temperature, top_p=top_p))
    counts = tuple(int(count) for count in adapters.split(",") if count)
    measured = asyncio.run(measure(config, sizes, workload, rounds, Adapters(counts, adapter_rank)))
    where = f"{model.name}, {ranks} ranks, {dtype}" + ("" if device == "cpu" else f", {device}")
    where += "" if quantization == "none" else f", weights in {quantization}"
    where += f", KV in {kv_format}" if kv_format else ""
    where += "" if overlap == "auto" else f", overlap {overlap}"
    where += "" if gpu_graphs else ", no graphs"
    where += "" if gpu_kernels == "auto" else f", kernels of {gpu_kernels}"
    if json_file:
        write_readings(json_file, readings(measured, f"engine/{where}"))
    table = Table(title=f"{where}: medians")
    for column in asdict(measured[0]):
        table.add_column(column, justify="right")
    for row in measured:
        table.add_row(*(f"{value:,.1f}" if isinstance(value, float) else str(value) for value in asdict(row).values()))
    Console(width=180).print(table)


if __name__ == "__main__":
    typer.run(main)
