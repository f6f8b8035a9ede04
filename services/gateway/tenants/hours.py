"""The hours in which a key is valid: a daily window on some days of the week."""

from __future__ import annotations

from datetime import datetime, time, timedelta
from functools import lru_cache
from typing import Annotated, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from services.common.patterns import END

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
TimeOfDay = Annotated[str, msgspec.Meta(pattern=r"^([01]\d|2[0-3]):[0-5]\d" + END)]
WEEK: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class Hours(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A window from `start` to `end` (exclusive); where `end` is not later, it ends on the next day."""

    start: TimeOfDay
    end: TimeOfDay
    days: tuple[Day, ...] = WEEK  # on which the window starts
    timezone: str = "UTC"  # a name of the IANA database

    def __post_init__(self) -> None:
        try:
            _zone(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(f"unknown time zone {self.timezone!r}: a name such as Europe/Berlin or UTC") from error

    def contain(self, seconds: float) -> bool:
        """Whether a time, in seconds since the epoch, is within a window."""
        now = datetime.fromtimestamp(seconds, _zone(self.timezone))
        start, end, clock = time.fromisoformat(self.start), time.fromisoformat(self.end), now.time()
        today, yesterday = WEEK[now.weekday()], WEEK[(now - timedelta(days=1)).weekday()]
        if start < end:
            return today in self.days and start <= clock < end
        return (today in self.days and clock >= start) or (yesterday in self.days and clock < end)


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
