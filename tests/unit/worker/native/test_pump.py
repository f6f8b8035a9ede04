"""The ranks' times that the pump reports to the scheduler."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from services.worker.native.pump import StepPump
from services.worker.native.step_cost import StepTimer
from services.worker.protocol.plan import Chunk, StepPlan, StepTimes
from services.worker.scheduling.step_builder import StepLoad
from tests.unit.worker.scheduling.harness import Guesses, Harness


async def test_the_wait_of_the_ranks_for_proposals_is_part_of_their_cost() -> None:
    harness, timer, plans = Harness(speculation=True), StepTimer(), list[StepPlan]()
    for _ in range(20):
        timer.returned(StepLoad.of([Chunk(0, 9, 1, draws=True)]), 1.0)  # steps so long that every draft pays
    scheduler = harness.scheduler
    pump = StepPump(scheduler, timer, 1.0, plans.append, lambda _: None, lambda *_: None, lambda: None)
    request = harness.submit([5, 6, 7], max_tokens=100)
    assert request.drafts is not None
    request.drafts.drafters = [Guesses([5] * 100, request.n_prompt, random.Random(0))]
    before = timer.draft_cost(1).wait_s
    pump.kick()
    await asyncio.sleep(0)
    while plans:
        pump.on_result(replace(harness.ranks.execute(plans.pop(0)), times=StepTimes(wait=3000)))
    assert scheduler.idle
    assert scheduler.counters.proposed_tokens["guesses"] > 10
    assert before < timer.draft_cost(1).wait_s <= 0.003
