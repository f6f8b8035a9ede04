"""Prompts may share a step with decodes only as far as streams keep their allowed."""

from __future__ import annotations

import math

import pytest

from services.worker.native.step_cost import StepTimer
from services.worker.protocol.plan import Chunk
from services.worker.scheduling.step_builder import StepLoad


def prefilled(timer: StepTimer, n_rows: int, seconds: float, start: int = 0, steps: int = 1) -> None:
    """It sees steps of one prompt's rows from a position on."""
    for _ in range(steps):
        timer.returned(StepLoad.of((Chunk(0, start, n_rows, draws=True),)), seconds)


def decoded(timer: StepTimer, n_decodes: int, step_ms: float, steps: int = 1) -> None:
    """It sees steps of decodes alone."""
    for _ in range(steps):
        timer.returned(StepLoad.of([Chunk(i, 9, 1, draws=True) for i in range(n_decodes)]), step_ms / 1e3)


def measured(prefill_tokens_per_s: int, decode_step_ms: float | None) -> StepTimer:
    """A timer that saw one prefill step of 200 tokens and, where given, one decode step."""
    timer = StepTimer()
    prefilled(timer, 200, 200 / prefill_tokens_per_s)
    if decode_step_ms is not None:
        decoded(timer, 1, decode_step_ms)
    return timer


def budget(timer: StepTimer, most_s: float, n_decodes: int) -> int:
    """The budget of prompts, in rows at their beginning."""
    allowed = timer.prefill_budget(most_s, n_decodes)
    assert allowed is not None
    return allowed.n_rows


def rows_beside(decode_step_ms: float) -> float:
    """Rows of prompts at 10,000 a second that streams with such a step put up with."""
    return min(2 * decode_step_ms, 1.5 * decode_step_ms + 8.0) * 10


@pytest.mark.parametrize(
    ("decode_step_ms", "most_s", "tokens"),
    [
        (10.0, 0.2, 200),  # two decode steps at 10,000 tokens/s
        (40.0, 0.2, 680),  # longer ones by one and a half and 8 ms
        (200.0, 0.2, 2_000),  # slow decodes: the setting is the limit
        (None, 0.2, 2_000),  # no decode seen yet
    ],
)
def test_prompts_lengthen_a_step_by_two_decode_steps_at_most(
    decode_step_ms: float | None, most_s: float, tokens: int
) -> None:
    assert budget(measured(10_000, decode_step_ms), most_s, 1) == pytest.approx(tokens, abs=1)


def test_prompts_never_starve() -> None:
    assert budget(measured(1_000, 0.1), 0.2, 1) == 16


def test_prefill_is_unlimited_before_any_measurement() -> None:
    assert StepTimer().prefill_budget(0.2, n_decodes=1) is None


def test_a_few_streams_are_not_paced_by_the_crowd_that_was_there_before() -> None:
    timer = measured(10_000, None)
    decoded(timer, 4, 10.0)
    decoded(timer, 64, 100.0, steps=50)
    assert budget(timer, 1.0, 5) == pytest.approx(rows_beside(10.0), abs=1)
    assert budget(timer, 1.0, 60) == pytest.approx(rows_beside(100.0), abs=1)


def test_streams_are_paced_by_the_usual_step_and_not_by_delays() -> None:
    timer = measured(10_000, 10.0)
    for _ in range(20):
        decoded(timer, 1, 10.0, steps=9)
        decoded(timer, 1, 200.0)
    assert budget(timer, 1.0, 1) == pytest.approx(rows_beside(10.0), rel=0.06)


def test_streams_are_paced_by_slower_steps_once_usual() -> None:
    timer = measured(10_000, 10.0)
    decoded(timer, 1, 30.0, steps=100)
    assert budget(timer, 1.0, 1) == pytest.approx(rows_beside(30.0), rel=0.02)


@pytest.mark.parametrize(
    ("n_decodes", "step_ms"),
    [
        (2, 10.0),  # like the next more
        (8, 50.0),
        (31, 50.0),
        (64, math.hypot(50.0, 64 * 0.1)),  # more than were seen: weights are read as long, ...
        (1_000, math.hypot(50.0, 1_000 * 0.1)),  # ... and each costs no less than a row of a prompt
    ],
)
def test_a_step_of_as_many_decodes_as_were_not_seen_is_guessed(n_decodes: int, step_ms: float) -> None:
    timer = measured(10_000, None)
    decoded(timer, 4, 10.0)
    decoded(timer, 16, 50.0, steps=100)
    assert budget(timer, 1.0, n_decodes) == pytest.approx(rows_beside(step_ms), rel=0.01)


