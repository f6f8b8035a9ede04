"""Drafts lose little time whatever they cost: the real scheduler and timer in virtual time, ranks with a real curve."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import mean

import pytest
from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.drafting.draft import Draft
from services.worker.drafting.drafts import Drafts
from services.worker.engine.kv_events import KvEventLog
from services.worker.native import draft_budget
from services.worker.native.draft_budget import DraftBudget
from services.worker.native.step_cost import StepTimer
from services.worker.protocol.plan import Chunk, SlotResult, StepPlan, StepResult
from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.scheduling.step_builder import StepLoad
from services.worker.simulated.curve import DEFAULT_CURVE, StepCurve

CURVE = StepCurve.read(DEFAULT_CURVE)
WAIT_S = 0.0015  # between a result and the start of a plan that waited for it
PROMPT, ANSWER = 32, 2_000
Accuracy = Callable[[int], float]  # probability that a proposal is right, by the number of tokens before the draft


def text(position: int) -> int:
    """The token at a position of all texts."""
    return 10 + position


@dataclass
class Oracle:
    """A drafter that is often right."""

    accuracy: Accuracy
    random: random.Random
    name: str = "oracle"

    def draft(self, token_ids: Sequence[int], most: int) -> Draft | None:
        first = len(token_ids)
        p = self.accuracy(first)
        tokens = [text(first + n) if self.random.random() < p else 0 for n in range(most)]
        return Draft(self.name, tokens, 64) if tokens else None


@dataclass
class DraftingWorker:
    """A worker with `n` requests of equal length."""

    n: int
    accuracy: Accuracy | None = None  # None: no speculation
    unseen_s: float = 0.0  # more seconds of a step with proposals, which do not depend on their number
    dear_steps: int = 1_000_000  # steps after which this ends
    now: float = 0.0
    steps: list[tuple[int, int]] = field(default_factory=list)  # proposals and accepted ones of each step

    def __post_init__(self) -> None:
        sizes = SchedulerConfig(
            n_blocks=self.n * (PROMPT + ANSWER + 64) // 16 + 256,
            block_tokens=16,
            max_model_len=PROMPT + ANSWER + 64,
            speculation=self.accuracy is not None,
        )
        self.timer, self.delays, guesses = StepTimer(), random.Random(0), random.Random(1)
        self.scheduler = Scheduler(sizes, KvEventLog(), clock=lambda: self.now)
        for _ in range(self.n):
            tokens = [text(position) for position in range(PROMPT)]
            request = Request(tokens, PROMPT, Sampling(), max_tokens=ANSWER, cacheable=False)
            self.scheduler.submit(request)
            if self.accuracy is not None:
                request.drafts = Drafts([Oracle(self.accuracy, guesses)])

    def run(self) -> float:
        """Serve all requests; returns the mean seconds of an answer, as `bench.speculation` does."""
        scheduler, plans, ends = self.scheduler, deque[StepPlan](), list[float]()
        while True:
            while (plan := scheduler.plan()) is not None:
                plans.append(plan)
            if not plans:
                return mean(ends)
            plan, step = plans.popleft(), scheduler.in_flight[0]
            seconds, wait_s = self.seconds(step.load), WAIT_S if step.waited else 0.0
            self.now += wait_s + seconds
            before = scheduler.counters.accepted_tokens.total()
            result = StepResult(plan.step, tuple(drawn(chunk) for chunk in plan.chunks if chunk.draws))
            ends += [self.now for _, output in scheduler.apply(result) if output.finish is not None]
            n_accepted = scheduler.counters.accepted_tokens.total() - before
            self.timer.returned(step.load, seconds, n_accepted, wait_s)
            self.steps.append((step.load.n_proposals, n_accepted))
            scheduler.speculator.cost = self.timer.draft_cost(scheduler.n_running)

    def seconds(self, load: StepLoad) -> float:
        """The time of a step: some take longer, as on machines that do other work as well."""
        seconds = CURVE.seconds(load.n_rows - load.n_prefill_rows, 0.0, load.n_prefill_rows, 0.0)
        seconds *= 1 + self.delays.expovariate(20)
        return seconds + self.unseen_s if load.n_proposals and len(self.steps) < self.dear_steps else seconds


def drawn(chunk: Chunk) -> SlotResult:
    """The record of a chunk: the proposals up to the first wrong one, and the token after them."""
    position = chunk.start + chunk.n_tokens - len(chunk.proposals)
    n = 0
    while n < len(chunk.proposals) and chunk.proposals[n] == text(position + n):
        n += 1
    return SlotResult(chunk.slot, tuple(text(position + index) for index in range(n + 1)))


def always(p: float) -> Accuracy:
    return lambda _: p


@cache
def undrafted_s(n: int) -> float:
    return DraftingWorker(n).run()


@pytest.mark.parametrize(
    ("n", "p", "unseen_s"),
    [(1, 0.0, 0.0), (4, 0.0, 0.0), (4, 0.8, 0.0), (1, 0.97, 0.02), (4, 0.97, 0.02), (16, 0.97, 0.02)],
)
def test_drafts_that_do_not_pay_lose_one_percent_at_most(n: int, p: float, unseen_s: float) -> None:
    drafting = DraftingWorker(n, always(p), unseen_s)
    assert drafting.run() <= 1.01 * undrafted_s(n)
    assert not unseen_s or any(n_proposals for n_proposals, _ in drafting.steps), "drafts are tried"


@pytest.mark.parametrize(("n", "gain"), [(1, 2.5), (4, 1.2), (16, 1.03)])
def test_drafts_that_pay_gain_as_much_as_without_a_limit(n: int, gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    limited_s = DraftingWorker(n, always(0.97)).run()
    assert undrafted_s(n) >= gain * limited_s
    monkeypatch.setattr(draft_budget, "_ADVANCE", 1e6)
    monkeypatch.setattr(draft_budget, "_FULL_DRAFTS", 1e6)
    assert DraftingWorker(n, always(0.97)).run() >= 0.97 * limited_s


@pytest.mark.parametrize("n", [1, 4])
def test_drafts_that_begin_to_be_right_are_soon_noticed(n: int) -> None:
    change = ANSWER // 2
    worker = DraftingWorker(n, lambda position: 0.97 if position >= PROMPT + change else 0.0)
    worker.run()
    first = next(index for index, (_, n_accepted) in enumerate(worker.steps) if n_accepted)
    assert first - change <= 50
    assert sum(n_accepted for _, n_accepted in worker.steps) > 0.4 * n * (ANSWER - change)


@pytest.mark.parametrize(("n", "n_steps"), [(1, 100), (4, 200), (16, 400)])
def test_drafts_that_become_cheap_are_noticed_after_losses(n: int, n_steps: int) -> None:
    change = ANSWER // 2
    worker = DraftingWorker(n, always(0.97), unseen_s=0.03, dear_steps=change)
    worker.run()
    assert sum(n_proposals > 0 for n_proposals, _ in worker.steps[:change]) < change // 20
    assert any(n_accepted for _, n_accepted in worker.steps[change : change + n_steps])
    assert sum(n_accepted for _, n_accepted in worker.steps[change:]) > 0.2 * n * (ANSWER - change)


@pytest.mark.parametrize("lost_s", [0.001, 0.01, 0.07])
def test_budget_loses_its_share_and_an_advance(lost_s: float) -> None:
    """Drafts cost nothing by their estimate, and always lose time."""
    budget, passed_s, spent_s = DraftBudget(), 0.0, 0.0
    for _ in range(10_000):
        if budget.cost(0.01, 1e-5).decode_s:
            budget.waited(lost_s, 0.01, 0.01, 1e-5)
            spent_s += lost_s
        else:
            budget.plain(0.01, 1e-5)
        passed_s += 0.01
    assert 0 < spent_s <= passed_s / 160 + 0.02 + lost_s


def test_gains_of_long_ago_cannot_be_lost() -> None:
    budget, spent_s = DraftBudget(), 0.0
    for _ in range(8):
        budget.plain(0.01, 0.001)
    for _ in range(1_000):
        budget.waited(0.001, 0.02, 0.1, 0.001)
    while budget.cost(0.01, 0.001).decode_s:
        budget.waited(0.001, 0.014, 0.01, 0.001)
        spent_s += 0.005
    assert 0.05 < spent_s < 0.07, "two drafts of 31 tokens, and a step more"
