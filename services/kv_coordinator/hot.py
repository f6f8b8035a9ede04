"""Hot prefixes: counts look-ups per prefix, in bounded memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def _marks(length: int) -> Iterator[int]:
    """Prefix lengths that are counted: 1, 2, 4, ... blocks. So a shared prompt's length is known to a factor of two."""
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
    """Misra-Gries counters (1982): a prefix with more than `1/capacity` of all counts is never missed.

    At more than twice the capacity, a median is subtracted from all counters, and counters that reach zero are
    dropped: at most `capacity` remain. So counts are never too high, and too low by at most `1/capacity` of all counts.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: dict[int, int] = {}

    def count(self, chain: Sequence[int]) -> None:
        """Count a look-up of a prompt."""
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
        """The `n` prefixes with the most look-ups; a single look-up does not count as hot."""
        best = heapq.nlargest(n, self._counts.items(), key=lambda item: item[1])
        return [HotPrefix(block, count) for block, count in best if count > 1]


class PinLimitError(Exception):
    """Too many prefixes are pinned."""


class Pins:
    """Prefixes that a caller of `Pin` has declared hot, until they expire."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._expires: dict[int, float] = {}

    def pin(self, block: int, expires_at: float, now: float) -> None:
        """Pin the chain that ends in `block`, or move its expiry; raises PinLimitError."""
        if block not in self._expires and len(self.active(now)) >= self._limit:
            raise PinLimitError(f"{self._limit} prefixes are pinned")
        self._expires[block] = expires_at

    def active(self, now: float) -> list[int]:
        """The blocks that are pinned now."""
        self._expires = {block: at for block, at in self._expires.items() if at > now}
        return list(self._expires)
