"""Quarantine: suspects are computed one at a time, so that a worker's crash identifies one request."""

from __future__ import annotations

from collections import deque

from services.worker.scheduling.request import Request, Status


class Quarantine:
    """Lets one suspect run at a time. A suspect is cleared when it has generated `trial_tokens` here or has ended."""

    def __init__(self) -> None:
        self._suspect: Request | None = None
        self._announced = False
        self._waiting: deque[Request] = deque()

    def enter(self, request: Request) -> None:
        """Set the token count that clears a submitted request."""
        request.cleared_at = request.n_generated + request.trial_tokens

    def admits(self, request: Request) -> bool:
        """Whether a request may be computed now; a suspect that may not waits until `next_up` returns it."""
        if not request.trial_tokens or self._suspect is request:
            return True
        if self._suspect is None:
            self._suspect, self._announced = request, False
            return True
        self._waiting.append(request)
        return False

    def begun(self) -> Request | None:
        """The running suspect, returned once, as soon as a plan contains it."""
        suspect = self._suspect
        if suspect is None or self._announced or not suspect.n_in_flight:
            return None
        self._announced = True
        return suspect

    def next_up(self) -> Request | None:
        """The next suspect to queue; None while the running suspect is not cleared."""
        suspect = self._suspect
        if suspect is None or not (suspect.status is Status.DONE or suspect.n_generated >= suspect.cleared_at):
            return None
        self._suspect = None
        while self._waiting:
            request = self._waiting.popleft()
            if request.status is Status.DEFERRED:
                return request
        return None
