"""Suspects are computed one at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.scheduling.request import Request, Status
from tests.unit.worker.scheduling.harness import Harness

TRIAL = 3


def on_trial(requests: list[Request]) -> list[Request]:
    """Suspects that are computed and are not cleared."""
    return [r for r in requests if r.status is Status.RUNNING and r.n_generated < r.cleared_at]


def test_the_next_suspect_begins_when_the_previous_suspect_is_cleared() -> None:
    harness = Harness()
    suspects = [harness.submit([n + 1] * 20, 8, trial_tokens=TRIAL) for n in range(3)]
    innocent = harness.submit([9] * 20, 8)
    harness.plan()
    assert on_trial(suspects) == suspects[:1]
    assert innocent.status is Status.RUNNING
    assert harness.scheduler.quarantine.begun() is suspects[0]
    assert harness.scheduler.quarantine.begun() is None
    while suspects[1].status is not Status.RUNNING:
        assert harness.step()
    assert suspects[0].n_generated >= TRIAL
    assert suspects[0].status is Status.RUNNING, "it goes on together with the next one"
    assert harness.scheduler.quarantine.begun() is suspects[1]
    harness.drain()
    assert all(len(harness.answers[request]) == 8 for request in (*suspects, innocent))


def test_a_cancelled_suspect_holds_up_no_request() -> None:
    harness = Harness()
    first, second, third = (harness.submit([n + 1] * 20, 8, trial_tokens=TRIAL) for n in range(3))
    harness.plan()
    harness.scheduler.cancel(second)
    harness.scheduler.cancel(first)
    while third not in harness.ended:
        assert harness.step()
    harness.drain()


@given(
    trials=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    lengths=st.lists(st.integers(1, 6), min_size=8, max_size=8),
    n_blocks=st.integers(6, 24),
)
def test_at_most_one_request_is_on_trial_and_every_request_ends(
    trials: list[int], lengths: list[int], n_blocks: int
) -> None:
    harness = Harness(n_blocks=n_blocks, max_running=4)
    requests = [
        harness.submit([n + 1] * 20, length, trial_tokens=trial)
        for n, (trial, length) in enumerate(zip(trials, lengths, strict=False))
    ]
    while harness.step():
        assert len(on_trial(requests)) <= 1
    assert set(harness.ended) == set(requests)
