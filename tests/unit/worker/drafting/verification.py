"""How a step verifies drafts, and slow references that say which draft is the right one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from services.worker.drafting.draft import Drafter
from services.worker.drafting.ngrams import MAX_MATCH, MIN_MATCH, NEARBY, SIZES

MOST = 8


def steps(drafter: Drafter, text: list[int], answer: Sequence[int], most: int = MOST) -> int:
    """Number of steps that append `answer` to `text`; a step takes the right tokens of a draft and draws one more."""
    n_steps, end = 0, len(text) + len(answer)
    while len(text) < end:
        rest = answer[len(answer) - (end - len(text)) :]
        draft = drafter.draft(text, most)
        n_accepted = common(draft.token_ids, rest[:-1]) if draft else 0
        text += rest[: n_accepted + 1]
        n_steps += 1
    return n_steps


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def suffix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common suffix, at most MAX_MATCH."""
    return common(left[::-1][:MAX_MATCH], right[::-1])


def latest(source: Sequence[int], tail: Sequence[int]) -> int | None:
    """The latest place in `source` after the longest n-gram of `tail` that it has, its own end left out."""
    places = (
        place
        for size in SIZES
        for place in range(len(source) - 1, size - 1, -1)
        if list(source[place - size : place]) == list(tail[-size:])
    )
    return next(places, None)


def nearby(source: Sequence[int], tail: Sequence[int], anchor: int) -> int | None:
    """The first place of the longest match within NEARBY tokens after `anchor`."""
    matches = {n: suffix(source[:n], tail) for n in range(anchor + 1, min(anchor + NEARBY + 1, len(source)))}
    return next((n for n, match in matches.items() if match == max(matches.values()) > 1), None)


def continuation(texts: Sequence[list[int]], tail: Sequence[int]) -> tuple[list[int], int] | None:
    """The latest continuation in `texts` of the longest suffix of `tail` that has one, and this suffix's length."""
    places = [(suffix(text[:place], tail), text[place:]) for text in texts for place in range(1, len(text))]
    longest = max((length for length, _ in places), default=0)
    rest = next((rest for length, rest in reversed(places) if length == longest), [])
    return (rest, longest) if longest >= MIN_MATCH else None


def repetitive() -> st.SearchStrategy[list[int]]:
    """Texts of few tokens, some longer than MAX_MATCH and periodic."""
    tokens = st.lists(st.integers(0, 2), max_size=12)
    return st.builds(lambda period, n, rest: period * n + rest, tokens, st.sampled_from([1, 1, 2, 9]), tokens)


class Reference:
    """The results of a cursor and an index together, by a search over everything."""

    def __init__(self, *, starts: bool) -> None:
        self.position = 0
        self.following = starts

    def advance(self, source: Sequence[int], new: Sequence[int]) -> None:
        if self.following:
            n_followed = common(source[self.position :], new)
            self.position += n_followed
            self.following = n_followed == len(new)

    def settle(self, source: Sequence[int], tail: Sequence[int], candidate: int | None) -> int:
        """Choose between the followed place and `candidate`; returns the match."""
        match = suffix(source[: self.position], tail) if self.following else 0
        if candidate is not None and (better := suffix(source[:candidate], tail)) > match:
            self.position, self.following, match = candidate, True, better
        return match
