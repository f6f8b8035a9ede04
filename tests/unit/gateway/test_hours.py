"""The hours of a key."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import msgspec
import pytest

from services.gateway.tenants.hours import Hours


def at(text: str, zone: str = "UTC") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        (Hours(start="08:00", end="18:00"), ["2026-11-27T08:00", "2026-11-27T17:59"], ["2026-11-27T18:00"]),
        (Hours(start="08:00", end="18:00", days=("fri",)), ["2026-11-27T09:00"], ["2026-11-28T09:00"]),
        (
            Hours(start="22:00", end="06:00", days=("fri",)),  # into Saturday
            ["2026-11-27T23:00", "2026-11-28T05:59"],
            ["2026-11-27T05:00", "2026-11-28T06:00", "2026-11-28T23:00"],
        ),
    ],
)
def test_a_window_has_days_and_may_cross_midnight(hours: Hours, inside: list[str], outside: list[str]) -> None:
    assert all(hours.contain(at(text)) for text in inside)
    assert not any(hours.contain(at(text)) for text in outside)


def test_a_time_zone_applies_and_an_unknown_time_zone_is_named() -> None:
    berlin = Hours(start="08:00", end="18:00", timezone="Europe/Berlin")
    assert berlin.contain(at("2026-07-01T06:30"))
    assert not berlin.contain(at("2026-12-01T06:30"))
    with pytest.raises(msgspec.ValidationError, match="Mars/Phobos"):
        msgspec.json.decode(b'{"start": "08:00", "end": "18:00", "timezone": "Mars/Phobos"}', type=Hours)
