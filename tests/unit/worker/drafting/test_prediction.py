"""Drafts from the text that the client expects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.drafting.ngrams import SIZES, TOKENS_A_CALL
from services.worker.drafting.prediction import PredictionLookup
from tests.unit.worker.drafting.verification import MOST, Reference, latest, nearby, steps

TOKENS = st.integers(0, 3)
PROMPT = [7, 8, 9]


@given(
    prediction=st.lists(TOKENS, max_size=40),
    text=st.lists(TOKENS, max_size=10),
    moves=st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST), TOKENS), max_size=30),
)
def test_drafts_are_those_of_a_naive_search(
    prediction: list[int], text: list[int], moves: list[tuple[int, int, int]]
) -> None:
    drafter, reference, n_seen = PredictionLookup(prediction, len(PROMPT)), Reference(starts=True), 0
    for most, n_accepted, drawn in moves:
        reference.advance(prediction, text[n_seen:])
        n_seen = len(text)
        if not reference.following:
            reference.settle(prediction, text, nearby(prediction, text, reference.position))
        match = reference.settle(prediction, text, latest(prediction, text))
        proposed = prediction[reference.position : reference.position + most] if reference.following else []
        draft = drafter.draft([*PROMPT, *text], most)
        assert draft == (("prediction", proposed, match) if proposed else None)
        text += [*proposed[:n_accepted], drawn]


def test_the_first_draft_is_the_beginning_of_the_prediction() -> None:
    prediction = list(range(50))
    assert PredictionLookup(prediction, 3).draft(PROMPT, 4) == ("prediction", [0, 1, 2, 3], 0)
    resumed = [*PROMPT, *prediction[:20]]
    assert PredictionLookup(prediction, 3).draft(resumed, 4) == ("prediction", [20, 21, 22, 23], 20)


def test_the_prompt_is_not_looked_up_in_the_prediction() -> None:
    drafter = PredictionLookup([1, 2, *PROMPT, 5], 3)
    assert drafter.draft(PROMPT, 2) == ("prediction", [1, 2], 0)
    assert drafter.draft([*PROMPT, 9], 2) is None


def replaced(source: list[int]) -> list[int]:
    return [*source[:90], 1000, 1001, 1002, *source[93:]]


def inserted(source: list[int]) -> list[int]:
    return [*source[:90], 1000, 1001, 1002, *source[90:]]


def deleted(source: list[int]) -> list[int]:
    return [*source[:90], *source[93:]]


def preceded(source: list[int]) -> list[int]:
    return [1000, 1001, 1002, *source]


@pytest.mark.parametrize("edit", [replaced, inserted, deleted, preceded])
def test_an_edit_costs_its_own_tokens_and_a_pair(edit: object) -> None:
    assert callable(edit)
    source = list(range(180))
    unedited = steps(PredictionLookup(source, 3), list(PROMPT), source)
    assert unedited == 180 // (MOST + 1)
    edited = steps(PredictionLookup(source, 3), list(PROMPT), edit(source))
    assert edited <= unedited + 3 + SIZES[-1]


def test_the_occurrence_nearest_after_the_divergence_is_followed() -> None:
    line = [1, 2, 3]
    prediction = [*line, 10, 11, *line, 20, 21, *line, 30, 31]
    text = [*PROMPT, *line, 10, 11]
    drafter = PredictionLookup(prediction, 3)
    assert drafter.draft(text, 2) == ("prediction", [1, 2], 5)
    text += [99, *line]
    assert drafter.draft(text, 2) == ("prediction", [20, 21], 3), "not the last line"


def test_a_prediction_that_ends_is_left() -> None:
    drafter = PredictionLookup([1, 2, 3], 3)
    assert drafter.draft([*PROMPT, 1, 2], 8) == ("prediction", [3], 2)
    assert drafter.draft([*PROMPT, 1, 2, 3], 8) is None
    assert drafter.draft([*PROMPT, 1, 2, 3, 4], 8) is None
    assert PredictionLookup([], 3).draft(PROMPT, 8) is None
    assert PredictionLookup([1], 3).draft(PROMPT, 0) is None


def test_a_long_prediction_is_indexed_over_several_calls() -> None:
    prediction = list(range(3 * TOKENS_A_CALL))
    drafter = PredictionLookup(prediction, 3)
    text = [*PROMPT, 99999, *prediction[-20:-10]]
    assert [drafter.draft(text, 1) for _ in range(2)] == [None, None]
    assert drafter.draft(text, 1) == ("prediction", [prediction[-10]], 10)
