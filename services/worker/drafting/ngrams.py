"""Places of n-grams in a list of tokens, looked up in constant time, and the place that a text follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SIZES = (8, 4, 2)  # longest first; pairs recur by chance, but find a source again soonest after an edit
MIN_MATCH = SIZES[-1]
MAX_MATCH = 64  # compared tokens
TOKENS_A_CALL = 2048  # one or two milliseconds of indexing
NEARBY = 64  # tokens after a divergence that are searched for the way back


class Place(NamedTuple):
    """A position in a source, and how many tokens before it equal the last tokens of a text."""

    position: int
    match: int  # at most MAX_MATCH


def match_length(source: Sequence[int], position: int, tail: Sequence[int]) -> int:
    """Length of the longest common suffix of `source[:position]` and `tail`, which has at most MAX_MATCH tokens."""
    length = 0
    for ours, theirs in zip(reversed(source[max(0, position - MAX_MATCH) : position]), reversed(tail), strict=False):
        if ours != theirs:
            break
        length += 1
    return length


class NgramIndex:
    """The place after the latest occurrence of every n-gram in a list of tokens, the list's end left out.

    Keys are hashes of n-grams, which take less memory than n-grams: about 200 bytes a token in all.
    """

    def __init__(self) -> None:
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self._end = 1  # first place that is not indexed

    def extend(self, source: Sequence[int]) -> None:
        """Index the next TOKENS_A_CALL places at most; `source` is the list of the earlier calls, or begins with it."""
        end = min(len(source), self._end + TOKENS_A_CALL)
        for size, latest in zip(SIZES, self._latest, strict=True):
            start = max(self._end, size)
            tokens = tuple(source[start - size : end])
            for n in range(end - start):
                latest[hash(tokens[n : n + size])] = start + n
        self._end = max(self._end, end)

    def find(self, source: Sequence[int], tail: tuple[int, ...]) -> Place | None:
        """The latest place in `source` after the longest n-gram that ends `tail`, a text's last MAX_MATCH tokens."""
        for size, latest in zip(SIZES, self._latest, strict=True):
            position = latest.get(hash(tail[-size:]))
            if position is not None and (match := match_length(source, position, tail)) >= size:
                return Place(position, match)
        return None


class Cursor:
    """The place in a source that a text follows, token by token."""

    def __init__(self, n_seen: int, *, following: bool) -> None:
        self.position = 0  # next token of the source; after a divergence the token that the text did not take
        self.match = 0  # tokens before it that equal the text's last ones, at most MAX_MATCH
        self.following = following
        self._n_seen = n_seen  # tokens of the text up to the last call

    def follow(self, source: Sequence[int], text: Sequence[int]) -> None:
        """Move along `source` with the tokens that `text` has grown by, up to the first token that differs."""
        new = text[self._n_seen :] if self.following else ()
        self._n_seen = len(text)
        for token in new:
            if self.position >= len(source) or source[self.position] != token:
                self.following, self.match = False, 0
                return
            self.position += 1
            self.match = min(self.match + 1, MAX_MATCH)

    def nearby(self, source: Sequence[int], tail: tuple[int, ...]) -> Place | None:
        """The first place of the longest match, MIN_MATCH at least, among the NEARBY tokens after a divergence."""
        window = source[self.position : self.position + NEARBY]
        ends = [n for n, token in enumerate(window, self.position + 1) if token == tail[-1]]
        places = (Place(end, match_length(source, end, tail)) for end in ends if end < len(source))
        return max((place for place in places if place.match >= MIN_MATCH), key=lambda place: place.match, default=None)

    def prefer(self, place: Place | None) -> None:
        """Follow `place` instead if its match is the longer one."""
        if place is not None and place.match > self.match:
            self.position, self.match, self.following = place.position, place.match, True
