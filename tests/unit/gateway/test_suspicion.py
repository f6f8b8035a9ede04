"""Which deaths a request is blamed for."""

from __future__ import annotations

from services.gateway.generation.suspicion import ACQUITTED_TOKENS, MOST_DEATHS, MOST_TRIALS, Suspicion


def suspect(place: int = 5) -> Suspicion:
    """A request under which two workers have died among others."""
    suspicion = Suspicion(shared_deaths=2)
    for _ in range(2):
        assert not suspicion.trial_tokens
        suspicion.died(place, alone=False, gave=True)
    assert suspicion.trial_tokens == ACQUITTED_TOKENS
    assert not suspicion.convicted
    return suspicion


def test_two_shared_deaths_make_a_suspect_and_one_alone_before_a_token_convicts() -> None:
    suspicion = suspect()
    suspicion.died(5, alone=True, gave=False)
    assert suspicion.convicted


def test_an_innocent_on_trial_whose_worker_dies_by_coincidence_is_tried_again_and_cleared() -> None:
    suspicion = suspect()
    for place in (7, 9):
        suspicion.progressed(place)
        suspicion.died(place, alone=True, gave=True)
        assert not suspicion.convicted
        assert suspicion.trial_tokens, "not cleared either"
    suspicion.progressed(9 + ACQUITTED_TOKENS)
    assert not suspicion.trial_tokens
    for _ in range(2):
        suspicion.died(40, alone=False, gave=True)
    suspicion.died(42, alone=True, gave=True)
    assert not suspicion.convicted, "the trials before were over"


def test_a_killer_that_gives_a_token_before_each_death_is_convicted_all_the_same() -> None:
    suspicion, place = suspect(), 5
    for trial in range(MOST_TRIALS):
        assert not suspicion.convicted, trial
        place += 1
        suspicion.progressed(place)
        suspicion.died(place, alone=True, gave=True)
    assert suspicion.convicted


def test_whoever_gets_past_the_place_of_a_death_is_cleared() -> None:
    suspicion = suspect(7)
    suspicion.progressed(7 + ACQUITTED_TOKENS - 1)
    assert suspicion.trial_tokens
    suspicion.progressed(7 + ACQUITTED_TOKENS)
    assert not suspicion.trial_tokens
    suspicion.died(40, alone=False, gave=True)
    assert not suspicion.trial_tokens


def test_there_is_an_end_to_deaths_at_ever_new_places() -> None:
    suspicion = Suspicion(shared_deaths=2)
    for n in range(MOST_DEATHS):
        assert not suspicion.convicted
        suspicion.died(100 * n, alone=False, gave=True)
        suspicion.progressed(100 * n + ACQUITTED_TOKENS)
    assert suspicion.convicted
