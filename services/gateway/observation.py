"""Metrics and traces of a request from arrival to end, the same for REST, WebSocket and gRPC."""

from __future__ import annotations

import random
from time import perf_counter

from opentelemetry.trace import INVALID_SPAN, Span, StatusCode
from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry_names import AttributeValue
from services.common.tracing import traceparent_of
from services.gateway.errors import ApiError
from services.gateway.spans import REQUEST_ID, RequestTracer, attach
from services.gateway.telemetry import GatewayMetrics

CLIENT_GONE = 499  # nginx's status for a client that disconnected; never sent
_SERVERS_FAULT = 500


def request_id_of(given: str) -> str:
    """A request's id: the caller's `x-request-id`, cut to 128 characters, or a new id."""
    return given[:128] or f"{random.getrandbits(64):016x}"


class Observer:
    """Observes the requests of one API: `rest`, `websocket` or `grpc`."""

    def __init__(self, api: str, metrics: GatewayMetrics, tracer: RequestTracer) -> None:
        self._api = api
        self._metrics = metrics
        self.tracer = tracer
        # The results of labels() are cached: one call costs as much as all other metrics of a request.
        self._in_flight: dict[str, Gauge] = {}
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self._counters: dict[tuple[str, int, str], Counter] = {}

    def begin(self, route: str, span: str = "", traceparent: str = "", request_id: str = "") -> ObservedRequest:
        """Observe a request that has arrived; the caller calls :meth:`ObservedRequest.end` exactly once.

        `span` names the request's span, which continues the caller's `traceparent` and holds the id; empty: no span.
        """
        in_flight = self._in_flight.get(route)
        if in_flight is None:
            in_flight = self._in_flight[route] = self._metrics.in_flight.labels(self._api, route)
        traced = self.tracer.begin(span, traceparent) if span else INVALID_SPAN
        if request_id and traced.is_recording():
            traced.set_attribute(REQUEST_ID, request_id)
        return ObservedRequest(self, route, in_flight, traced)

    def count(self, route: str, status: int, model: str, seconds: float) -> None:
        """Count a request that has ended."""
        histogram = self._seconds.get((route, model))
        if histogram is None:
            histogram = self._seconds[route, model] = self._metrics.e2e.labels(self._api, route, model)
        histogram.observe(seconds)
        counter = self._counters.get((route, status, model))
        if counter is None:
            counter = self._metrics.requests.labels(self._api, route, str(status), model)
            self._counters[route, status, model] = counter
        counter.inc()

    def count_broken(self, error: ApiError | None) -> None:
        """Count a stream that ended with an error; None: an unexpected exception."""
        self._metrics.broken.labels("internal" if error is None else error.code or error.type).inc()


class ObservedRequest:
    """A request in progress."""

    __slots__ = ("_began", "_in_flight", "_observer", "_route", "_span", "traceparent")

    def __init__(self, observer: Observer, route: str, in_flight: Gauge, span: Span) -> None:
        self._observer = observer
        self._route = route
        self._in_flight = in_flight
        self._span = span
        self._began = perf_counter()
        self._in_flight.inc()
        self.traceparent = traceparent_of(span) if span is not INVALID_SPAN else ""  # sent to the worker

    @property
    def trace_id(self) -> str:
        """The trace's id in 32 hexadecimal digits; empty without tracing."""
        return self.traceparent[3:35]

    def attach(self) -> None:
        """Make the span current; call this in a task that serves only this request."""
        attach(self._span)

    def broken(self, error: ApiError | None) -> None:
        """Count an answer that had begun and ends with an error."""
        self._observer.count_broken(error)

    def end(self, status: int, model: str) -> None:
        """End the request after its last byte or a disconnection. `status` is an HTTP status in all APIs."""
        self._in_flight.dec()
        self._observer.count(self._route, status, model, perf_counter() - self._began)
        if self._span.is_recording():
            if status >= _SERVERS_FAULT:
                self._span.set_status(StatusCode.ERROR)
            attributes: dict[str, AttributeValue] = {"http.response.status_code": status, "ryzanstein.model": model}
            self._observer.tracer.end(self._span, self._route, attributes)
