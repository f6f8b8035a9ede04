"""Metrics of the gateway, under ``ryzanstein_gateway_``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.metrics import NewMetrics, new_registry
from services.common.telemetry_names import Scheme

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_LENGTHS = tuple(2**power for power in range(18))
_RESUME_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_REDIS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_KINDS = "prompt", "completion", "cached"
_CLOSE_CODES = range(1000, 1016)


class TokenHistogram:
    """The histogram of one model, without a lock since one thread writes: 0.3 µs per token."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class ModelHistograms(Collector):
    """A histogram with the label `model`."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._help = help_text
        self.bounds = tuple(bounds)
        self._by_model: dict[str, TokenHistogram] = {}
        registry.register(self)

    def of(self, model: str) -> TokenHistogram:
        """The histogram of a model."""
        histogram = self._by_model.get(model)
        if histogram is None:
            histogram = self._by_model[model] = TokenHistogram(self.bounds)
        return histogram

    def collect(self) -> Iterator[Metric]:
        """Collect for the registry."""
        labels = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._help, labels=["model"])
        for model, histogram in list(self._by_model.items()):
            buckets = list(zip(labels, map(float, accumulate(histogram.counts)), strict=True))
            family.add_metric([model], buckets, histogram.sum)
        yield family


@dataclass(frozen=True, slots=True)
class Resumed:
    """A stream went on with another worker."""

    model: str
    resume: str  # exact or approximate, as the model's card says
    pause_s: float  # from the last token before to the first one after
    tokens: int  # that the stream had


class GatewayMetrics:
    """All metrics of the gateway, in `registry`, which /metrics shows.

    The series of each interruption cause in `causes` starts at zero, so that `increase()` sees the first event.
    """

    def __init__(self, causes: Iterable[str] = (), schemes: Collection[Scheme] = ()) -> None:
        self.registry = new_registry("gateway", schemes)
        prefix = "ryzanstein_gateway_"
        new = NewMetrics(self.registry, prefix)
        self.requests = new.counter(
            "requests",
            "Ended requests, by the status that REST has for the outcome; 499: the client disconnected",
            ["api", "route", "status", "model"],
        )
        self.in_flight = new.gauge("in_flight_requests", "Requests being served", ["api", "route"])
        self.sockets = new.gauge("websocket_connections", "Open WebSockets")
        self.waiting = new.gauge("waiting_sequences", "Sequences without a first token")
        self.tokens = new.counter("tokens", "Tokens by kind", ["kind", "model", "tenant"])
        self.sequences = new.counter(
            "sequences",
            "Ended sequences with a first token, by the reason; abort: by their client or an error",
            ["model", "finish"],
        )
        self.resumes = new.counter("resumes", "Interrupted attempts by cause", ["cause"])
        for cause in causes:
            self.resumes.labels(cause)
        self.fallbacks = new.counter(
            "fallbacks", "Requests that a fallback took over, by the requested model or route", ["model"]
        )
        self.routed = new.counter(
            "routed_requests", "Requests that name a route, by the model that answers", ["route", "model"]
        )
        self.mirrored = new.counter(
            "mirrored_requests",
            "Mirrored sequences: same or different tokens, answered (not greedy), failed, dropped (workers are busy)",
            ["route", "model", "result"],
        )
        self.canary_decisions = new.counter(
            "canary_decisions",
            "Decisions of this gateway on canaries: step, promoted, rolled_back, stopped",
            ["route", "decision"],
        )
        self.mirrored_tokens = new.counter("mirrored_tokens", "Tokens of mirrored sequences by kind", ["kind", "model"])
        self.cache = new.counter("response_cache", "Response cache lookups", ["result"])
        self.limited = new.counter("limited", "Requests refused by a limit", ["limit"])
        self.unaccounted = new.counter(
            "unaccounted_tokens",
            "Tokens that no quota and no usage counts: Redis was away when the gateway ended, or for too long",
        )
        self.unlogged = new.counter(
            "unlogged_requests",
            "Requests that the log for plans lacks: Redis was away when the gateway ended, or for too long",
        )
        self.cost = new.counter("cost", "Cost of requests, in the currency of the prices", ["model", "tenant"])
        self.usage_waiting = new.gauge("usage_waiting_tokens", "Tokens that wait in the gateway to be counted in Redis")
        self.redis_up = new.gauge("redis_up", "Whether Redis answered last (1 until it is first asked)")
        self.redis_up.set(1)
        self.routers_up = new.gauge("router_up", "Whether any router answered last")
        self.workers = new.gauge("known_workers", "Workers in the last list")
        self.drain_remaining = new.gauge(
            "drain_remaining_streams", "Requests and generations still open in a gateway that drains; 0 while it serves"
        )
        self.drain_last_arrival = new.gauge(
            "drain_last_request_seconds",
            "From the end of a gateway's readiness to its last new request or WebSocket, probes excluded; 0: none",
        )
        self.ttft = new.histogram(
            "time_to_first_token_seconds",
            "Arrival to first token; not of requests of priority 100, as those of batches",
            _TTFT_S,
            ["model"],
        )
        self.e2e = new.histogram("request_seconds", "Arrival to last byte", _E2E_S, ["api", "route", "model"])
        self.inter_token = ModelHistograms(
            f"{prefix}inter_token_seconds", "Time between batches of a sequence", _ITL_S, self.registry
        )
        self.prompt_length = ModelHistograms(
            f"{prefix}prompt_length_tokens", "Prompt tokens of a sequence", _LENGTHS, self.registry
        )
        self.completion_length = ModelHistograms(
            f"{prefix}completion_length_tokens", "Tokens generated for a sequence", _LENGTHS, self.registry
        )
        self.resume_seconds = new.histogram(
            "resume_seconds",
            "Pause that a client saw in a stream that went on elsewhere, from the last token to the next one",
            _RESUME_S,
        )
        self.resumed_streams = new.counter(
            "resumed_streams",
            "Times a stream went on with another worker; approximate: its text may differ from the uninterrupted one",
            ["model", "resume"],
        )
        self.resumed_tokens = new.counter("resumed_tokens", "Tokens that resumed streams had when they went on")
        self.broken = new.counter(
            "streams_broken", "Streams that ended with an error after their first token, by its code", ["reason"]
        )
        self.redis_seconds = new.histogram(
            "redis_seconds", "Time of an operation on Redis, failed ones included", _REDIS_S
        )
        self.socket_closes = new.counter(
            "websocket_closes",
            "WebSockets that have ended, by close code; 1005: lost, 1012: the gateway ends, other: not of RFC 6455",
            ["code"],
        )
        self.live_peers = new.gauge(
            "live_peers", "Gateways that share concurrency caps, and limits while Redis is away; this one included"
        )
        self.batches = new.counter("batches", "Batches that this gateway has ended, by status", ["status"])
        self.batch_requests = new.counter(
            "batch_requests",
            "Requests of batches: completed, failed, or postponed because of limits or workers",
            ["result"],
        )
        self.batches_running = new.gauge("batches_running", "Batches that this gateway runs")
        self.batches_open = new.gauge("batches_open", "Open batches of all gateways")
        self.batch_storage = new.gauge("batch_storage_bytes", "Size of all files of batches in Redis")

        # The results of labels() are cached: one call costs as much as all other metrics of a request.
        self._token_counters: dict[tuple[str, str], list[Counter]] = {}
        self._sequence_counters: dict[tuple[str, str], Counter] = {}
        self._ttft: dict[str, Histogram] = {}

    def count_tokens(self, model: str, tenant: str, counts: tuple[int, int, int]) -> None:
        """Count the tokens of a finished sequence: prompt, completion, and cached prompt."""
        counters = self._token_counters.get((model, tenant))
        if counters is None:
            counters = [self.tokens.labels(kind, model, tenant) for kind in _KINDS]
            self._token_counters[model, tenant] = counters
        for counter, count in zip(counters, counts, strict=True):
            counter.inc(count)
        self.prompt_length.of(model).observe(counts[0])
        self.completion_length.of(model).observe(counts[1])

    def count_sequence(self, model: str, finish: str) -> None:
        """Count a sequence that has ended after its first token."""
        counter = self._sequence_counters.get((model, finish))
        if counter is None:
            counter = self._sequence_counters[model, finish] = self.sequences.labels(model, finish)
        counter.inc()

    def count_mirrored(self, model: str, counts: tuple[int, int, int]) -> None:
        """Count the tokens of a mirrored sequence, as `count_tokens` does those of clients."""
        for kind, count in zip(_KINDS, counts, strict=True):
            self.mirrored_tokens.labels(kind, model).inc(count)

    def observe_ttft(self, model: str, seconds: float) -> None:
        """Observe the time to a sequence's first token."""
        histogram = self._ttft.get(model)
        if histogram is None:
            histogram = self._ttft[model] = self.ttft.labels(model)
        histogram.observe(seconds)

    def count_resume(self, cause: str) -> None:
        """Count an interrupted attempt."""
        self.resumes.labels(cause).inc()

    def count_resumed(self, resumed: Resumed) -> None:
        """Count a stream that went on."""
        self.resumed_streams.labels(resumed.model, resumed.resume).inc()
        self.resume_seconds.observe(resumed.pause_s)
        self.resumed_tokens.inc(resumed.tokens)

    def count_close(self, code: int) -> None:
        """Count a closed WebSocket; codes that clients choose share a label, so that series stay few."""
        self.socket_closes.labels(str(code) if code in _CLOSE_CODES else "other").inc()
