"""How long a request waits for a model that starts, and the reports of the start meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ryzanstein.v1 import routing_pb2

HEAR_S = 0.9


@dataclass(slots=True, eq=False)
class StartPatience:
    """A request's wait for a model that no worker serves. Times are the event loop's.

    All sequences of the request share it, and all routers that are asked in turn.
    """

    began: float = 0.0
    until: float | None = None  # None: as long as for a worker that is free, which is the routers' setting
    stream_until: float | None = None  # the end for a client that gets reports of the start
    by_client: bool = False  # whether the client set it
    hear: Callable[[routing_pb2.ModelStart], None] = lambda start: None  # called at a change, and each second
    _heard: str = ""  # the last stage
    _hears_at: float = 0.0  # when the same stage is reported again

    def limit(self, seconds: float) -> None:
        """Wait for `seconds` in all, unless the client has set how long."""
        if not self.by_client:
            self.until = self.stream_until = self.began + seconds

    def tell(self, start: routing_pb2.ModelStart, now: float) -> None:
        """Tell how far the model's start is, unless the client has heard the same a moment ago."""
        if start.stage != self._heard or now >= self._hears_at:
            self._heard, self._hears_at = start.stage, now + HEAR_S
            self.hear(start)

    def left_s(self, now: float) -> float:
        """How long it may still wait."""
        return max(0.0, self.until - now) if self.until is not None else 0.0

    def state(self, request: routing_pb2.RouteRequest, now: float) -> None:
        """Tell a router how long the request waits, and since when."""
        if self.until is not None:
            request.patience_ms = math.ceil(self.left_s(now) * 1000)
            request.waited_ms = int(max(0.0, now - self.began) * 1000)
