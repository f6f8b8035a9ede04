"""A peer that says nothing any more: its process is stopped, or its machine is gone without a word."""

from __future__ import annotations

from dataclasses import dataclass

TICK_S = 0.25


@dataclass(slots=True)
class Silence:
    """For how long nothing was heard, as far as this process could have heard it.

    To be asked every `TICK_S`. Time in which our own event loop stood still does not count: what the peer has said
    meanwhile is read only afterwards.
    """

    limit_s: float
    _silent_s: float = 0.0
    _asked_at: float | None = None

    def too_long(self, now: float, *, heard: bool) -> bool:
        """Whether the limit has passed; `heard`: something came since the last time, or nothing had to."""
        elapsed = now - self._asked_at if self._asked_at is not None else 0.0
        self._asked_at = now
        self._silent_s = 0.0 if heard else self._silent_s + min(elapsed, 2 * TICK_S)
        return self._silent_s > self.limit_s
