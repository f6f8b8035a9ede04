"""A suffix automaton has exactly the strings of its texts, each with its latest place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.drafting.ngrams import MAX_MATCH
from services.worker.drafting.suffix_automaton import EMPTY, END, SuffixAutomaton
from tests.unit.worker.drafting.verification import continuation, repetitive


@given(texts=st.lists(repetitive(), max_size=4), query=repetitive())
def test_places_are_those_of_a_naive_search(texts: list[list[int]], query: list[int]) -> None:
    automaton = SuffixAutomaton()
    for text in texts:
        for token in [*text, END]:
            automaton.append(token)
    suffix = EMPTY
    for n, token in enumerate(query, 1):
        suffix = automaton.step(suffix, token)
        place, expected = automaton.find(suffix), continuation(texts, query[:n])
        assert (place and (automaton.read(place.position, 8), place.match)) == (
            expected and (expected[0][:8], expected[1])
        )


@given(text=repetitive())
def test_places_are_the_latest_while_a_text_grows(text: list[int]) -> None:
    automaton, suffix = SuffixAutomaton(), EMPTY
    for n, token in enumerate(text, 1):
        automaton.append(token)
        suffix = automaton.step(suffix, token)
        place, expected = automaton.find(suffix), continuation([text[:n]], text[:n])
        assert (place and (automaton.read(place.position, n), place.match)) == expected


def test_a_match_is_bounded() -> None:
    automaton, suffix = SuffixAutomaton(), EMPTY
    for token in [7] * 500:
        automaton.append(token)
        suffix = automaton.step(suffix, token)
    place = automaton.find(suffix)
    assert place is not None
    assert place == (499, MAX_MATCH)
    assert automaton.read(place.position, 4) == [7]
