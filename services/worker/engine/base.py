"""Interfaces between an engine, the API in front of it, and observers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.engine.changes import Changes
from services.worker.engine.kv_events import KvEventLog
from services.worker.engine.output import Finish, Output
from services.worker.engine.request import EngineRequest
from services.worker.engine.state import EngineCounters, EngineFacts, EngineModel, EngineState, TransferTotals

__all__ = ["Engine", "EngineRequest", "EngineState", "Finish", "Output", "OutputSink", "StepReport", "phase_name"]


def phase_name(phase: int) -> str:
    """The phase in lower case, for people, leases and labels."""
    return pb.Phase.Name(phase).removeprefix("PHASE_").lower()


class OutputSink(Protocol):
    """Where the outputs of requests go. One sink may serve many requests; `flush` ends a step for all of them."""

    def add(self, request: EngineRequest, output: Output) -> None:
        """One step's output."""
        ...

    def announce_trial(self, request: EngineRequest) -> None:
        """The first plan with a suspect has gone out."""
        ...

    def hand_off(self, request: EngineRequest, handoff: pb.Handoff) -> None:
        """Another worker is to continue the request."""
        ...

    def flush(self, step: int) -> None:
        """A step is complete."""
        ...


class Engine(Protocol):
    """Serves one model: a virtual worker, of which a process can hold several. Lives on the event loop."""

    @property
    def model(self) -> EngineModel:
        """What is served."""
        ...

    @property
    def facts(self) -> EngineFacts | None:
        """None until the first start is complete."""
        ...

    @property
    def phase(self) -> pb.Phase:
        """Requests are taken on while it is SERVING."""
        ...

    @property
    def detail(self) -> str:
        """Why the phase is not SERVING, for people."""
        ...

    @property
    def changes(self) -> Changes:
        """Announces everything that may change the state or the KV events."""
        ...

    @property
    def kv_events(self) -> KvEventLog:
        """What entered and left the prefix cache."""
        ...

    @property
    def counters(self) -> EngineCounters:
        """Totals of requests."""
        ...

    @property
    def transfers(self) -> TransferTotals:
        """Totals of KV blocks that moved."""
        ...

    def state(self) -> EngineState:
        """The state now."""
        ...

    def cached_hashes(self) -> list[int]:
        """Wire hashes of everything in the prefix cache, parents before children."""
        ...

    async def run(self) -> None:
        """Start, serve and recover until cancelled; then nothing of the engine is left.

        Raises StartupError when the very first start fails, GaveUpError when a later one takes too long.
        """
        ...

    def refusal(self) -> pb.Handoff | None:
        """Why a new request should go to another worker now; None while requests are taken on."""
        ...

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Take a request on while there is no `refusal`. Raises InvalidRequestError for one that can never be served.

        The sink gets its outputs, the last of which says how it ends, or a handoff.
        """
        ...

    def cancel(self, request: EngineRequest) -> None:
        """Forget a request, if it is alive; its sink gets nothing more of it."""
        ...

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Take nothing new for good; let running requests go on for `grace_s`, hand off what is left.

        Returns how many requests were handed off, and how many ended.
        """
        ...

    async def sleep(self) -> None:
        """Give the device's memory back until `wake`. Raises UnsupportedError."""
        ...

    async def wake(self) -> None:
        """Serve again after `sleep`. Raises UnsupportedError."""
        ...

    def read_blocks(self, request: pb.PullBlocksRequest) -> AsyncGenerator[pb.KvBlock, None]:
        """The KV blocks asked for, up to the first one that is not held. Raises BlocksUnavailableError."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step."""

    seconds: float
    n_rows: int
    parts: Mapping[str, float]  # seconds: wait, forward, communication, sample


class StepObserver(Protocol):
    """Is called for every step and every first output."""

    def on_step(self, report: StepReport) -> None:
        """A step is complete."""
        ...

    def on_first_output(self, queue_s: float, total_s: float) -> None:
        """A request got its first output, so long after its submit; `queue_s` of that it waited for its admission."""
        ...


class LifeObserver(Protocol):
    """Is called when an engine starts, loses its ranks, or drains."""

    def on_started(self, facts: EngineFacts) -> None:
        """The engine is up."""
        ...

    def on_lost(self, cause: str, rank: int | None) -> None:
        """The ranks are gone; `rank` is to blame, if one is."""
        ...

    def on_drain(self) -> None:
        """Nothing new is taken on any more."""
        ...
