"""Hot prefixes: how often which prefixes are asked for, in bounded memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def _marks(length: int) -> Iterator[int]:
    """Positions that are counted: 1, 2, 4, ... blocks. A shared system prompt is seen to within a factor of two."""
    mark = 1
    while mark <= length:
        yield mark
        mark *= 2


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix, named by the hash of its last block."""

    block: int
    lookups: int


class HotPrefixes:
    """Misra-Gries counters (1982): a prefix asked for more often than `1/capacity` of all counts is never missed.

    Counters may be added up to twice the capacity; then the median is taken off all of them and what is left of at
    most half of them stays. Counts are therefore too low by at most that bound, never too high.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: dict[int, int] = {}

    def count(self, chain: Sequence[int]) -> None:
        """A prompt was asked for."""
        counts = self._counts
        for mark in _marks(len(chain)):
            block = chain[mark - 1]
            counts[block] = counts.get(block, 0) + 1
        if len(counts) > 2 * self._capacity:
            self._prune()

    def _prune(self) -> None:
        floor = heapq.nlargest(self._capacity + 1, self._counts.values())[-1]
        self._counts = {block: count - floor for block, count in self._counts.items() if count > floor}

    def top(self, n: int) -> list[HotPrefix]:
        """The `n` most asked for; one lookup makes no prefix hot."""
        best = heapq.nlargest(n, self._counts.items(), key=lambda item: item[1])
        return [HotPrefix(block, count) for block, count in best if count > 1]


class PinLimitError(Exception):
    """Too many prefixes are pinned."""


class Pins:
    """Prefixes that are hot because somebody said so, until they expire."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._expires: dict[int, float] = {}

    def pin(self, block: int, expires_at: float, now: float) -> None:
        """Pin the chain that ends in `block`, or move its expiry; raises PinLimitError."""
        if block not in self._expires and len(self.active(now)) >= self._limit:
            raise PinLimitError(f"{self._limit} prefixes are pinned")
        self._expires[block] = expires_at

    def active(self, now: float) -> list[int]:
        """What is pinned now."""
        self._expires = {block: at for block, at in self._expires.items() if at > now}
        return list(self._expires)
