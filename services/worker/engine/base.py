"""Interfaces between an engine, the API in front of it, and observers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.engine.changes import Changes
from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.kv_events import KvEventLog
from services.worker.engine.output import Finish, Output, Progress
from services.worker.engine.request import AdapterRef, EngineRequest
from services.worker.engine.state import (
    AdapterFacts,
    EngineCounters,
    EngineFacts,
    EngineModel,
    EngineState,
    TransferTotals,
)

__all__ = ["Engine", "EngineRequest", "EngineState", "Finish", "Output", "OutputSink", "StepReport", "phase_name"]


def phase_name(phase: int) -> str:
    """The phase's name in lower case, for messages, leases and labels."""
    return pb.Phase.Name(phase).removeprefix("PHASE_").lower()


class OutputSink(Protocol):
    """Receives the outputs of requests. A sink may serve many requests; `flush` ends a step for all of them."""

    def add(self, request: EngineRequest, output: Output) -> None:
        """Take a step's output of a request."""
        ...

    def announce_trial(self, request: EngineRequest) -> None:
        """Called when the first plan with a suspect is sent to the ranks."""
        ...

    def hand_off(self, request: EngineRequest, handoff: pb.Handoff) -> None:
        """End the request here; another worker continues it."""
        ...

    def refuse(self, request: EngineRequest, error: InvalidRequestError) -> None:
        """End a request that no worker can serve."""
        ...

    def flush(self, step: int) -> None:
        """A step is complete."""
        ...


class Engine(Protocol):
    """Serves one model as a virtual worker; a process can hold several. All methods run on the event loop."""

    @property
    def model(self) -> EngineModel:
        """The served model."""
        ...

    @property
    def facts(self) -> EngineFacts | None:
        """Facts known after the first start; None before."""
        ...

    @property
    def phase(self) -> pb.Phase:
        """The phase; the engine accepts requests while it is SERVING."""
        ...

    @property
    def detail(self) -> str:
        """Message for people: why the phase is not SERVING."""
        ...

    @property
    def changes(self) -> Changes:
        """Announces changes of the state and the KV events."""
        ...

    @property
    def kv_events(self) -> KvEventLog:
        """Changes of the prefix cache."""
        ...

    @property
    def counters(self) -> EngineCounters:
        """Totals of requests."""
        ...

    @property
    def transfers(self) -> TransferTotals:
        """Totals of transferred KV blocks."""
        ...

    def state(self) -> EngineState:
        """The current state."""
        ...

    def cached_hashes(self) -> list[int]:
        """Wire hashes of all blocks in the prefix cache, parents before children."""
        ...

    async def run(self) -> None:
        """Start, serve and recover until cancelled, then end all processes of the engine.

        Raises StartupError when the first start fails, GaveUpError when a later start takes too long.
        """
        ...

    def refusal(self) -> pb.Handoff | None:
        """Why a new request should go to another worker now; None while the engine accepts requests."""
        ...

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Accept a request while there is no `refusal`. Raises InvalidRequestError for a request it can never serve.

        The sink gets its outputs, the last with the finish reason, or a handoff.
        """
        ...

    def progress(self, request: EngineRequest) -> Progress:
        """How far a request that is alive is. It must not change while nothing works for the request."""
        ...

    def cancel(self, request: EngineRequest) -> None:
        """End a request that is alive; its sink gets no more outputs of it."""
        ...

    def pin_adapters(self, refs: Sequence[AdapterRef]) -> None:
        """Load these adapters, and keep them loaded; those of the last call need not stay any longer."""
        ...

    async def inspect_adapter(self, source: str) -> AdapterFacts:
        """Check that an adapter fits the model. Raises InvalidRequestError, UnsupportedError without room for any."""
        ...

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Refuse new requests from now on; let running requests continue for `grace_s`, then hand them off.

        Returns the numbers of requests handed off and completed.
        """
        ...

    async def sleep(self) -> None:
        """Free the device's memory until `wake`. Raises UnsupportedError."""
        ...

    async def wake(self) -> None:
        """Serve again after `sleep`. Raises UnsupportedError."""
        ...

    def read_blocks(self, request: pb.PullBlocksRequest) -> AsyncGenerator[pb.KvBlock, None]:
        """The requested KV blocks, up to the first block that is not cached. Raises BlocksUnavailableError."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step."""

    seconds: float
    n_rows: int
    parts: Mapping[str, float]  # seconds: wait, forward, communication, sample; empty: not measured


class StepObserver(Protocol):
    """Callbacks for every step and every first output."""

    def on_step(self, report: StepReport) -> None:
        """A step is complete."""
        ...

    def on_first_output(self, queue_s: float, total_s: float) -> None:
        """A request got its first output `total_s` after its submit; `queue_s` of that it waited for admission."""
        ...

    def on_adapter_load(self, source: str, result: str, seconds: float) -> None:
        """An adapter was loaded from `files` or `memory`; the result is ok, refused, or lost with the ranks."""
        ...


class LifeObserver(Protocol):
    """Callbacks for an engine's start, the loss of its ranks, and its drain."""

    def on_started(self, facts: EngineFacts) -> None:
        """The engine has started."""
        ...

    def on_lost(self, cause: str, rank: int | None) -> None:
        """The ranks are lost; `rank` is the rank to blame, or None."""
        ...

    def on_drain(self) -> None:
        """The engine refuses new requests from now on."""
        ...
