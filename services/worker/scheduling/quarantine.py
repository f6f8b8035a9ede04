"""Suspects are computed one at a time, so that the death of a worker can be blamed on one request."""

from __future__ import annotations

from collections import deque

from services.worker.scheduling.request import Request, Status


class Quarantine:
    """Which suspect may run: the next one begins when the one before is cleared, which is when it has generated
    `trial_tokens` here or has ended.
    """

    def __init__(self) -> None:
        self._suspect: Request | None = None
        self._announced = False
        self._waiting: deque[Request] = deque()

    def enter(self, request: Request) -> None:
        """A request was submitted."""
        request.cleared_at = request.n_generated + request.trial_tokens

    def admits(self, request: Request) -> bool:
        """Whether a request may be computed now; a suspect that may not has to wait for `next_up`."""
        if not request.trial_tokens or self._suspect is request:
            return True
        if self._suspect is None:
            self._suspect, self._announced = request, False
            return True
        self._waiting.append(request)
        return False

    def begun(self) -> Request | None:
        """The suspect that has just come into a plan; returned once."""
        suspect = self._suspect
        if suspect is None or self._announced or not suspect.n_in_flight:
            return None
        self._announced = True
        return suspect

    def next_up(self) -> Request | None:
        """The suspect that is to be queued again, once the one before it is cleared."""
        suspect = self._suspect
        if suspect is None or not (suspect.status is Status.DONE or suspect.n_generated >= suspect.cleared_at):
            return None
        self._suspect = None
        while self._waiting:
            request = self._waiting.popleft()
            if request.status is Status.DEFERRED:
                return request
        return None
