"""Lets one suspect at a time into vLLM, so that a crash identifies one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from services.worker.engine.request import EngineRequest


class Suspects:
    """A queue of suspects. The first one runs until it has generated its `trial_tokens` here or has ended."""

    def __init__(self, start: Callable[[EngineRequest], None]) -> None:
        """Calls `start` for each suspect when it may run."""
        self._start = start
        self._running: EngineRequest | None = None
        self._waiting: deque[EngineRequest] = deque()

    def enter(self, request: EngineRequest) -> None:
        """Queue a suspect; it starts at once if no other one runs."""
        self._waiting.append(request)
        self._next()

    def leave(self, request: EngineRequest) -> None:
        """A request has ended or is cleared; the next suspect starts."""
        if request is self._running:
            self._running = None
        elif request in self._waiting:
            self._waiting.remove(request)
        self._next()

    def reset(self) -> None:
        """Forget all suspects: their engine is lost."""
        self._running = None
        self._waiting.clear()

    def _next(self) -> None:
        if self._running is None and self._waiting:
            self._running = self._waiting.popleft()
            self._start(self._running)