def test_a_step_takes_no_longer_than_a_step_of_more_decodes() -> None:
    timer = measured(10_000, None)
    decoded(timer, 16, 20.0, steps=50)
    decoded(timer, 15, 40.0)  # alone only once: just when the sixteenth stream ended
    assert budget(timer, 1.0, 15) == pytest.approx(rows_beside(20.0), rel=0.01)


def test_prefill_speed_is_independent_of_the_split_into_steps() -> None:
    few_and_many = StepTimer()
    for _ in range(100):
        prefilled(few_and_many, 20, 0.020)
        prefilled(few_and_many, 180, 0.030)
    assert few_and_many.prefill_tokens_per_s == pytest.approx(200 / 0.050, rel=0.1)
    assert StepTimer().prefill_tokens_per_s == 0


def test_every_row_counts_once_computed() -> None:
    timer = StepTimer()
    prefilled(timer, 200, 0.05)
    decoded(timer, 3, 10.0, steps=2)
    assert timer.computed_tokens == 206


ROW_S, KEY_S = 100e-6, 0.1e-6  # 1,000 keys cost as much as a row


def test_key_cost_is_learnt_from_long_prompts_and_row_cost_from_short_prompts() -> None:
    timer = StepTimer()
    for _ in range(60):
        prefilled(timer, 100, 100 * (ROW_S + 50 * KEY_S))
        prefilled(timer, 100, 100 * (ROW_S + 2_050 * KEY_S), start=2_000)
    allowed = timer.prefill_budget(0.1, 1)
    assert allowed is not None
    assert allowed.n_rows == pytest.approx(1_000, rel=0.02)
    assert allowed.key_cost == pytest.approx(KEY_S / ROW_S, rel=0.05)
    n_rows = allowed.rows(2_000, allowed.n_rows)
    assert n_rows * (ROW_S + (2_000 + n_rows / 2) * KEY_S) == pytest.approx(0.1, rel=0.05)


def test_long_prompts_replace_the_estimate_of_a_slow_first_step() -> None:
    timer = StepTimer()
    prefilled(timer, 1_000, 1.0)
    prefilled(timer, 1_000, 0.1, steps=100)
    assert budget(timer, 0.1, 1) == pytest.approx(1_000, rel=0.05)


@pytest.mark.parametrize(("fixed_s", "row_s"), [(0.0074, 15e-6), (0.0003, 100e-6)], ids=["launches", "rows"])
def test_prompts_are_not_cut_into_pieces_that_cost_as_much_as_the_whole(fixed_s: float, row_s: float) -> None:
    """Steps with prompts take 7.4 ms more on a GPU, for 16 rows or 500: cut smaller and smaller, all clients waited."""
    timer = measured(10_000, None)
    decoded(timer, 16, 2.4)
    for size in range(400):
        rows = min(budget(timer, 0.2, 16), 20 + 131 * size % 400)  # the end of a prompt is shorter
        prefilled(timer, rows, fixed_s + row_s * rows)
    added_s = fixed_s + row_s * budget(timer, 0.2, 16)
    assert added_s == pytest.approx(max(2 * 0.0024, 2 * fixed_s), rel=0.1)


def test_a_single_delay_hardly_changes_the_estimate() -> None:
    timer = measured(10_000, 2.0)
    decoded(timer, 1, 5_000.0)
    assert timer.decode_step_ms < 4.0
    prefilled(timer, 200, 5.0)
    assert timer.prefill_tokens_per_s > 5_000


def test_steps_that_stay_slow_are_soon_believed() -> None:
    timer = measured(10_000, 2.0)
    decoded(timer, 1, 200.0, steps=40)
    assert timer.decode_step_ms > 180.0
    prefilled(timer, 200, 2.0, steps=40)
    assert timer.prefill_tokens_per_s == pytest.approx(100, rel=0.1)


DRAFTED = Chunk(0, 9, 5, draws=True, proposals=(1, 2, 3, 4))


def test_cost_of_proposals_is_the_time_added_to_a_step() -> None:
    timer = StepTimer()
    assert not timer.draft_cost(1).decode_s
    decoded(timer, 1, 10.0, steps=50)
    at_first = timer.draft_cost(1)
    assert at_first.decode_s == pytest.approx(0.010)
    for _ in range(200):
        timer.returned(StepLoad.of([DRAFTED]), 0.018, n_accepted=2, wait_s=0.003)
    assert timer.decode_step_ms == pytest.approx(7.0)  # routers see the time of a token, the wait included
    decoded(timer, 1, 10.0, steps=2)
    assert timer.draft_cost(1).proposal_s == pytest.approx(0.002, rel=0.05)
    assert timer.draft_cost(1).wait_s == pytest.approx(0.003, rel=0.05)
    for _ in range(200):  # rows of a chunk, say, which read the keys once
        timer.returned(StepLoad.of([DRAFTED]), 0.014, n_accepted=2)
    decoded(timer, 1, 10.0, steps=2)
    assert timer.draft_cost(1).proposal_s == pytest.approx(0.001, rel=0.05)
    decoded(timer, 1, 10.0, steps=2000)
    assert timer.draft_cost(1).proposal_s == pytest.approx(at_first.proposal_s, rel=0.01)
    assert timer.draft_cost(1).wait_s == pytest.approx(at_first.wait_s, rel=0.01)


