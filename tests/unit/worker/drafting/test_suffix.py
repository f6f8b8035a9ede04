"""Drafts from a tenant's recent answers: the latest longest match, bounded, and of one scope."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.drafting.suffix import TOKENS_A_CALL, SuffixLookup, TenantTexts
from services.worker.drafting.suffix_automaton import END
from tests.unit.worker.drafting.verification import MOST, continuation, steps

ANSWERS = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 3), max_size=12)), max_size=10)


def split(stream: list[int]) -> list[list[int]]:
    """The texts of a generation."""
    texts: list[list[int]] = [[]]
    for token in stream:
        if token == END:
            texts.append([])
        else:
            texts[-1].append(token)
    return texts


@given(
    answers=st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=12),
    growths=st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=12, max_size=12),
    generation=st.integers(14, 40),
    most=st.integers(0, MOST),
)
def test_drafts_are_those_of_a_naive_search(
    answers: list[list[int]], growths: list[list[int]], generation: int, most: int
) -> None:
    texts = TenantTexts(generation)
    drafter, stream, text = SuffixLookup(texts, "a"), list[int](), list[int]()
    for answer, growth in zip(answers, growths, strict=False):
        texts.add("a", answer)
        stream += [*answer, END]
        text += growth
        n_generation = (len(stream) - 1) // generation
        starts = [start * generation for start in (n_generation, n_generation - 1) if start >= 0]
        candidates = [continuation(split(stream[start : start + generation]), text) for start in starts]
        expected = max((c for c in candidates if c), key=lambda candidate: candidate[1], default=None)
        draft = drafter.draft(text, most)
        if expected is None or most == 0:
            assert draft is None
        else:
            assert draft == ("suffix", expected[0][:most], expected[1])


@given(answers=ANSWERS, text=st.lists(st.integers(0, 3), max_size=20), generation=st.integers(8, 40))
def test_drafts_do_not_depend_on_answers_of_another_scope(
    answers: list[tuple[str, list[int]]], text: list[int], generation: int
) -> None:
    shared, alone = TenantTexts(generation), TenantTexts(generation)
    one, other = SuffixLookup(shared, "a"), SuffixLookup(alone, "a")
    for scope, answer in answers:
        shared.add(scope, answer)
        if scope == "a":
            alone.add(scope, answer)
        for n in range(len(text)):
            assert one.draft(text[:n], MOST) == other.draft(text[:n], MOST)


def test_an_answer_is_no_source_for_another_scope() -> None:
    texts = TenantTexts()
    texts.add("a", [1, 2, 3, 4, 5])
    assert SuffixLookup(texts, "b").draft([1, 2, 3], 4) is None
    assert SuffixLookup(texts, "").draft([1, 2, 3], 4) is None
    assert SuffixLookup(texts, "a").draft([1, 2, 3], 4) == ("suffix", [4, 5], 3)


def test_the_latest_answer_is_followed_up_to_its_end() -> None:
    texts = TenantTexts()
    texts.add("a", [1, 2, 3, 10, 11])
    texts.add("a", [1, 2, 3, 20])
    texts.add("a", [9, 1, 2, 3])
    drafter = SuffixLookup(texts, "a")
    assert drafter.draft([8, 1, 2, 3], 4) == ("suffix", [20], 3)
    assert drafter.draft([8, 1, 2, 3, 20], 4) is None, "the answer ends, and no text spans two answers"
    assert drafter.draft([8, 1, 2, 3, 20, 20, 3, 10], 4) == ("suffix", [11], 2)


def test_a_repeated_answer_takes_few_steps() -> None:
    texts, answer = TenantTexts(), list(range(180))
    texts.add("a", answer)
    assert steps(SuffixLookup(texts, "a"), [1000], answer) <= 2 + 180 // (MOST + 1)


def test_a_long_answer_is_taken_over_several_calls() -> None:
    texts, answer = TenantTexts(), list(range(3 * TOKENS_A_CALL))
    drafter, text = SuffixLookup(texts, "a"), answer[-10:-5]
    texts.add("a", answer)
    assert drafter.draft(text, 4) is None
    assert drafter.draft(text, 4) == ("suffix", answer[-5:-1], 5)


def test_generations_are_bounded_and_older_answers_forgotten() -> None:
    texts, size = TenantTexts(generation_tokens=3 * 31), 0
    answers = [list(range(n, n + 30)) for n in range(0, 3000, 30)]
    for answer in answers:
        texts.add("a", answer)
        size = max(size, sum(len(source.tokens) for source in texts.generations("a")))
        assert SuffixLookup(texts, "a").draft(answer[:5], 2) is not None
    assert size == 2 * 3 * 31
    known = [SuffixLookup(texts, "a").draft(answer[10:15], 2) is not None for answer in answers]
    assert known == [False] * 96 + [True] * 4, "three answers in the older generation, the last one in the newer"


def test_waiting_answers_are_bounded_and_joined_to_no_other_text() -> None:
    size = 2 * TOKENS_A_CALL
    texts = TenantTexts(generation_tokens=size)
    oldest = range(size - 1)
    texts.add("a", oldest)
    texts.add("a", range(10_000, 10_000 + size - 10))
    for _ in range(10):
        generations = texts.generations("a")
    assert [len(source.tokens) for source in generations] == [TOKENS_A_CALL, size]
    assert list(generations[1].tokens[TOKENS_A_CALL : TOKENS_A_CALL + 2]) == [END, oldest[-7]]
    texts.add("b", range(3 * size))
    for _ in range(10):
        generations = texts.generations("b")
    assert [len(source.tokens) for source in generations] == [size]
    assert list(generations[0].tokens[-2:]) == [3 * size - 1, END]


def test_the_least_recently_used_scope_is_dropped() -> None:
    texts = TenantTexts(most_scopes=3)
    for scope in "abc":
        texts.add(scope, [1, 2, 3])
    lookups = {scope: SuffixLookup(texts, scope) for scope in "abcd"}
    assert lookups["a"].draft([1, 2], 4) is not None
    texts.add("d", [1, 2, 3])
    known = {scope for scope, lookup in lookups.items() if lookup.draft([1, 2], 4) is not None}
    assert known == {"a", "c", "d"}
