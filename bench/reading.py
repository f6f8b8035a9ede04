"""Readings, the results of benches as data: `--json FILE` writes a list of them.

A reading is a number with its unit and whether lower or higher is better. Its name is a path,
`area/circumstances/what`. `ryzanstein bench compare` matches readings by name, so names must not change.
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
    """A reading that improves by falling, such as a time or memory."""
    return Reading(name, value, unit, Better.LOWER)


def higher(name: str, value: float, unit: str) -> Reading:
    """A reading that improves by rising, such as a rate."""
    return Reading(name, value, unit, Better.HIGHER)


def write_readings(path: Path, readings: Iterable[Reading]) -> None:
    """Write readings as JSON; raises ValueError for a duplicate name."""
    listed = list(readings)
    names = [reading.name for reading in listed]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"readings with the same name: {', '.join(twice)}")
    path.write_text(json.dumps([asdict(reading) for reading in listed], indent=1))


def read_readings(path: Path) -> list[Reading]:
    """Read a file of :func:`write_readings`."""
    return [Reading(**{**entry, "better": Better(entry["better"])}) for entry in json.loads(path.read_text())]
