"""The base of all users: a random generator, think time, and reports to the statistics."""

from __future__ import annotations

import random
import uuid

from locust import User
from locust.env import Environment

from loadtest.timing import AnswerTimes


class Person(User):
    """A user with think time, which `--think` scales."""

    abstract = True

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.session_id = uuid.uuid4().hex
        self.rng = random.Random(self.session_id)

    @property
    def think_s(self) -> float:
        """Median seconds between two questions."""
        return float(self.environment.parsed_options.think)

    def wait_time(self) -> float:
        """Seconds between two tasks."""
        return self.think_s * self.rng.lognormvariate(0, 0.6)

    def report(self, name: str, times: AnswerTimes) -> None:
        """Report the times of a whole answer, as rows of their own: TTFT, TPOT and PAUSE."""
        for kind, value in (("TTFT", times.first), ("TPOT", times.per_token), ("PAUSE", times.longest_pause)):
            self.environment.events.request.fire(
                request_type=kind, name=name, response_time=value, response_length=0, exception=None, context={}
            )

    def report_request(self, kind: str, name: str, milliseconds: float, size: int, error: Exception | None) -> None:
        """Report a request of a protocol that locust does not know."""
        self.environment.events.request.fire(
            request_type=kind, name=name, response_time=milliseconds, response_length=size, exception=error, context={}
        )
