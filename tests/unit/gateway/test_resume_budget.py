"""One worker's death does not become the next one's."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.generation.budget import BudgetExhaustedError, ResumeBudget


class ManualClock(asyncio.SelectorEventLoop):
    """An event loop that sleeps no longer than it must and counts the time that was asked for."""

    elapsed = 0.0

    def time(self) -> float:
        return self.elapsed

    def call_at(self, when, callback, *args, context=None):  # type: ignore[no-untyped-def]
        self.elapsed = max(self.elapsed, when)
        return self.call_soon(callback, *args, context=context)


def run(work) -> None:  # type: ignore[no-untyped-def]
    with asyncio.Runner(loop_factory=ManualClock) as runner:
        runner.run(work())


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_burst_is_free_and_its_excess_flows_at_the_rate() -> None:
    async def work() -> None:
        budget = ResumeBudget(tokens_per_s=1000)
        for _ in range(10):
            await budget.admit("w0", 100, patience_s=30)
        assert now() == 0
        for expected in (0.5, 1.0, 1.5):
            await budget.admit("w0", 500, patience_s=30)
            assert now() == pytest.approx(expected)

    run(work)


def test_every_worker_has_a_bucket_of_its_own() -> None:
    async def work() -> None:
        budget = ResumeBudget(tokens_per_s=1000)
        for worker in ("w0", "w1", "w2"):
            await budget.admit(worker, 1000, patience_s=0)
        assert now() == 0

    run(work)


def test_a_request_larger_than_the_bucket_is_delayed_and_not_starved() -> None:
    async def work() -> None:
        budget = ResumeBudget(tokens_per_s=1000)
        await budget.admit("w0", 5000, patience_s=1)
        assert now() == pytest.approx(4)

    run(work)


async def test_an_over_budget_resume_is_rejected_at_once_and_takes_no_tokens() -> None:
    budget = ResumeBudget(tokens_per_s=1000)
    first = asyncio.create_task(budget.admit("w0", 61_000, patience_s=30))
    await asyncio.sleep(0)
    for _ in range(3):
        with pytest.raises(BudgetExhaustedError) as refused:
            await budget.admit("w0", 10_000, patience_s=30)
        assert refused.value.retry_after_s == pytest.approx(30, abs=5), "the refused ones add nothing to the debt"
    first.cancel()
