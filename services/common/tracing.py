"""OpenTelemetry traces: exported by OTLP if the standard environment variables name an endpoint, else off.

gRPC metadata carries the W3C trace context. `OTEL_TRACES_SAMPLER` selects the sampling.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_W3C = TraceContextTextMapPropagator()
_NO_SPAN = nullcontext(trace.INVALID_SPAN)

Metadata = tuple[tuple[str, str], ...]


@contextmanager
def tracing(service: str, instance: str = "") -> Iterator[bool]:
    """Export spans while the block runs and flush them at its end; yield whether tracing is on.

    `instance` names the process; the default is the host name, which in Kubernetes is the pod's name.
    """
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        yield False
        return
    # Imported only if tracing is on: the SDK and its exporter take a tenth of a second to import.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    names = {SERVICE_NAME: f"ryzanstein-{service}", SERVICE_INSTANCE_ID: instance or socket.gethostname()}
    provider = TracerProvider(resource=Resource.create(names))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield True
    finally:
        provider.shutdown()


def span_in(tracer: Tracer, name: str, parent: Context | None) -> AbstractContextManager[Span]:
    """A new span, current while the block runs; the invalid span if tracing is off, since an empty span costs time.

    Tracing is off if it was off when the tracer was made: asking for the provider reads the environment each time.
    """
    if parent is None and isinstance(tracer, trace.ProxyTracer):
        return _NO_SPAN
    return tracer.start_as_current_span(name, context=parent)


def current_metadata() -> Metadata:
    """gRPC metadata that carries the current span to the peer; empty outside a span."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return tuple(carrier.items())


def traceparent_of(span: Span) -> str:
    """A span as a `traceparent` value; empty for an invalid span, thus always while tracing is off."""
    if not span.get_span_context().is_valid:
        return ""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context=trace.set_span_in_context(span))
    return carrier["traceparent"]


def remote_context(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The caller's trace context from gRPC metadata; pass it as `context=` to a new span."""
    return _W3C.extract({key: value for key, value in metadata or () if isinstance(value, str)})
