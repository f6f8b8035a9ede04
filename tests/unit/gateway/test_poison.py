"""Which deaths a request is blamed for."""

from __future__ import annotations

from services.gateway.generation.poison import CLEARING_TOKENS, MOST_DEATHS, MOST_TRIALS, Broken, PoisonDetector
from services.gateway.upstream.connection import WorkerRef


def suspect(place: int = 5) -> PoisonDetector:
    """A request under which two workers have died among others."""
    detector = PoisonDetector()
    for _ in range(2):
        assert not detector.trial_tokens
        detector.died(place, alone=False, gave=True)
    assert detector.trial_tokens == CLEARING_TOKENS
    assert not detector.convicted
    return detector


def test_an_innocent_request_on_trial_is_retried_and_cleared_after_an_unrelated_death() -> None:
    detector = suspect()
    for place in (7, 9):
        detector.progressed(place)
        detector.died(place, alone=True, gave=True)
        assert not detector.convicted
        assert detector.trial_tokens, "not cleared either"
    detector.progressed(9 + CLEARING_TOKENS)
    assert not detector.trial_tokens
    for _ in range(2):
        detector.died(40, alone=False, gave=True)
    detector.died(42, alone=True, gave=True)
    assert not detector.convicted, "the trials before were over"


def test_a_killer_that_gives_a_token_before_each_death_is_convicted_all_the_same() -> None:
    detector, place = suspect(), 5
    for trial in range(MOST_TRIALS):
        assert not detector.convicted, trial
        place += 1
        detector.progressed(place)
        detector.died(place, alone=True, gave=True)
    assert detector.convicted


def test_death_that_its_worker_outlived_counts_no_more() -> None:
    broken = [Broken(WorkerRef("w", "process", "host:1"), at) for at in (1.0, 2.0, 3.0)]
    detector = PoisonDetector()
    for each in broken:
        detector.died(5, alone=bool(detector.trial_tokens), gave=False, supposed_by=each)
    assert detector.convicted
    assert detector.supposed == broken
    detector.outlived(broken[2])
    assert not detector.convicted
    detector.died(5, alone=True, gave=False)
    assert detector.convicted, "ranks have died for certain"
    detector = PoisonDetector()
    for number in range(MOST_DEATHS):
        detector.progressed(40 * number)
        detector.died(40 * number, alone=False, gave=True, supposed_by=broken[number % 3])
    assert detector.convicted
    detector.outlived(broken[0])
    assert not detector.convicted


def test_there_is_an_end_to_deaths_at_ever_new_places() -> None:
    detector = PoisonDetector()
    for n in range(MOST_DEATHS):
        assert not detector.convicted
        detector.died(100 * n, alone=False, gave=True)
        detector.progressed(100 * n + CLEARING_TOKENS)
    assert detector.convicted
