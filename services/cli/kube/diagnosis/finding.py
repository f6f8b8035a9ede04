"""The result of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of one object, its cause, and the commands that help."""

    where: str  # e.g. pod/ryzanstein-gateway-0
    what: str  # the symptom: Pending, not ready, restarting, unscraped, unreachable
    why: str
    do: tuple[str, ...]  # commands, or values of the chart
    harmless: bool = False  # shown, and no failure: over, or as it should be in some clusters
