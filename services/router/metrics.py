"""Prometheus metrics of the router."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from ryzanstein.v1 import routing_pb2

from services.common.metrics import NewMetrics, Totals
from services.router.breaker import BreakerState
from services.router.fleet import Fleet
from services.router.prefixes import Prefixes
from services.router.routing import Placement, Routing
from services.router.snapshot import IneligibleReason

_REDIS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5)
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1, 5, 10)
_QUEUE_S = (0.005, 0.02, 0.1, 0.25, 1, 5, 10, 20, 40, 60, 120, 300, 600)  # starts of models included
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # the gateway's buckets
_RESULTS = {value: name.removeprefix("RESULT_").lower() for name, value in routing_pb2.Outcome.Result.items()}


@dataclass(frozen=True, slots=True)
class _ModelSeries:
    """The series of one model, kept since a look-up by labels takes longer than counting."""

    expected_ttft: Histogram
    prompt_tokens: Counter
    matched_tokens: Counter


class RouterMetrics:
    """All metrics of the router, in one registry."""

    def __init__(self, registry: CollectorRegistry, prefixes: Sequence[Prefixes]) -> None:
        new = NewMetrics(registry, "ryzanstein_router_")
        self.decisions = new.counter("decisions", "Requests placed, by model and reason", ["model", "reason"])
        self.refusals = new.counter("refusals", "Requests not placed, by status code", ["code"])
        self.seconds = new.histogram("decision_seconds", "Time of a decision without waiting in the queue", _BUCKETS)
        self.queue_seconds = new.histogram(
            "queue_seconds", "Wait for an eligible worker, of requests that had to", _QUEUE_S
        )
        self.expected_ttft = new.histogram(
            "expected_first_token_seconds", "Expected time to the first token of the chosen worker", _TTFT_S, ["model"]
        )
        self.prompt_tokens = new.counter("prompt_tokens", "Prompt tokens of placed requests", ["model"])
        self.matched_tokens = new.counter(
            "matched_tokens", "Prompt tokens that the chosen worker had cached, as the coordinator reports", ["model"]
        )
        self.outcomes = new.counter("outcomes", "Reported by gateways, by result", ["result"])
        self._series: dict[str, _ModelSeries] = {}  # by model
        self._placed: dict[tuple[str, str], Counter] = {}  # by model and reason
        self._bindings: dict[str, Counter] = {}  # by result
        self._shown: set[str] = set()  # models with gauges
        self.queued = new.gauge("queue_length", "Requests waiting for a worker", ["model"])
        self.held = new.gauge("held_requests", "Requests that wait for a model without a serving worker", ["model"])
        self.held_seconds = new.gauge(
            "held_seconds", "How long the first of these requests has waited; 0 without requests", ["model"]
        )
        self.workers = new.gauge("workers", "Workers by the reason why they are not eligible", ["model", "state"])
        self.redis_up = new.gauge("redis_up", "Whether sessions are read from Redis")
        self.redis_seconds = new.histogram(
            "redis_seconds", "Time of an operation on Redis, failed ones included", _REDIS_S
        )
        self.breakers = new.gauge("breakers", "Circuit breakers of workers, by state", ["model", "state"])
        self.bindings = new.counter(
            "session_bindings", "Placed requests with a session, by the outcome of its binding to a worker", ["result"]
        )
        self.scaler_pools = new.gauge("scaler_pools", "Pools with autoscaling.mode builtin")
        self.scaler_leads = new.gauge("scaler_leads", "Whether this router scales these pools")
        self.scaler_failures = new.counter(
            "scaler_failures", "Failed evaluations of a pool, or of the leader's lease, whose pool is empty", ["pool"]
        )
        self.scalings = new.counter("scalings", "Changes of a pool's replicas", ["pool", "reason"])
        self.pool_replicas = new.gauge(
            "pool_replicas", "Replicas of a scaled pool, and those that its demand needs", ["pool", "kind"]
        )
        self.pool_load = new.gauge("pool_load", "Demand for a scaled pool, in workers", ["pool"])
        Totals(
            "ryzanstein_router_lookups",
            "Lookups at the coordinator",
            "result",
            lambda: {kind: sum(getattr(each, kind) for each in prefixes) for kind in ("answered", "failed")},
            registry,
        )

    def placed(self, placed: Placement, seconds: float) -> None:
        """Count a decision that took `seconds`, queue included."""
        model, query = placed.evaluation.pool.model, placed.evaluation.query
        labels = model, placed.choice.reason
        if (count := self._placed.get(labels)) is None:
            count = self._placed[labels] = self.decisions.labels(*labels)
        count.inc()
        self.seconds.observe(seconds - placed.queued_s)
        if placed.session is not None:
            if (bound := self._bindings.get(placed.session)) is None:
                bound = self._bindings[placed.session] = self.bindings.labels(placed.session)
            bound.inc()
        if placed.queued_s:
            self.queue_seconds.observe(placed.queued_s)
        series = self._series.get(model) or self._series_of(model)
        series.expected_ttft.observe(placed.choice.chosen.ttft_ms / 1000)
        series.prompt_tokens.inc(query.prompt_tokens)
        series.matched_tokens.inc(placed.choice.chosen.matched_tokens)

    def _series_of(self, model: str) -> _ModelSeries:
        series = self._series[model] = _ModelSeries(
            self.expected_ttft.labels(model), self.prompt_tokens.labels(model), self.matched_tokens.labels(model)
        )
        return series

    def reported(self, outcome: routing_pb2.Outcome) -> None:
        """Count a gateway's report of a request's end."""
        if outcome.result != routing_pb2.Outcome.RESULT_BEGUN:
            self.outcomes.labels(_RESULTS.get(outcome.result, "unspecified")).inc()

    def evaluated(self, pool: str, current: int, desired: int, load: float) -> None:
        """Show an evaluation of the scaler."""
        self.pool_replicas.labels(pool, "current").set(current)
        self.pool_replicas.labels(pool, "desired").set(desired)
        self.pool_load.labels(pool).set(load)

    def clear_pools(self) -> None:
        """Show no pool's replicas: another router may scale them now."""
        self.pool_replicas.clear()
        self.pool_load.clear()

    def refresh(self, fleet: Fleet, routing: Routing) -> None:
        """Update the gauges, and remove those of forgotten models."""
        for model in self._shown - fleet.pools.keys():
            for why in IneligibleReason:
                self.workers.remove(model, why.text or "eligible")
            for state in BreakerState:
                self.breakers.remove(model, state.value)
            for gauge in (self.queued, self.held, self.held_seconds):
                gauge.remove(model)
        self._shown, now = set(fleet.pools), time.monotonic()
        for model, pool in fleet.pools.items():
            tally = Tally(pool.snapshot().why_not.tolist())
            for why in IneligibleReason:
                self.workers.labels(model, why.text or "eligible").set(tally[why])
            states = Tally(pool.breakers.states(now))
            for state in BreakerState:
                self.breakers.labels(model, state.value).set(states[state])
            queue, cold = routing.queues.get(model), routing.starts.estimate(pool) is not None
            n_queued, since = (len(queue), queue.since) if queue else (0, None)
            self.queued.labels(model).set(n_queued)
            self.held.labels(model).set(n_queued if cold else 0)
            self.held_seconds.labels(model).set(now - since if cold and since is not None else 0.0)
        self.redis_up.set(routing.sessions.available())