def test_steps_without_proposals_are_measured_first_and_from_time_to_time() -> None:
    timer = StepTimer()
    decoded(timer, 16, 20.0, steps=3)
    assert not timer.draft_cost(16).decode_s  # the first steps with new streams are slow ones
    decoded(timer, 16, 20.0, steps=5)
    assert timer.draft_cost(16).decode_s
    assert not timer.draft_cost(1).decode_s

    drafted = [DRAFTED, *(Chunk(i, 9, 1, draws=True) for i in range(1, 16))]
    n_steps = 0
    while timer.draft_cost(16).decode_s:
        timer.returned(StepLoad.of(drafted), 0.024, n_accepted=4)
        n_steps += 1
    assert n_steps == 64
    decoded(timer, 16, 20.0, steps=2)
    assert timer.draft_cost(16).decode_s


def test_cost_of_proposals_depends_on_the_number_of_decodes() -> None:
    timer = StepTimer()
    decoded(timer, 1, 5.0, steps=8)
    decoded(timer, 16, 20.0, steps=8)
    decodes = [Chunk(i, 9, 1, draws=True) for i in range(1, 16)]
    for _ in range(60):
        timer.returned(StepLoad.of([DRAFTED]), 0.006, n_accepted=1)
        timer.returned(StepLoad.of([DRAFTED, *decodes]), 0.024, n_accepted=4)
    assert timer.draft_cost(1).proposal_s == pytest.approx(0.00025, rel=0.2)
    assert timer.draft_cost(16).proposal_s == pytest.approx(0.001, rel=0.2)


def test_cost_of_proposals_stays_unknown_when_drafts_are_off() -> None:
    on, off = StepTimer(), StepTimer(drafts=False)
    for timer in (on, off):
        decoded(timer, 4, step_ms=10, steps=20)
    assert on.draft_cost(4).decode_s > 0
    assert off.draft_cost(4).decode_s == 0
    assert off.decode_step_ms == on.decode_step_ms
    assert off.spare_s(StepLoad(4)) == on.spare_s(StepLoad(4))


def test_drafts_pause_where_their_steps_lose_time() -> None:
    timer = StepTimer()
    decoded(timer, 1, 10.0, steps=8)
    for _ in range(40):
        timer.returned(StepLoad.of([DRAFTED]), 0.018, n_accepted=1, wait_s=0.001)
        assert timer.draft_cost(1).decode_s
    n_steps = 0
    while timer.draft_cost(1).decode_s:
        timer.returned(StepLoad.of([DRAFTED]), 0.018, n_accepted=0, wait_s=0.001)
        n_steps += 1
    assert 1 < n_steps < 20
    n_steps = 0
    while not timer.draft_cost(1).decode_s:
        decoded(timer, 1, 10.0)
        n_steps += 1
    assert 20 < n_steps < 200


def test_drafts_pause_where_waits_are_in_vain() -> None:
    timer = StepTimer()
    decoded(timer, 4, 10.0, steps=8)
    beside = StepLoad.of([Chunk(i, 9, 1, draws=True) for i in range(4)])
    for _ in range(20):
        timer.returned(beside, 0.010, wait_s=0.002)
    assert not timer.draft_cost(4).decode_s
    decoded(timer, 1, 5.0, steps=8)
    assert timer.draft_cost(1).decode_s


def test_wait_for_a_plan_depends_on_the_number_of_decodes() -> None:
    timer = StepTimer()
    decoded(timer, 1, 5.0, steps=8)
    decoded(timer, 16, 20.0, steps=8)
    beside = [Chunk(i, 9, 1, draws=True) for i in range(1, 16)]
    for _ in range(40):
        timer.returned(StepLoad.of([DRAFTED]), 0.006, n_accepted=4, wait_s=0.0006)
        timer.returned(StepLoad.of([DRAFTED, *beside]), 0.0205, n_accepted=4, wait_s=0.004)
    assert timer.draft_cost(1).wait_s == pytest.approx(0.0006, rel=0.1)
    assert timer.draft_cost(16).wait_s == pytest.approx(0.004, rel=0.1)


def test_first_steps_after_prompts_do_not_make_losses_look_like_gains() -> None:
    """The first step of so many decodes took three times as long as the others."""
    timer = StepTimer()
    decoded(timer, 16, 72.0)
    decoded(timer, 16, 24.0, steps=7)
    assert timer.draft_cost(16).decode_s == pytest.approx(0.024, rel=0.02)
