"""A decision can be followed from the caller through the router to the coordinator."""

from __future__ import annotations

import socket

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from ryzanstein.v1 import routing_pb2 as pb

from tests.integration.router.conftest import RouterRig
from tests.integration.router.processes import coordinator_process, until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: dict[str, Span] = {}
        self.instances: dict[str, str] = {}  # by service

    async def Export(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
        for resource in request.resource_spans:
            named = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.instances[named["service.name"]] = named["service.instance.id"]
            for scope in resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_the_callers_trace_goes_on(fleet: RouterRig, monkeypatch: pytest.MonkeyPatch) -> None:
    server, collector = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    await fleet.worker("only")
    coordinator = fleet.process(coordinator_process(fleet.redis_server.url_of("coordinator")))
    router = await fleet.router(
        workers=1, ROUTER_ID="router-a", COORDINATOR_ADDRESS=coordinator.address, LOOKUP_TIMEOUT_MS="5000"
    )
    await router.Route(
        pb.RouteRequest(request_id="r", prompt_tokens=100, block_hashes=[1, 2]),
        metadata=(("traceparent", f"00-{TRACE}-{PARENT}-01"),),
    )

    async def exported() -> bool:
        return {"route", "lookup"} <= set(collector.spans)

    await until(exported)
    route, lookup = collector.spans["route"], collector.spans["lookup"]
    assert route.trace_id.hex() == lookup.trace_id.hex() == TRACE
    assert route.parent_span_id.hex() == PARENT
    assert lookup.parent_span_id == route.span_id
    assert collector.instances["ryzanstein-kv-coordinator"] == socket.gethostname(), "in Kubernetes the pod's name"
    assert collector.instances["ryzanstein-router"] == "router-a"
    attributes = {a.key: a.value for a in route.attributes}
    assert attributes["route.worker"].string_value == "only"
    assert attributes["route.cost_ms"].double_value > 0
    await server.stop(None)
