"""Prometheus metrics of KV transfers between workers, named ``ryzanstein_worker_pull*`` and ``*_sent_*``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.worker.engine.state import PULL_FAILURES, TransferTotals, add_totals

_COUNTERS = {
    "pulled_blocks": "KV blocks fetched from other workers",
    "pulled_bytes": "Bytes of KV fetched from other workers",
    "pulled_seconds": "Time that pulls took, failed ones included",
    "sent_blocks": "KV blocks handed out to other workers",
    "sent_bytes": "Bytes of KV handed out to other workers",
}


class TransferMetrics(Collector):
    """Totals of both directions, read at each scrape."""

    def __init__(self, totals: Sequence[TransferTotals]) -> None:
        """`totals`: of the engines of a process."""
        self._totals = totals

    def collect(self) -> Iterable[Metric]:
        """Read everything once."""
        totals = add_totals(self._totals)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"ryzanstein_worker_{name}", text, value=getattr(totals, name))
        failures = CounterMetricFamily(
            "ryzanstein_worker_pull_failures", "Pulls that ended before their last block, by reason", labels=["reason"]
        )
        for reason in PULL_FAILURES:
            failures.add_metric([reason], totals.pull_failures[reason])
        yield failures
