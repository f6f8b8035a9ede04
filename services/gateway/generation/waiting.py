"""Clients' limits on the wait for a model that starts, and its reports to streams."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ryzanstein.v1 import routing_pb2

from services.gateway.errors import invalid
from services.gateway.upstream.patience import StartPatience

PATIENCE_HEADER = "x-ryzanstein-patience"  # seconds
EVENTS_HEADER = "x-ryzanstein-events"  # events that a stream requests besides its answer
_WAITING = "waiting"  # the only such event


@dataclass(frozen=True, slots=True)
class PatienceLimits:
    """How long requests wait for a model that starts, in seconds."""

    plain_s: float = 60.0
    stream_s: float = 300.0
    most_s: float = 900.0  # largest patience that a client may request

    def begin(self, header: str, now: float) -> StartPatience:
        """A request's patience from now on; raises :class:`ApiError` (400)."""
        if not header:
            return StartPatience(now, now + self.plain_s, now + self.stream_s)
        try:
            seconds = float(header)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds <= self.most_s:
            allowed = f"a number of seconds from 0 to {self.most_s:g}"
            raise invalid(f"`{PATIENCE_HEADER}` must be {allowed}, got {header[:100]!r}.", PATIENCE_HEADER)
        return StartPatience(now, now + seconds, now + seconds, by_client=True)


def wants_events(header: str) -> bool:
    """Whether a stream wants events of its wait; raises :class:`ApiError` (400)."""
    names = {name.strip() for name in header.split(",")} - {""}
    if unknown := sorted(names - {_WAITING}):
        raise invalid(f"`{EVENTS_HEADER}` may name `{_WAITING}`, got {unknown[0][:100]!r}.", EVENTS_HEADER)
    return bool(names)


def waiting_json(start: routing_pb2.ModelStart) -> dict[str, Any]:
    """The stage of a model's start, and the whole seconds that it still takes; null: not known."""
    return {"stage": start.stage, "estimate_s": math.ceil(start.estimate_s) or None}
