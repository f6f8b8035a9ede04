"""Metrics of the gateway, under ``ryzanstein_gateway_``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.metrics import new_registry

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class TokenHistogram(Collector):
    """A histogram cheap enough for every token (0.3 µs): one thread writes, so it needs no lock."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._help = help_text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        labels = [*(repr(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(labels, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


class GatewayMetrics:
    """Everything the gateway counts; `registry` is what /metrics shows."""

    def __init__(self) -> None:
        self.registry = new_registry()
        prefix, registry = "ryzanstein_gateway_", self.registry
        self.requests = Counter(
            f"{prefix}requests",
            "Requests that are over, by the status that REST has for the outcome; 499: the client went away",
            ["api", "route", "status", "model"],
            registry=registry,
        )
        self.in_flight = Gauge(
            f"{prefix}in_flight_requests", "Requests being served", ["api", "route"], registry=registry
        )
        self.sockets = Gauge(f"{prefix}websocket_connections", "Open WebSockets", registry=registry)
        self.waiting = Gauge(f"{prefix}waiting_sequences", "Sequences without a first token", registry=registry)
        self.tokens = Counter(f"{prefix}tokens", "Tokens by kind", ["kind", "model", "tenant"], registry=registry)
        self.resumes = Counter(f"{prefix}resumes", "Interrupted attempts by cause", ["cause"], registry=registry)
        self.fallbacks = Counter(
            f"{prefix}fallbacks",
            "Requests that the fallback model took over, by the model asked for",
            ["model"],
            registry=registry,
        )
        self.cache = Counter(f"{prefix}response_cache", "Response cache lookups", ["result"], registry=registry)
        self.limited = Counter(f"{prefix}limited", "Requests refused by a limit", ["limit"], registry=registry)
        self.unaccounted = Counter(
            f"{prefix}unaccounted_tokens", "Tokens not counted against quotas, Redis being away", registry=registry
        )
        self.redis_up = Gauge(
            f"{prefix}redis_up", "Whether Redis answered last (1 until it is first asked)", registry=registry
        )
        self.redis_up.set(1)
        self.routers_up = Gauge(f"{prefix}router_up", "Whether any router answered last", registry=registry)
        self.workers = Gauge(f"{prefix}known_workers", "Workers in the last list", registry=registry)
        self.drain_remaining = Gauge(
            f"{prefix}drain_remaining_streams",
            "Requests and generations still open in a gateway that drains; 0 while it serves",
            registry=registry,
        )
        self.ttft = Histogram(
            f"{prefix}time_to_first_token_seconds", "Arrival to first token", ["model"], buckets=_TTFT_S,
            registry=registry,
        )  # fmt: skip
        self.e2e = Histogram(
            f"{prefix}request_seconds", "Arrival to last byte", ["api", "route"], buckets=_E2E_S, registry=registry
        )
        self.inter_token = TokenHistogram(
            f"{prefix}inter_token_seconds", "Time between batches of a sequence", _ITL_S, registry
        )

        # labels() costs as much as all else that is counted for a request, so its results are kept.
        self._token_counters: dict[tuple[str, str], list[Counter]] = {}
        self._ttft: dict[str, Histogram] = {}

    def count_tokens(self, model: str, tenant: str, counts: tuple[int, int, int]) -> None:
        """Tokens of a finished sequence: prompt, completion, and those of the prompt that were cached."""
        counters = self._token_counters.get((model, tenant))
        if counters is None:
            counters = [self.tokens.labels(kind, model, tenant) for kind in ("prompt", "completion", "cached")]
            self._token_counters[model, tenant] = counters
        for counter, count in zip(counters, counts, strict=True):
            counter.inc(count)

    def observe_ttft(self, model: str, seconds: float) -> None:
        """A sequence has its first token."""
        histogram = self._ttft.get(model)
        if histogram is None:
            histogram = self._ttft[model] = self.ttft.labels(model)
        histogram.observe(seconds)

    def count_resume(self, cause: str) -> None:
        """An attempt was interrupted."""
        self.resumes.labels(cause).inc()

    def watch(
        self, *, workers: Callable[[], int], routers_up: Callable[[], bool], drain_remaining: Callable[[], int]
    ) -> None:
        """Gauges that are read when they are scraped."""
        self.drain_remaining.set_function(drain_remaining)
        self.workers.set_function(workers)
        self.routers_up.set_function(routers_up)
