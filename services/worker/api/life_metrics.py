"""Prometheus metrics of a worker's life: what it serves, how it started, what it lost, how it ends."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge
from ryzanstein.v1 import worker_pb2 as pb

from services.worker.process.rank_group import GroupStarted, RankFailure, RankGroupConfig

_REASONS = {
    value: pb.Handoff.Reason.Name(value).removeprefix("REASON_").lower() for value in pb.Handoff.Reason.values()
}
INTERNAL = "internal"  # the cause when the ranks are well and the server's own books are not


class LifeMetrics:
    """Told of events; all names begin with ``ryzanstein_worker_``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"ryzanstein_worker_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ryzanstein_worker_{name}", text, labels, registry=registry)

        labels = ("model", "revision", "dtype", "device", "tensor_parallel", "version")
        self._info = gauge("info", "1; what this worker serves, to join its other metrics with", *labels)
        self._recoveries = counter("recoveries", "Losses of ranks, each of which a restart follows, by cause", "cause")
        self._ranks_lost = counter("ranks_lost", "Losses of ranks, by the rank that was to blame, if one was", "rank")
        self._handoffs = counter("handoffs", "Requests left to other workers, by reason", "reason")
        self._startup = gauge("startup_seconds", "What the last start of the slowest rank spent its time on", "phase")
        self._memory = gauge(
            "memory_bytes", "Memory of the fullest rank after its last start; free is what it may still take", "kind"
        )
        self._drain_began = 0.0
        gauge("drain_seconds", "Since the drain began; 0 before").set_function(self._drain_seconds)

    def describe(self, model: str, revision: str, config: RankGroupConfig, version: str) -> None:
        """It is known what will be served."""
        self._info.labels(model, revision, config.dtype, config.device, str(config.ranks), version).set(1)

    def started(self, started: GroupStarted) -> None:
        """The ranks are up."""
        ledger = started.ledger
        for phase, seconds in started.phases.items():
            self._startup.labels(phase).set(seconds)
        sizes = {"weights": ledger.weights, "workspace": ledger.workspace, "kv": ledger.kv_cache}
        for kind, size in {**sizes, "free": ledger.available}.items():
            self._memory.labels(kind).set(size)

    def lost(self, failure: RankFailure | None) -> None:
        """The ranks are gone; None when an error of the server's own made it give them up."""
        self._recoveries.labels(failure.kind.value if failure else INTERNAL).inc()
        self._ranks_lost.labels("" if failure is None or failure.rank is None else str(failure.rank)).inc()

    def handed_off(self, reason: pb.Handoff.Reason) -> None:
        """A request is left to another worker."""
        self._handoffs.labels(_REASONS[reason]).inc()

    def drains(self) -> None:
        """Nothing new is taken on any more."""
        self._drain_began = self._drain_began or time.monotonic()

    def _drain_seconds(self) -> float:
        return time.monotonic() - self._drain_began if self._drain_began else 0.0
