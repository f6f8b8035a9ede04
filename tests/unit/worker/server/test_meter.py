"""Prompts may share a step with decodes only as far as streams keep their pace."""

from __future__ import annotations

import pytest

from services.worker.scheduling.plan import Chunk, StepPlan
from services.worker.server.meter import Meter


def measured(prefill_tokens_per_s: int, decode_step_ms: float | None) -> Meter:
    """A meter that saw one prefill step of 1,000 tokens and, where given, one decode step."""
    meter, now = Meter(), 100.0
    meter.planned(StepPlan(1, chunks=(Chunk(0, 0, 1_000, sample=True, new_blocks=()),)), now)
    now += 1_000 / prefill_tokens_per_s
    meter.returned(now)
    if decode_step_ms is not None:
        meter.planned(StepPlan(2, chunks=(Chunk(0, 1_000, 1, sample=True),)), now)
        meter.returned(now + decode_step_ms / 1e3)
    return meter


@pytest.mark.parametrize(
    ("decode_step_ms", "most_s", "tokens"),
    [
        (10.0, 0.2, 300),  # three decode steps at 10,000 tokens/s
        (100.0, 0.2, 2_000),  # slow decodes: the setting is the limit
        (None, 0.2, 2_000),  # no decode seen yet
        (0.1, 0.2, 16),  # never so few that prompts starve
    ],
)
def test_prompts_lengthen_a_step_by_three_decode_steps_at_most(
    decode_step_ms: float | None, most_s: float, tokens: int
) -> None:
    rows = measured(10_000, decode_step_ms).prefill_rows(most_s, n_decodes=1)
    assert rows is not None
    assert rows == pytest.approx(tokens, abs=1)


def test_nothing_is_limited_before_anything_is_measured() -> None:
    assert Meter().prefill_rows(0.2, n_decodes=1) is None


def decoded(meter: Meter, n_decodes: int, step_ms: float, steps: int = 1) -> None:
    """It sees steps of decodes alone."""
    for _ in range(steps):
        meter.planned(StepPlan(1, chunks=tuple(Chunk(i, 9, 1, sample=True) for i in range(n_decodes))), 0.0)
        meter._last_result = 0.0
        meter.returned(step_ms / 1e3)


def test_a_few_streams_are_not_paced_by_the_crowd_that_was_there_before() -> None:
    meter = measured(10_000, None)
    decoded(meter, 4, 10.0)
    decoded(meter, 64, 100.0, steps=50)
    assert meter.prefill_rows(1.0, n_decodes=5) == pytest.approx(300, abs=1)
    assert meter.prefill_rows(1.0, n_decodes=60) == pytest.approx(3_000, abs=1)


@pytest.mark.parametrize(("n_decodes", "tokens"), [(2, 300), (8, 1_500), (64, 1_500)])
def test_what_was_not_seen_is_taken_to_be_like_the_next_more_or_like_the_latest(n_decodes: int, tokens: int) -> None:
    meter = measured(10_000, None)
    decoded(meter, 4, 10.0)
    decoded(meter, 16, 50.0, steps=100)
    assert meter.prefill_rows(1.0, n_decodes=n_decodes) == pytest.approx(tokens, rel=0.01)
