"""Measures the scheduler's time per step: plan and apply, without ranks.

python -m bench.scheduler --running 64
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Annotated

import typer
from ryzanstein.v1.worker_pb2 import Sampling

from bench.reading import lower, write_readings
from bench.stats import percentile
from services.worker.engine.kv_events import KvEventLog
from services.worker.protocol.plan import SlotResult, StepPlan, StepResult
from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler


def step_costs(running: int, steps: int) -> list[float]:
    """Microseconds of plan and apply for each step in which `running` requests decode."""
    sizes = SchedulerConfig(n_blocks=running * 160, block_tokens=16, max_model_len=4096, max_running=running)
    scheduler = Scheduler(sizes, KvEventLog())
    for index in range(running):
        sampling = Sampling(stop_token_ids=(2,))
        tenant = str(index % 4)
        scheduler.submit(Request([index] * 40, 40, sampling, max_tokens=2000, chain_root=b"r", tenant=tenant))
    plans: deque[StepPlan] = deque()
    costs = []
    for _ in range(steps):
        began = time.perf_counter()
        while (plan := scheduler.plan()) is not None:
            plans.append(plan)
        planned = time.perf_counter() - began
        plan = plans.popleft()
        result = StepResult(plan.step, tuple(SlotResult(chunk.slot, (50,)) for chunk in plan.chunks if chunk.draws))
        began = time.perf_counter()
        scheduler.apply(result)
        costs.append((planned + time.perf_counter() - began) * 1e6)
    return costs


def main(
    running: Annotated[int, typer.Option(min=1, max=2048)] = 64,
    steps: int = 300,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Print the median and the 99th percentile."""
    costs = step_costs(running, steps)
    print(f"{running} decodes: median {percentile(costs, 50):.0f} us, p99 {percentile(costs, 99):.0f} us a step")
    if json_file:
        name = f"scheduler/{running} decodes/step"
        write_readings(
            json_file,
            [lower(f"{name} p50", percentile(costs, 50), "us"), lower(f"{name} p99", percentile(costs, 99), "us")],
        )


if __name__ == "__main__":
    typer.run(main)
