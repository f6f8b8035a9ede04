"""Prometheus metrics of the coordinator."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.common.metrics import NewMetrics, Totals
from services.kv_coordinator.index import BlockIndex
from services.kv_coordinator.subscriptions import Subscriptions, SyncCounters

_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)


class CoordinatorMetrics:
    """All metrics of the coordinator, in one registry."""

    def __init__(self, registry: CollectorRegistry, counters: SyncCounters) -> None:
        new = NewMetrics(registry, "ryzanstein_coordinator_")
        self._lookups = new.counter("lookups", "Lookups, by whether any worker held a block", ["result"])
        self._hits, self._misses = self._lookups.labels("hit"), self._lookups.labels("miss")
        self._seconds = new.histogram("lookup_seconds", "Time of a lookup", _BUCKETS)
        self._blocks = new.gauge("blocks", "Distinct blocks")
        self._entries = new.gauge("entries", "Pairs of block and worker")
        self._workers = new.gauge("workers", "Workers, by state", ["state"])
        self._lag = new.gauge("lag_seconds", "Longest time for which a worker has been out of sync; 0: none is")
        Totals(
            "ryzanstein_coordinator_events",
            "KV events applied, gaps found in them, full dumps taken (resyncs)",
            "kind",
            lambda: {kind: getattr(counters, kind) for kind in ("events", "gaps", "resyncs")},
            registry,
        )

    def looked_up(self, *, hit: bool, seconds: float) -> None:
        """Count a look-up."""
        (self._hits if hit else self._misses).inc()
        self._seconds.observe(seconds)

    def refresh(self, index: BlockIndex, subscriptions: Subscriptions) -> None:
        """Update the gauges."""
        self._blocks.set(index.blocks())
        self._entries.set(index.entries)
        synced = sum(s.in_step for s in subscriptions.by_worker.values())
        self._workers.labels("synced").set(synced)
        self._workers.labels("behind").set(len(subscriptions.by_worker) - synced)
        self._lag.set(subscriptions.lag_s())
