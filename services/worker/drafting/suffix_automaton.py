"""A suffix automaton: all strings of tokens that occur in some texts, and the latest place of each.

It is built online (Blumer et al., 1985). A state is a set of strings that end at the same places; its link leads to the
state of their next shorter suffixes. Most states have a single transition: arrays hold it, dicts hold further ones.
"""

from __future__ import annotations

from array import array
from itertools import takewhile
from typing import NamedTuple

from services.worker.drafting.ngrams import MAX_MATCH, MIN_MATCH, Place

ROOT = 0
END = -1  # token between two texts; no text has it
_NONE = -1  # no state
_UNSET = -2  # token of a state without transitions


class Suffix(NamedTuple):
    """The longest string of the automaton, of at most MAX_MATCH tokens, that ends a text."""

    state: int
    length: int


EMPTY = Suffix(ROOT, 0)


class SuffixAutomaton:
    """The strings of some texts. It takes amortised constant time and 100 to 200 bytes a token."""

    def __init__(self) -> None:
        self.tokens = array("i")  # all texts, one after the other
        self._lengths = array("i")  # longest string by state
        self._links = array("i")
        self._places = array("i")  # latest place with a next token in the same text; 0: none
        self._first_tokens = array("i")  # first transition: its token
        self._first_targets = array("i")  # first transition: its state
        self._further: dict[int, dict[int, int]] = {}  # other transitions by state, then by token
        self._last = self._add_state(0, _NONE)
        self._suffix = EMPTY  # the newest text's

    def append(self, token: int) -> None:
        """Add a token to the newest text, or END."""
        if token != END:
            self._mark()
        self._add(token)
        self._suffix = self.step(self._suffix, token)

    def step(self, suffix: Suffix, token: int) -> Suffix:
        """The longest suffix of a text after a further token."""
        state, length = suffix
        while (target := self._next(state, token)) == _NONE:
            if state == ROOT:
                return EMPTY
            state = self._links[state]
            length = self._lengths[state]
        length = min(length + 1, MAX_MATCH)
        while self._lengths[self._links[target]] >= length:  # a capped suffix, or a state that was split
            target = self._links[target]
        return Suffix(target, length)

    def find(self, suffix: Suffix) -> Place | None:
        """The latest place after the longest suffix that a text continues; None below MIN_MATCH tokens."""
        state, length = suffix
        while state != ROOT and self._places[state] == 0:
            state = self._links[state]
            length = self._lengths[state]
        return Place(self._places[state], length) if length >= MIN_MATCH else None

    def read(self, place: int, most: int) -> list[int]:
        """At most `most` tokens from a place on, up to the end of its text."""
        return list(takewhile(lambda token: token != END, self.tokens[place : place + most]))

    def _mark(self) -> None:
        """Let the newest text's suffixes have their latest place at its end; they are in MAX_MATCH states at most."""
        state, place = self._suffix.state, len(self.tokens)
        while state != ROOT:
            self._places[state] = place
            state = self._links[state]

    def _add(self, token: int) -> None:
        """Add the strings that end with a new token."""
        self.tokens.append(token)
        state = self._last
        self._last = last = self._add_state(self._lengths[state] + 1, ROOT)
        while state != _NONE and (target := self._next(state, token)) == _NONE:
            self._connect(state, token, last)
            state = self._links[state]
        if state != _NONE:
            self._links[last] = self._split(state, token, target)

    def _split(self, state: int, token: int, target: int) -> int:
        """The state of the strings of `state` followed by `token`, apart from the longer ones in `target`."""
        length = self._lengths[state] + 1
        if self._lengths[target] == length:
            return target
        clone = self._add_state(length, self._links[target])
        self._places[clone] = self._places[target]
        self._first_tokens[clone], self._first_targets[clone] = self._first_tokens[target], self._first_targets[target]
        if target in self._further:
            self._further[clone] = self._further[target].copy()
        self._links[target] = clone
        while state != _NONE and self._next(state, token) == target:
            self._connect(state, token, clone)
            state = self._links[state]
        return clone

    def _add_state(self, length: int, link: int) -> int:
        self._lengths.append(length)
        self._links.append(link)
        self._places.append(0)
        self._first_tokens.append(_UNSET)
        self._first_targets.append(_NONE)
        return len(self._links) - 1

    def _next(self, state: int, token: int) -> int:
        if self._first_tokens[state] == token:
            return self._first_targets[state]
        further = self._further.get(state)
        return _NONE if further is None else further.get(token, _NONE)

    def _connect(self, state: int, token: int, target: int) -> None:
        if self._first_tokens[state] in (token, _UNSET):
            self._first_tokens[state], self._first_targets[state] = token, target
        else:
            self._further.setdefault(state, {})[token] = target
