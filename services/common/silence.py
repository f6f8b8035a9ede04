"""Detects a silent peer: a stopped process, or a machine that vanished without closing its connections."""

from __future__ import annotations

from dataclasses import dataclass

TICK_S = 0.25


@dataclass(slots=True)
class Silence:
    """How long the peer has been silent. Call `too_long` every `TICK_S`.

    Time in which this process's event loop was blocked does not count: it reads the peer's messages only afterwards.
    """

    limit_s: float
    _silent_s: float = 0.0
    _asked_at: float | None = None

    def too_long(self, now: float, *, heard: bool) -> bool:
        """Whether the limit has passed; `heard`: a message came since the last call, or none was due."""
        elapsed = now - self._asked_at if self._asked_at is not None else 0.0
        self._asked_at = now
        self._silent_s = 0.0 if heard else self._silent_s + min(elapsed, 2 * TICK_S)
        return self._silent_s > self.limit_s
