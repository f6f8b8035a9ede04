"""Many long prompts at once on a GPU: scheduler and timer against a clock with the step times of one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import mean, median

from ryzanstein.v1.worker_pb2 import Sampling

from services.common.blockhash import chain_root
from services.worker.engine.kv_events import KvEventLog
from services.worker.native.startup import DEFAULT_BATCHED_TOKENS
from services.worker.native.step_cost import LEAST_PROMPT_S, StepTimer
from services.worker.protocol.plan import SlotResult, StepPlan, StepResult
from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.scheduling.step_builder import StepLoad

CLIENTS, PROMPT, ANSWER = 64, 1024, 64


def seconds(load: StepLoad) -> float:
    """A step of 1.24 B parameters on one H100: decodes are replayed; prompts are not, and cost 10 ms in any number."""
    if load.n_prefill_rows:
        return 10e-3 + 6e-6 * load.n_rows + 12e-9 * load.n_keys
    return 2.4e-3 + 12e-6 * load.n_rows


@dataclass
class Gpu:
    """Clients that each send `rounds` prompts, one after the other, to a worker that keeps two plans in flight."""

    timer: StepTimer
    rounds: int = 2
    now: float = 0.0
    sent: dict[Request, float] = field(default_factory=dict)
    waited: dict[Request, float] = field(default_factory=dict)  # for the first token
    prompt_rows: list[int] = field(default_factory=list)  # rows in each step with prompts

    def run(self) -> None:
        sizes = SchedulerConfig(
            n_blocks=CLIENTS * (PROMPT + ANSWER + 16) // 16,
            block_tokens=16,
            max_model_len=4096,
            max_batched_tokens=DEFAULT_BATCHED_TOKENS["cuda"],
        )
        scheduler = Scheduler(sizes, KvEventLog(), clock=lambda: self.now)
        in_flight: deque[tuple[float, StepPlan]] = deque()
        free = last = 0.0
        for _ in range(CLIENTS):
            self.send(scheduler)
        while True:
            while (plan := scheduler.plan()) is not None:
                load = scheduler.in_flight[-1].load
                free = max(free, self.now) + seconds(load)
                in_flight.append((free, plan))
                self.prompt_rows += [load.n_prefill_rows] if load.n_prefill_rows else []
            if not in_flight:
                return
            self.now, plan = in_flight.popleft()
            step = scheduler.in_flight[0]
            self.timer.returned(step.load, self.now - max(step.planned_at, last))
            last = self.now
            slots = tuple(SlotResult(chunk.slot, (1,)) for chunk in plan.chunks if chunk.draws)
            for request, output in scheduler.apply(StepResult(plan.step, slots)):
                self.waited.setdefault(request, self.now - self.sent[request])
                if output.finish is not None and len(self.sent) < self.rounds * CLIENTS:
                    self.send(scheduler)
            allowed = self.timer.prefill_budget(0.2, scheduler.n_running)
            scheduler.prefill_budget = allowed or scheduler.prefill_budget

    def send(self, scheduler: Scheduler) -> None:
        number = len(self.sent)
        request = Request(
            token_ids=[number * PROMPT + place for place in range(PROMPT)],
            n_prompt=PROMPT,
            sampling=Sampling(),
            max_tokens=ANSWER,
            chain_root=chain_root("pace"),
        )
        self.sent[request] = self.now
        scheduler.submit(request)


def test_many_long_prompts_are_not_interleaved_in_small_chunks() -> None:
    gpu = Gpu(StepTimer(LEAST_PROMPT_S["cuda"]))
    gpu.run()
    assert len(gpu.waited) == 2 * CLIENTS
    assert median(gpu.waited.values()) < 1.0
    assert max(gpu.waited.values()) < 1.5
    assert mean(gpu.prompt_rows) > 1024, "10 ms a step are paid by many rows"


def test_a_cpu_keeps_its_pace() -> None:
    assert LEAST_PROMPT_S["cpu"] == 0.0
