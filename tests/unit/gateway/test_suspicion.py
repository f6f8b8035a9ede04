"""Which deaths a request is blamed for."""

from __future__ import annotations

from services.gateway.generation.suspicion import ACQUITTED_TOKENS, MOST_DEATHS, Suspicion


def test_two_shared_deaths_make_a_suspect_and_one_alone_convicts() -> None:
    suspicion = Suspicion(shared_deaths=2)
    suspicion.died(5, alone=False)
    assert not suspicion.trial_tokens
    suspicion.died(5, alone=False)
    assert suspicion.trial_tokens == ACQUITTED_TOKENS
    assert not suspicion.convicted
    suspicion.died(6, alone=True)
    assert suspicion.convicted


def test_whoever_gets_past_the_place_of_a_death_is_cleared() -> None:
    suspicion = Suspicion(shared_deaths=2)
    for place in (5, 7):
        suspicion.died(place, alone=False)
    suspicion.progressed(7 + ACQUITTED_TOKENS - 1)
    assert suspicion.trial_tokens
    suspicion.progressed(7 + ACQUITTED_TOKENS)
    assert not suspicion.trial_tokens
    suspicion.died(40, alone=False)
    assert not suspicion.trial_tokens


def test_there_is_an_end_to_deaths_at_ever_new_places() -> None:
    suspicion = Suspicion(shared_deaths=2)
    for n in range(MOST_DEATHS):
        assert not suspicion.convicted
        suspicion.died(100 * n, alone=False)
        suspicion.progressed(100 * n + ACQUITTED_TOKENS)
    assert suspicion.convicted
