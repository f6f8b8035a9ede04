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
        (0.1, 0.2, 64),  # never so few that prompts starve
    ],
)
def test_prompts_lengthen_a_step_by_three_decode_steps_at_most(
    decode_step_ms: float | None, most_s: float, tokens: int
) -> None:
    rows = measured(10_000, decode_step_ms).prefill_rows(most_s)
    assert rows is not None
    assert rows == pytest.approx(tokens, abs=1)


def test_nothing_is_limited_before_anything_is_measured() -> None:
    assert Meter().prefill_rows(0.2) is None
