"""Prometheus metrics of a worker's life: model, start-up, losses, drain."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry
from ryzanstein.v1 import worker_pb2 as pb

from services.common.metrics import NewMetrics
from services.worker.engine.state import EngineFacts, EngineModel

_REASONS = {
    value: pb.Handoff.Reason.Name(value).removeprefix("REASON_").lower() for value in pb.Handoff.Reason.values()
}

_WAKES = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class LifeMetrics:
    """Implements LifeObserver; all names begin with ``ryzanstein_worker_``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        new = NewMetrics(registry, "ryzanstein_worker_")
        labels = ("model", "revision", "dtype", "device", "tensor_parallel", "engine", "resume", "version")
        self._info = new.gauge("info", "1; labels describe what this worker serves, to join its other metrics", labels)
        self._recoveries = new.counter(
            "recoveries", "Losses of ranks, each of which a restart follows, by cause", ["cause"]
        )
        self._ranks_lost = new.counter("ranks_lost", "Losses of ranks, by the rank that caused it, if known", ["rank"])
        self._handoffs = new.counter("handoffs", "Requests handed off to other workers, by reason", ["reason"])
        self._startup = new.gauge("startup_seconds", "Time of each phase of the slowest rank's last start", ["phase"])
        self._wake = new.histogram("wake_seconds", "From the order to wake until the worker serves", _WAKES)
        self._drain_began = 0.0
        new.gauge("drain_seconds", "Since the drain began; 0 before").set_function(self._drain_seconds)

    def describe(self, name: str, revision: str, model: EngineModel, version: str) -> None:
        """Publish facts about the model."""
        ranks = str(model.tensor_parallel)
        self._info.labels(name, revision, model.dtype, model.device, ranks, model.engine, model.resume, version).set(1)

    def on_started(self, facts: EngineFacts) -> None:
        """Publish facts about the start."""
        for phase, seconds in facts.startup_s.items():
            self._startup.labels(phase).set(seconds)

    def on_lost(self, cause: str, rank: int | None) -> None:
        """Count a loss of the ranks; `rank` is the rank to blame, or None."""
        self._recoveries.labels(cause).inc()
        self._ranks_lost.labels("" if rank is None else str(rank)).inc()

    def on_woken(self, seconds: float) -> None:
        """Record a wake."""
        self._wake.observe(seconds)

    def handed_off(self, reason: pb.Handoff.Reason) -> None:
        """Count a handoff."""
        self._handoffs.labels(_REASONS[reason]).inc()

    def on_drain(self) -> None:
        """Record the begin of the drain."""
        self._drain_began = self._drain_began or time.monotonic()

    def _drain_seconds(self) -> float:
        return time.monotonic() - self._drain_began if self._drain_began else 0.0
