"""Drafts from a request's own text: the latest longest match, at a bounded cost."""

from __future__ import annotations

from typing import SupportsIndex, overload

from hypothesis import given
from hypothesis import strategies as st

from services.worker.drafting.ngrams import TOKENS_A_CALL
from services.worker.drafting.prompt_lookup import PromptLookup
from tests.unit.worker.drafting.verification import MOST, Reference, common, latest, steps

TOKENS = st.integers(0, 3)


@given(
    text=st.lists(TOKENS, max_size=40),
    moves=st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST), TOKENS), max_size=30),
)
def test_drafts_are_those_of_a_naive_search(text: list[int], moves: list[tuple[int, int, int]]) -> None:
    drafter, reference, n_seen = PromptLookup(), Reference(starts=False), 0
    for most, n_accepted, drawn in moves:
        reference.advance(text, text[n_seen:])
        n_seen = len(text)
        match = reference.settle(text, text, latest(text, text))
        draft = drafter.draft(text, most)
        if draft is None:
            assert most == 0 or not reference.following
            accepted: list[int] = []
        else:
            source = list(text)
            while len(source) < reference.position + most:
                source.append(source[reference.position + len(source) - len(text)])
            assert list(draft.token_ids) == source[reference.position : reference.position + most]
            assert draft.match == match
            assert draft.drafter == "prompt_lookup"
            accepted = list(draft.token_ids[:n_accepted])
        text += [*accepted, drawn]


def test_a_followed_place_is_left_only_for_a_longer_match() -> None:
    drafter = PromptLookup()
    text = [1, 2, 3, 4, 5, 6, 90, 3, 4, 91, 1, 2]
    assert drafter.draft(text, 4) == ("prompt_lookup", [3, 4, 5, 6], 2)
    text += [3, 4]
    assert drafter.draft(text, 2) == ("prompt_lookup", [5, 6], 4), "the later 3, 4 has the shorter match"
    text += [91, 1]
    assert drafter.draft(text, 2) == ("prompt_lookup", [2, 3], 4)


def test_a_longer_match_takes_over_from_a_followed_place() -> None:
    drafter = PromptLookup()
    text = [1, 2, 3, 4, 5, 90, 2, 3, 4, 91, 92, 1, 2, 3]
    assert drafter.draft(text, 2) == ("prompt_lookup", [4, 91], 2)
    text.append(4)
    assert drafter.draft(text, 2) == ("prompt_lookup", [5, 90], 4)


def test_a_repetition_is_continued_beyond_the_end_of_the_text() -> None:
    assert PromptLookup().draft([9, 1, 2, 3, 1, 2, 3], 7) == ("prompt_lookup", [1, 2, 3, 1, 2, 3, 1], 3)
    assert PromptLookup().draft([5, 5, 5], 2) == ("prompt_lookup", [5, 5], 2)


def test_texts_without_repetition_have_no_draft() -> None:
    assert PromptLookup().draft([], 4) is None
    assert PromptLookup().draft([1, 1], 4) is None
    assert PromptLookup().draft(list(range(100)), 4) is None
    assert PromptLookup().draft([1, 2, 1, 2], 0) is None


def test_equal_hashes_of_different_tokens_are_no_match() -> None:
    collides = (1 << 61) - 1
    assert hash((0, 1)) == hash((collides, 1))
    assert PromptLookup().draft([0, 1, 7, 5, collides, 1], 4) is None


class CountedList(list[int]):
    """Counts the tokens that are read."""

    n_read = 0

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | list[int]:
        self.n_read += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
        return super().__getitem__(index)


def test_a_long_prompt_is_indexed_over_several_calls() -> None:
    n_calls = 8
    prompt = CountedList(range(n_calls * TOKENS_A_CALL))
    prompt += prompt[-100:-90]
    drafter = PromptLookup()
    drafts = []
    for _ in range(n_calls):
        prompt.n_read = 0
        drafts.append(drafter.draft(prompt, MOST))
        assert prompt.n_read < 4 * TOKENS_A_CALL
    assert drafts[:-1] == [None] * (n_calls - 1)
    assert drafts[-1] is not None
    assert list(drafts[-1].token_ids) == prompt[-100:-92]
    assert drafts[-1].match == 10


def test_an_edited_copy_takes_few_steps() -> None:
    source = list(range(400))
    answer = [*source[:100], 1000, 1001, *source[102:250], *source[260:]]
    n_steps = steps(PromptLookup(), [*source, 2000], answer)
    assert n_steps < len(answer) / 5
    assert common(answer, source) == 100
