"""Buckets of time: every count is kept by minute, by hour and by day, each for its own time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Width = Literal["1m", "1h", "1d"]
WIDTHS: dict[Width, int] = {"1m": 60, "1h": 3600, "1d": 86_400}  # seconds


def start_of(seconds: float, width: Width) -> int:
    """The start of the bucket that holds a time, both in seconds since the epoch; days begin at midnight, UTC."""
    return int(seconds // WIDTHS[width]) * WIDTHS[width]


def starts(begin: int, end: int, width: Width, most: int) -> tuple[list[int], int | None]:
    """The first `most` buckets that overlap [begin, end), and the start of the next one if there are more."""
    last = start_of(end - 1, width) if end > begin else start_of(begin, width) - 1
    every = range(start_of(begin, width), last + 1, WIDTHS[width])
    return list(every[:most]), every[most] if len(every) > most else None


@dataclass(frozen=True, slots=True)
class Retention:
    """How long buckets are kept after their end, in seconds; 0: none of the width are written."""

    minutes_s: int
    hours_s: int
    days_s: int

    def of(self, width: Width) -> int:
        """The time of a width."""
        return {"1m": self.minutes_s, "1h": self.hours_s, "1d": self.days_s}[width]

    def oldest(self, width: Width, now: float) -> int:
        """The start of the oldest bucket of a width that is still whole."""
        return start_of(now - self.of(width), width)

    def left_s(self, start: int, width: Width, now: float) -> int:
        """How long the bucket that begins at `start` is still kept."""
        return int(start + WIDTHS[width] + self.of(width) - now) if self.of(width) else 0
