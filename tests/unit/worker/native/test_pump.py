"""The ranks' times that the pump reports to the scheduler."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.native.pump import StepPump
from services.worker.native.step_cost import StepCost, StepTimer
from services.worker.protocol.plan import Chunk, StepPlan, StepTimes
from services.worker.scheduling.step_builder import StepLoad
from tests.unit.worker.scheduling.fake_ranks import generate
from tests.unit.worker.scheduling.harness import Guesses, Harness


class SteadyTimer(StepTimer):
    """Sees steps of a second, so that every draft pays, and notes for which of them the ranks waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: set[tuple[bool, float]] = set()

    def returned(self, step: StepLoad, seconds: float, n_accepted: int = 0, wait_s: float = 0.0) -> StepCost:
        self.waits.add((step.n_proposals > 0, wait_s))
        return super().returned(step, 1.0, n_accepted, wait_s)


async def test_the_wait_of_the_ranks_for_proposals_is_part_of_their_cost() -> None:
    harness, timer, plans = Harness(speculation=True, clock=time.monotonic), SteadyTimer(), list[StepPlan]()
    for _ in range(20):
        timer.returned(StepLoad.of([Chunk(0, 9, 1, draws=True)]), 1.0)
    scheduler = harness.scheduler
    pump = StepPump(scheduler, timer, 1.0, plans.append, lambda _: None, lambda *_: None, lambda: None)
    request = harness.submit([5, 6, 7], max_tokens=100)
    assert request.drafts is not None
    answer = generate([5, 6, 7], 100, Sampling())
    request.drafts.drafters = [Guesses(answer, request.n_prompt, random.Random(0))]
    before = timer.draft_cost(1).wait_s
    pump.kick()
    await asyncio.sleep(0)
    while plans:
        pump.on_result(replace(harness.ranks.execute(plans.pop(0)), times=StepTimes(wait=3000)))
    assert scheduler.idle
    assert scheduler.counters.proposed_tokens["guesses"] > 10
    assert before < timer.draft_cost(1).wait_s <= 0.003
    assert (True, 0.003) in timer.waits
    assert (True, 0.0) not in timer.waits
    assert (False, 0.0) in timer.waits, "steps that are planned ahead"


async def test_a_plan_that_is_late_waited_for_no_draft() -> None:
    harness, timer, plans = Harness(clock=time.monotonic), SteadyTimer(), list[StepPlan]()
    pump = StepPump(harness.scheduler, timer, 1.0, plans.append, lambda _: None, lambda *_: None, lambda: None)
    harness.submit([5, 6, 7], max_tokens=20)
    pump.kick()
    await asyncio.sleep(0)
    while plans:
        pump.on_result(replace(harness.ranks.execute(plans.pop(0)), times=StepTimes(wait=3000)))
    assert timer.waits == {(False, 0.0)}
