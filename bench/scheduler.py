"""Measures the scheduler's time per step: plan and apply, without ranks.

python -m bench.scheduler --running 64
python -m bench.scheduler --running 4 --drafting
"""

from __future__ import annotations

import random
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
from services.worker.scheduling.speculation import DraftCost


def step_costs(running: int, steps: int, *, drafting: bool = False) -> list[float]:
    """Microseconds of plan and apply for each step in which `running` requests decode.

    `drafting`: drafters search, but a proposal costs more than it gains, as in prose.
    """
    sizes = SchedulerConfig(
        n_blocks=running * 160, block_tokens=16, max_model_len=4096, max_running=running, speculation=drafting
    )
    scheduler, words = Scheduler(sizes, KvEventLog()), random.Random(0)
    scheduler.speculator.most_running = running
    if drafting:
        scheduler.speculator.cost = DraftCost(1.0, 0.99 / running)
    for index in range(running):
        sampling = Sampling(stop_token_ids=(2,))
        tenant = str(index % 4)
        prompt = [_word(words) for _ in range(40)]
        scheduler.submit(Request(prompt, 40, sampling, max_tokens=2000, chain_root=b"r", tenant=tenant))
    plans: deque[StepPlan] = deque()
    costs = []
    for _ in range(steps):
        began = time.perf_counter()
        while (plan := scheduler.plan()) is not None:
            plans.append(plan)
        planned = time.perf_counter() - began
        plan = plans.popleft()
        drawn = tuple(SlotResult(chunk.slot, (_word(words),)) for chunk in plan.chunks if chunk.draws)
        result = StepResult(plan.step, drawn)
        began = time.perf_counter()
        scheduler.apply(result)
        costs.append((planned + time.perf_counter() - began) * 1e6)
    return costs


def _word(words: random.Random) -> int:
    """A token, some of them far more frequent than others, as in texts."""
    return 10 + int(7 * words.paretovariate(1.0)) % 4000


def main(
    running: Annotated[int, typer.Option(min=1, max=2048)] = 64,
    steps: int = 300,
    drafting: Annotated[bool, typer.Option("--drafting", help="With the search for drafts.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Print the median and the 99th percentile."""
    costs = step_costs(running, steps, drafting=drafting)
    print(f"{running} decodes: median {percentile(costs, 50):.0f} us, p99 {percentile(costs, 99):.0f} us a step")
    if json_file:
        name = f"scheduler/{running} decodes{' drafting' if drafting else ''}/step"
        write_readings(
            json_file,
            [lower(f"{name} p50", percentile(costs, 50), "us"), lower(f"{name} p99", percentile(costs, 99), "us")],
        )


if __name__ == "__main__":
    typer.run(main)
