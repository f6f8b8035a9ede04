"""What is counted and traced of a request from its arrival to its end; the same for REST, WebSocket and gRPC."""

from __future__ import annotations

import random
from time import perf_counter

from opentelemetry.trace import INVALID_SPAN, Span, StatusCode
from prometheus_client import Counter, Gauge, Histogram

from services.common.tracing import traceparent_of
from services.gateway.spans import REQUEST_ID, RequestTracer, attach
from services.gateway.telemetry import GatewayMetrics

CLIENT_GONE = 499  # nginx's status for it; never sent
_SERVERS_FAULT = 500


def new_request_id() -> str:
    """For a request whose caller has given it none."""
    return f"{random.getrandbits(64):016x}"


class Observer:
    """Begins the requests of one API: `rest`, `websocket` or `grpc`."""

    def __init__(self, api: str, metrics: GatewayMetrics, tracer: RequestTracer) -> None:
        self._api = api
        self._metrics = metrics
        self._tracer = tracer
        # labels() costs as much as all else that is counted for a request, so its results are kept.
        self._levels: dict[str, tuple[Gauge, Histogram]] = {}
        self._counters: dict[tuple[str, int, str], Counter] = {}

    def begin(self, route: str, span: str = "", traceparent: str = "", request_id: str = "") -> ObservedRequest:
        """A request has arrived; :meth:`ObservedRequest.end` is to be called exactly once.

        `span` names its span, which continues the caller's `traceparent` and bears the id; without it there is none.
        """
        levels = self._levels.get(route)
        if levels is None:
            metrics = self._metrics
            levels = metrics.in_flight.labels(self._api, route), metrics.e2e.labels(self._api, route)
            self._levels[route] = levels
        traced = self._tracer.begin(span, traceparent) if span else INVALID_SPAN
        if request_id and traced.is_recording():
            traced.set_attribute(REQUEST_ID, request_id)
        return ObservedRequest(self, route, levels, traced)

    def count(self, route: str, status: int, model: str) -> None:
        """A request is over."""
        counter = self._counters.get((route, status, model))
        if counter is None:
            counter = self._metrics.requests.labels(self._api, route, str(status), model)
            self._counters[route, status, model] = counter
        counter.inc()


class ObservedRequest:
    """One request that is being served."""

    __slots__ = ("_began", "_in_flight", "_observer", "_route", "_seconds", "_span", "traceparent")

    def __init__(self, observer: Observer, route: str, levels: tuple[Gauge, Histogram], span: Span) -> None:
        self._observer = observer
        self._route = route
        self._in_flight, self._seconds = levels
        self._span = span
        self._began = perf_counter()
        self._in_flight.inc()
        self.traceparent = traceparent_of(span) if span is not INVALID_SPAN else ""  # for the worker

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, by which the trace is found; empty when nobody traces."""
        return self.traceparent[3:35]

    def attach(self) -> None:
        """Make the span the current one; to be called in the task that serves this request and nothing else."""
        attach(self._span)

    def end(self, status: int, model: str) -> None:
        """The last byte has gone out, or the client has. `status` is REST's, whatever the API; `model` may be empty."""
        self._in_flight.dec()
        self._seconds.observe(perf_counter() - self._began)
        self._observer.count(self._route, status, model)
        if self._span.is_recording():
            self._span.set_attributes({"http.response.status_code": status, "ryzanstein.model": model})
            if status >= _SERVERS_FAULT:
                self._span.set_status(StatusCode.ERROR)
            self._span.end()
