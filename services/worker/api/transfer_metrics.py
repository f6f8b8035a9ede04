"""Prometheus metrics of KV transfers: pulls, copies to standbys, resumed requests, and places below the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.worker.engine.kv_events import BlockPlace
from services.worker.engine.state import (
    COPY_FAILURES,
    PULL_FAILURES,
    STORE_FAILURES,
    PlaceTotals,
    TransferTotals,
    add_totals,
)

_COUNTERS = {
    "pulled_blocks": "KV blocks fetched from other workers",
    "pulled_bytes": "Bytes of KV fetched from other workers",
    "pulled_seconds": "Time that pulls took, failed ones included",
    "sent_blocks": "KV blocks sent to other workers",
    "sent_bytes": "Bytes of KV sent to other workers",
    "copied_blocks": "KV blocks of other workers' running requests that were copied to this one",
    "copied_bytes": "Bytes of KV of other workers' running requests that were copied to this one",
    "resumed_tokens": "Prompt tokens of requests that another worker had begun",
    "resumed_cached_tokens": "Prompt tokens of requests that another worker had begun, found in the prefix cache",
}
_FAILURES = {
    "pull_failures": ("Pulls that ended before their last block, by reason", PULL_FAILURES),
    "copy_failures": ("Copies to a standby that were not taken, by reason", COPY_FAILURES),
}
_PLACE_COUNTERS = {
    "hits": "KV blocks that a prompt wanted, the KV cache did not hold, and the place did",
    "misses": "KV blocks that a prompt wanted, and neither the KV cache nor the place held",
    "loaded_blocks": "KV blocks loaded from the place",
    "loaded_bytes": "Bytes of KV loaded from the place",
    "loaded_seconds": "Time that loads from the place took, failed ones included",
    "stored_bytes": "Bytes of KV written to the place",
    "evicted_blocks": "KV blocks that left the place for others",
}
_PLACE_GAUGES = {
    "bytes": "Bytes of KV in the place",
    "capacity_bytes": "Bytes of KV that the place may hold",
}


class TransferMetrics(Collector):
    """Totals of both directions and of the places below the device, read at each scrape."""

    def __init__(self, totals: Sequence[TransferTotals]) -> None:
        """`totals`: of the engines of a process."""
        self._totals = totals

    def collect(self) -> Iterable[Metric]:
        """Read everything once."""
        totals = add_totals(self._totals)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"ryzanstein_worker_{name}", text, value=getattr(totals, name))
        for name, (text, reasons) in _FAILURES.items():
            failures = CounterMetricFamily(f"ryzanstein_worker_{name}", text, labels=["reason"])
            for reason in reasons:
                failures.add_metric([reason], getattr(totals, name)[reason])
            yield failures
        yield GaugeMetricFamily(
            "ryzanstein_worker_copy_lag_blocks",
            "Complete KV blocks of running requests that their standbys do not hold",
            value=totals.copy_lag_blocks,
        )
        yield from _place_metrics(totals.places)


def _place_metrics(places: Mapping[BlockPlace, PlaceTotals]) -> Iterable[Metric]:
    for name, text in _PLACE_COUNTERS.items():
        counter = CounterMetricFamily(f"ryzanstein_worker_kv_place_{name}", text, labels=["place"])
        for place, totals in places.items():
            counter.add_metric([place], getattr(totals, name))
        yield counter
    for name, text in _PLACE_GAUGES.items():
        gauge = GaugeMetricFamily(f"ryzanstein_worker_kv_place_{name}", text, labels=["place"])
        for place, totals in places.items():
            gauge.add_metric([place], getattr(totals, name))
        yield gauge
    failing = GaugeMetricFamily(
        "ryzanstein_worker_kv_place_failing", "1 if the last attempt to store KV blocks failed", labels=["place"]
    )
    failures = CounterMetricFamily(
        "ryzanstein_worker_kv_place_failures",
        "KV blocks that were not stored or loaded, by reason; io and error count attempts",
        labels=["place", "reason"],
    )
    for place, totals in places.items():
        failing.add_metric([place], bool(totals.fault))
        for reason in STORE_FAILURES:
            failures.add_metric([place, reason], totals.failures[reason])
    yield failing
    yield failures
