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
        (10.0, 0.2, 200),  # two decode steps at 10,000 tokens/s
        (100.0, 0.2, 2_000),  # slow decodes: the setting is the limit
        (None, 0.2, 2_000),  # no decode seen yet
        (0.1, 0.2, 32),  # never so few that prompts starve
    ],
)
def test_prompts_lengthen_a_step_by_two_decode_steps_at_most(
    decode_step_ms: float | None, most_s: float, tokens: int
) -> None:
    rows = measured(10_000, decode_step_ms).prefill_rows(most_s)
    assert rows is not None
    assert rows == pytest.approx(tokens, abs=1)


def test_nothing_is_limited_before_anything_is_measured() -> None:
    assert Meter().prefill_rows(0.2) is None


class Pipeline:
    """Steps one after the other; each takes `base_s` plus 1 ms for a decode and 0.1 ms for a prompt's token."""

    def __init__(self, base_s: float) -> None:
        self.meter = Meter()
        self.base_s, self.now, self.n = base_s, 100.0, 0

    def step(self, n_decodes: int, n_prompt_tokens: int = 0, *, hiccup_s: float = 0.0) -> None:
        self.n += 1
        chunks = [Chunk(slot, 9, 1, sample=True) for slot in range(n_decodes)]
        if n_prompt_tokens:
            chunks.append(Chunk(99, 0, n_prompt_tokens, sample=True))
        self.meter.planned(StepPlan(self.n, chunks=tuple(chunks)), self.now)
        self.now += self.base_s + 0.001 * n_decodes + 0.0001 * n_prompt_tokens + hiccup_s
        self.meter.returned(self.now)


def test_what_counts_is_the_usual_step_of_as_many_requests_and_not_the_average_of_all() -> None:
    lab = Pipeline(base_s=0.004)
    lab.step(0, 2_000)
    for _ in range(50):
        lab.step(60)  # 64 ms
    for n in range(50):
        lab.step(4, hiccup_s=0.1 if n % 5 == 0 else 0.0)  # 8 ms, but for the odd pause of the machine
    lab.step(4, 100)
    rows = lab.meter.prefill_rows(most_s=1.0)
    assert rows is not None
    assert rows == pytest.approx(2 * 8 / 0.1, rel=0.15)


def test_a_prompts_tokens_are_paid_for_beside_the_decodes_not_with_them() -> None:
    """The speed of prompts is what they add to a step, however many decodes share it."""
    lab = Pipeline(base_s=0.02)
    for _ in range(3):
        lab.step(16)
    for _ in range(40):
        lab.step(16, 64)
    rows = lab.meter.prefill_rows(most_s=1.0)
    assert rows is not None
    assert rows == pytest.approx(2 * 36 / 0.1, rel=0.15)
