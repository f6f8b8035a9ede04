"""Suspects are computed one at a time, so that a worker's death can be blamed on one request."""

from __future__ import annotations

from collections import deque

from services.worker.scheduling.request import Request, Status


class Trial:
    """Which suspect may run: the next one begins when the one before has outlived its trial."""

    def __init__(self) -> None:
        self._accused: Request | None = None
        self._told = False
        self._waiting: deque[Request] = deque()

    def admits(self, request: Request) -> bool:
        """Whether a request may be computed now; a suspect that may not has to wait for `next_up`."""
        if not request.trial_tokens or self._accused is request:
            return True
        if self._accused is None:
            self._accused, self._told = request, False
            return True
        self._waiting.append(request)
        return False

    def begun(self) -> Request | None:
        """The suspect that has just come into a plan; told once."""
        accused = self._accused
        if accused is None or self._told or not accused.n_in_flight:
            return None
        self._told = True
        return accused

    def next_up(self) -> Request | None:
        """The suspect that is to be queued again, once the one before it has outlived its trial."""
        accused = self._accused
        if accused is None or not (accused.status is Status.DONE or accused.n_generated >= accused.acquitted_at):
            return None
        self._accused = None
        while self._waiting:
            request = self._waiting.popleft()
            if request.status is Status.DEFERRED:
                return request
        return None
