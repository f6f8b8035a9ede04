"""Durations as people write them."""

from __future__ import annotations

import re

EXPECTED = "seconds, or numbers with units (ms, s, m, h, d) such as 5m or 1h30m"
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|d)")
_WHOLE = re.compile(rf"(-?)(?:([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)|((?:{_PART.pattern})+))")


def read_duration(text: str) -> float:
    """Seconds of a duration such as `90`, `5m`, `1h30m` or `-1`. Raises ValueError."""
    match = _WHOLE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected {EXPECTED}, found {text[:60]!a}")
    sign = -1.0 if match[1] else 1.0
    if match[2]:
        return sign * float(match[2])
    return sign * sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(match[3]))
