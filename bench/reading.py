"""What every bench hands back as data: `--json FILE` writes a list of readings.

A reading is one number with what it takes to compare it with another day's: its unit, and which way is better. Names
are paths, `area/circumstances/what`; `ryzanstein bench compare` goes by them, so they stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from services.cli.benchmarks.results import Better


@dataclass(frozen=True)
class Reading:
    """One measured number."""

    name: str
    value: float
    unit: str
    better: Better


def lower(name: str, value: float, unit: str) -> Reading:
    """A reading of which less is better: times, memory."""
    return Reading(name, value, unit, Better.LOWER)


def higher(name: str, value: float, unit: str) -> Reading:
    """A reading of which more is better: rates."""
    return Reading(name, value, unit, Better.HIGHER)


def write_readings(path: Path, readings: Iterable[Reading]) -> None:
    """Write them as JSON; raises ValueError for a name that comes twice."""
    found = list(readings)
    names = [reading.name for reading in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"readings with the same name: {', '.join(twice)}")
    path.write_text(json.dumps([asdict(reading) for reading in found], indent=1))


def read_readings(path: Path) -> list[Reading]:
    """What :func:`write_readings` wrote."""
    return [Reading(**{**entry, "better": Better(entry["better"])}) for entry in json.loads(path.read_text())]
