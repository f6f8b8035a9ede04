"""The rows of a plan, an hour of one variant of the installation each, and the floors that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from services.planner.planning import Need
from services.router.scaling.pools import WEEKDAYS


@dataclass(frozen=True, slots=True)
class PlanRow:
    """An hour of one variant of the installation."""

    curve: str
    policy: str
    tier: str
    start: float  # begin of the hour, in seconds since the epoch, or since the trace began
    hour: str
    requests: int
    need: Need
    price: float | None  # price of the hour, in the unit of --price
    kilojoules: float | None


def schedule(rows: Sequence[PlanRow], without_plan: int = 0) -> list[dict[str, object]]:
    """Workers by hour and weekday, in UTC: the most that a row of this hour needs.

    `without_plan`: the floor of an hour that no fleet can serve.
    """
    floors: dict[tuple[int, int], int] = {}
    for row in rows:
        at = datetime.fromtimestamp(row.start, UTC)
        workers = row.need.workers or without_plan
        floors[at.hour, at.weekday()] = max(floors.get((at.hour, at.weekday()), 0), workers)
    days: dict[tuple[int, int], list[str]] = {}
    for (hour, weekday), workers in sorted(floors.items()):
        days.setdefault((hour, workers), []).append(WEEKDAYS[weekday])
    return [{"hour": hour, "min": workers, "days": on} for (hour, workers), on in days.items()]
