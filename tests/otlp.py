"""A receiver of spans, for tests and benchmarks: the far end of the standard OTLP exporter."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from concurrent import futures

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent, by trace."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[str, list[tuple[str, Span]]] = {}

    def Export(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
        with self._lock:
            for resource in request.resource_spans:
                (service,) = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    self._spans.setdefault(span.trace_id.hex(), []).append((service, span))
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> dict[str, tuple[str, Span]]:
        """Service and span by the span's name: of several with one name, the one that began last."""
        with self._lock:
            spans = sorted(self._spans.get(trace_id, []), key=lambda actual: actual[1].start_time_unix_nano)
        return {span.name: (service, span) for service, span in spans}

    def wait(
        self, trace_id: str, names: set[str], late: Collection[str] = (), since_ns: int = 0
    ) -> dict[str, tuple[str, Span]]:
        """The trace, once it has spans of these names, the `late` ones begun no earlier than 1 ms before `since_ns`."""
        deadline = time.monotonic() + 60
        while missing := self._missing(trace_id, names, late, since_ns - 1_000_000):
            assert time.monotonic() < deadline, f"{sorted(missing)} never came"
            time.sleep(0.05)
        return self.trace(trace_id)

    def _missing(self, trace_id: str, names: set[str], late: Collection[str], since_ns: int) -> set[str]:
        actual = self.trace(trace_id)
        early = {name for name in late if name in actual and actual[name][1].start_time_unix_nano < since_ns}
        return (names - actual.keys()) | early


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, dict[str, str]]]:
    """A collector, and the environment by which processes send it their spans soon."""
    collector, server = Collector(), grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    try:
        yield collector, variables
    finally:
        server.stop(None)
