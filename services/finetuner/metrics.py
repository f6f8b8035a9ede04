"""Prometheus metrics of the fine-tuner."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class FinetunerMetrics:
    """All metrics of the fine-tuner, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.failures = Counter(
            "ryzanstein_finetuner_failures",
            "Jobs that failed in training, by the code of their error; `invalid_training_file` is the user's",
            ["code"],
            registry=registry,
        )
        for code in ("invalid_training_file", "base_unavailable", "training_not_started", "training_failed"):
            self.failures.labels(code)  # from 0 on, so that the first failure is an increase
