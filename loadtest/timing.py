"""Times of a streamed answer as its user sees them: the first text, the pace, the longest pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class AnswerTimes:
    """The times of one streamed answer, in milliseconds."""

    total: float
    first: float  # TTFT: from the request to the first text
    per_token: float  # TPOT: mean over the tokens after the first message
    longest_pause: float  # between two messages


class AnswerClock:
    """Records the arrival of every message of a stream; it starts when it is created."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._arrivals: list[float] = []

    def arrived(self) -> None:
        """Record a message with text."""
        self._arrivals.append(self._clock() - self._began)

    @property
    def messages(self) -> int:
        """The number of messages so far."""
        return len(self._arrivals)

    def times(self, tokens: int) -> AnswerTimes:
        """The times of the answer so far, which has `tokens` tokens; without a message, the wait lasts until now."""
        total = self._clock() - self._began
        first = self._arrivals[0] if self._arrivals else total
        last = self._arrivals[-1] if self._arrivals else total
        pauses = [later - earlier for earlier, later in pairwise(self._arrivals)]
        return AnswerTimes(
            total=total * 1e3,
            first=first * 1e3,
            per_token=(last - first) * 1e3 / max(tokens - 1, 1),
            longest_pause=max(pauses, default=0.0) * 1e3,
        )
