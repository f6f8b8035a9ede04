"""Long prompts and their neighbours: scheduler and timer against a clock with the step times of a device."""

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


def test_a_prompt_of_32k_keeps_the_pace_of_its_neighbour_on_a_cpu() -> None:
    """Attention dominates: at the end a row costs ten times as much as at the beginning, and steps have fewer rows."""
    long, decode_s = 32_768, 10e-3
    sizes = SchedulerConfig(n_blocks=long // 16 + 400, block_tokens=16, max_model_len=long + 64, max_running=4)
    now, timer = 0.0, StepTimer(LEAST_PROMPT_S["cpu"])
    scheduler = Scheduler(sizes, KvEventLog(), clock=lambda: now)
    stream = Request([7] * 8, 8, Sampling(), max_tokens=6000)
    scheduler.submit(stream)
    prompt, pauses, rows = Request(list(range(long)), long, Sampling(), max_tokens=1), list[float](), list[int]()
    last = 0.0
    while prompt.n_generated == 0:
        if stream.n_generated == 50:
            scheduler.submit(prompt)
        plan = scheduler.plan()
        assert plan is not None
        load = scheduler.in_flight[0].load
        now += decode_s + 1e-4 * load.n_prefill_rows + 3e-8 * load.n_keys
        timer.returned(load, now - last)
        pauses.append(now - last)
        rows.append(load.n_prefill_rows)
        last = now
        slots = tuple(SlotResult(chunk.slot, (1,)) for chunk in plan.chunks if chunk.draws)
        scheduler.apply(StepResult(plan.step, slots))
        scheduler.prefill_budget = timer.prefill_budget(0.2, 1) or scheduler.prefill_budget
    steady = [pause for pause, n in zip(pauses, rows, strict=True) if n][3:]  # the cost is learnt in the first steps
    assert max(steady) < 5 * decode_s
    assert median(steady) < 3.5 * decode_s
    assert mean(rows[-100:]) < mean([n for n in rows if n][3:23]) / 3
