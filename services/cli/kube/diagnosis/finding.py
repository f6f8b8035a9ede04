"""What is wrong, why, and what to type."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is, or was, wrong with one object."""

    where: str  # e.g. pod/ryzanstein-gateway-0
    what: str  # how it shows: Pending, not ready, restarting, unscraped, unreachable
    why: str
    do: tuple[str, ...]  # commands, or values of the chart
    over: bool = False  # it was wrong and is well now
