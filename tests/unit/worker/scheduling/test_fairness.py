"""Shares of an overloaded worker, by tenant."""

from __future__ import annotations

import itertools
import random

import pytest

from services.worker.scheduling.fairness import OUTPUT_COST, PREFILL_COST, TenantLedger
from services.worker.scheduling.prefill_budget import PrefillBudget
from tests.unit.worker.scheduling.harness import Harness

STEPS = 3000


class Backlog:
    """Every tenant always has requests waiting, of its own sizes."""

    def __init__(self, harness: Harness, tenants: dict[str, tuple[int, int, int]]) -> None:
        self.harness = harness
        self.tenants = tenants  # name -> prompt tokens, output tokens, weight
        self.requests: dict[str, list] = {name: [] for name in tenants}
        self.fresh = itertools.count()

    def top_up(self) -> None:
        for name, (n_prompt, n_output, weight) in self.tenants.items():
            alive = [r for r in self.requests[name] if r not in self.harness.ended]
            for _ in range(12 - len(alive)):
                prompt = [next(self.fresh) % 97 for _ in range(n_prompt)]
                request = self.harness.submit(prompt, n_output, tenant=name, weight=weight, cacheable=False)
                self.requests[name].append(request)

    def served(self, name: str) -> float:
        return sum(PREFILL_COST * r.n_charged + OUTPUT_COST * len(self.harness.answers[r]) for r in self.requests[name])

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.top_up()
            self.harness.step()


@pytest.mark.parametrize(
    "tenants",
    [
        {"long": (100, 40, 1), "short": (10, 5, 1)},
        {"paid": (30, 20, 3), "free": (30, 20, 1)},
        {name: (random.Random(name).randrange(5, 60), 10, 1) for name in "abcde"},
    ],
    ids=["sizes", "weights", "many"],
)
def test_greedy_tenants_share_by_weight_within_5_percent(tenants: dict[str, tuple[int, int, int]]) -> None:
    backlog = Backlog(Harness(max_running=8, max_batched_tokens=64), tenants)
    backlog.run(STEPS)
    shares = [backlog.served(name) / weight for name, (_, _, weight) in tenants.items()]
    assert max(shares) <= 1.05 * min(shares)


def test_a_returning_tenant_gets_no_credit_for_the_pause() -> None:
    ledger = TenantLedger()
    ledger.enter("early", 1)
    ledger.leave("early")
    ledger.enter("busy", 1)
    ledger.charge("busy", 1000)
    ledger.enter("early", 1)
    assert ledger.served("early") == ledger.served("busy")


def test_a_tenant_keeps_its_debt_across_a_pause() -> None:
    ledger = TenantLedger()
    ledger.enter("a", 1)
    ledger.enter("b", 1)
    ledger.charge("a", 500)
    ledger.leave("a")
    ledger.enter("a", 1)
    assert ledger.served("a") - ledger.served("b") == 500


def test_inside_a_tenant_first_come_is_first_served() -> None:
    harness = Harness(max_running=1, max_batched_tokens=50)
    requests = [harness.submit([i] * 20, 3, tenant="t") for i in range(6)]
    harness.drain()
    assert list(harness.ended) == requests


def test_priority_goes_first_until_a_long_wait_outweighs_priority() -> None:
    harness = Harness(max_running=1, max_batched_tokens=50)
    low = harness.submit([1] * 20, 3, priority=1)
    high = harness.submit([2] * 20, 3, priority=0)
    harness.drain()
    assert list(harness.ended) == [high, low]

    old = harness.submit([3] * 20, 3, priority=1)
    harness.now += harness.config.age_s * 2
    new = harness.submit([4] * 20, 3, priority=0)
    harness.drain()
    assert list(harness.ended)[2:] == [old, new]


def test_an_important_request_preempts_a_lesser_request() -> None:
    harness = Harness(max_running=1)
    lesser = harness.submit([1] * 20, 60, priority=5)
    for _ in range(4):
        harness.step()
    urgent = harness.submit([2] * 20, 3, priority=0)
    harness.drain()
    assert list(harness.ended) == [urgent, lesser]
    assert lesser.n_preempted == 1
    assert len(harness.answers[lesser]) == 60


def test_a_long_prompt_delays_no_short_prompt_and_wastes_no_budget() -> None:
    harness = Harness(n_blocks=100, max_model_len=1600, max_batched_tokens=64)
    long = harness.submit([i % 97 for i in range(1500)], 2)
    harness.plan()
    short = harness.submit([1, 2, 3], 2)
    plans = []
    while short not in harness.ended:
        plans.append(harness.plan())
        harness.apply()
    assert len(plans) <= 4
    assert all(plan is not None and plan.n_tokens == 64 for plan in plans)
    harness.drain()
    assert long in harness.ended


def test_a_prompt_is_cut_to_the_prefill_budget_of_running_decodes() -> None:
    harness = Harness(n_blocks=100, max_model_len=1600, max_batched_tokens=512)
    harness.scheduler.prefill_budget = PrefillBudget(32)
    decoding = harness.submit([9], 100)
    harness.step()
    harness.submit([i % 97 for i in range(600)], 1)
    while decoding not in harness.ended:
        plan = harness.plan()
        assert plan is None or plan.n_tokens <= 33
        harness.apply()
    harness.drain()


def test_the_further_on_in_a_prompt_the_fewer_of_its_rows_come_beside_decodes() -> None:
    harness = Harness(n_blocks=200, max_model_len=2500, max_batched_tokens=512)
    harness.scheduler.prefill_budget = allowed = PrefillBudget(100, key_cost=1 / 500)
    decoding = harness.submit([9], 200)
    harness.step()
    harness.submit([i % 97 for i in range(2000)], 1)
    starts, rows = [], []
    while decoding not in harness.ended:
        plan = harness.plan()
        for chunk in plan.chunks if plan else ():
            if chunk.n_tokens > 1 and chunk.start + chunk.n_tokens < 2000:
                starts.append(chunk.start)
                rows.append(chunk.n_tokens)
        harness.apply()
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > 3 * rows[-1]
    assert all(
        allowed.cost(start, n) <= 100 < allowed.cost(start, n + 1) for start, n in zip(starts, rows, strict=True)
    )
    harness.drain()


def test_a_load_is_charged_to_its_tenant_while_present() -> None:
    ledger = TenantLedger()
    ledger.enter("paid", 2)
    ledger.charge_load("paid", 10)
    ledger.charge_load("gone", 10)
    assert ledger.served("paid") == 5
    assert len(ledger) == 1
