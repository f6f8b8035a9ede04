"""What an engine works with: ranks that compute, requests that somebody waits for, and those who are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from opentelemetry.trace import INVALID_SPAN, Span
from ryzanstein.v1 import worker_pb2 as pb

from services.worker.engine.step_cost import StepCost
from services.worker.kv_transfer.store import BlockRanks
from services.worker.process.failure import RankFailure
from services.worker.process.rank_group import GroupStarted
from services.worker.protocol.plan import StepPlan, StepResult
from services.worker.scheduling.request import Output, Request


class Ranks(BlockRanks, Protocol):
    """What is asked of a rank group."""

    on_result: Callable[[StepResult], None] | None

    async def start(self) -> GroupStarted:
        """Launch the ranks; raises RanksFailedError."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan over; raises RanksFailedError."""
        ...

    async def wait_lost(self) -> str:
        """Wait until a rank is being lost; what is known of the reason."""
        ...

    async def wait_failed(self) -> RankFailure:
        """Wait until it is known why."""
        ...

    async def stop(self) -> None:
        """End all ranks."""
        ...


class OutputStream(Protocol):
    """Where the outputs of requests go; what was added is told with the next `flush`."""

    def add(self, running: RunningRequest, output: Output) -> None:
        """One step's output."""
        ...

    def announce_trial(self, running: RunningRequest) -> None:
        """A suspect is being computed."""
        ...

    def hand_off(self, running: RunningRequest, handoff: pb.Handoff) -> None:
        """Another worker is to continue the request."""
        ...

    def flush(self, step: int) -> None:
        """A step is complete."""
        ...


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request as the one who waits for it names it."""

    stream: OutputStream
    request_id: str
    attempt: int
    span: Span = INVALID_SPAN
    decode: Span = field(default=INVALID_SPAN, init=False)  # the part of `span` after the first output

    def close(self, how: str) -> None:
        """The request is over here."""
        self.decode.end()
        self.span.set_attribute("ryzanstein.end", how)
        self.span.end()


class StepObserver(Protocol):
    """Hears of every step and every first token."""

    def step(self, result: StepResult, cost: StepCost) -> None:
        """A step is complete."""
        ...

    def first_output(self, request: Request, now: float) -> None:
        """A request got its first output."""
        ...


class LifeObserver(Protocol):
    """Hears of what happens to the ranks and to requests because of it."""

    def started(self, started: GroupStarted) -> None:
        """The ranks are up."""
        ...

    def lost(self, failure: RankFailure | None) -> None:
        """The ranks are gone; None when an error of the server's own made it give them up."""
        ...

    def handed_off(self, reason: pb.Handoff.Reason) -> None:
        """A request is left to another worker."""
        ...

    def drains(self) -> None:
        """Nothing new is taken on any more."""
        ...
