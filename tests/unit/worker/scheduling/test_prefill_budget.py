"""How many rows of a prompt a budget pays for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.scheduling.prefill_budget import PrefillBudget


@given(
    budget=st.integers(1, 10_000),
    key_cost=st.one_of(st.just(0.0), st.floats(1e-7, 1.0)),
    start=st.integers(0, 200_000),
)
def test_a_budget_pays_for_as_many_rows_as_fit_or_a_few(budget: int, key_cost: float, start: int) -> None:
    allowed = PrefillBudget(budget, key_cost)
    rows = allowed.rows(start, budget)
    assert rows >= 1
    assert rows <= min(16, budget) or allowed.cost(start, rows) <= budget * (1 + 1e-6)
    assert allowed.cost(start, rows + 1) > budget * (1 - 1e-6)


def test_a_prompt_costs_the_same_whole_and_in_pieces() -> None:
    allowed = PrefillBudget(100, 1 / 300)
    assert allowed.cost(40, 60) + allowed.cost(100, 200) == pytest.approx(allowed.cost(40, 260))
