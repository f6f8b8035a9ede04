"""Prometheus metrics of KV blocks that move between workers, named ``ryzanstein_worker_pull*`` and ``*_sent_*``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.worker.kv_transfer.puller import REASONS, PullTotals

_PULLED = {
    "blocks": "KV blocks fetched from other workers",
    "bytes": "Bytes of KV fetched from other workers",
    "seconds": "Time that pulls took, failed ones included",
}
_SENT = {"blocks": "KV blocks handed out to other workers", "bytes": "Bytes of KV handed out to other workers"}


class TransferMetrics(Collector):
    """Totals of both directions, read when Prometheus asks."""

    def __init__(self, pulled: PullTotals, sent: Counter[str]) -> None:
        self._pulled = pulled
        self._sent = sent

    def collect(self) -> Iterable[Metric]:
        """Read everything once."""
        for name, text in _PULLED.items():
            yield CounterMetricFamily(f"ryzanstein_worker_pulled_{name}", text, value=getattr(self._pulled, name))
        for name, text in _SENT.items():
            yield CounterMetricFamily(f"ryzanstein_worker_sent_{name}", text, value=self._sent[name])
        failures = CounterMetricFamily(
            "ryzanstein_worker_pull_failures", "Pulls that ended before their last block, by reason", labels=["reason"]
        )
        for reason in REASONS:
            failures.add_metric([reason], self._pulled.failures[reason])
        yield failures
