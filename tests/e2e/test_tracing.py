"""A request can be followed from its arrival to the ranks' prefill and decode, whichever API it came through."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import httpx
import pytest
import websockets
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc

from services.common.ports import free_port
from tests.stack import RunningStack, running_stack

PROMPT = "def fibonacci(n):\n    " * 4  # several hash blocks: the coordinator is asked
TOKENS = 12


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[str, Span]] = []

    def Export(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
        with self._lock:
            for resource in request.resource_spans:
                (service,) = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
                self._spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> dict[str, tuple[str, Span]]:
        """Service and span by the span's name."""
        with self._lock:
            return {span.name: (service, span) for service, span in self._spans if span.trace_id.hex() == trace_id}

    def wait(self, trace_id: str, names: set[str]) -> dict[str, tuple[str, Span]]:
        deadline = time.monotonic() + 20
        while not names <= self.trace(trace_id).keys():
            assert time.monotonic() < deadline, f"{sorted(names - self.trace(trace_id).keys())} never came"
            time.sleep(0.05)
        return self.trace(trace_id)


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, int]]:
    collector, server = Collector(), grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, port
    server.stop(None)


@pytest.fixture(scope="module")
def traced(
    collector: tuple[Collector, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningStack, int]]:
    grpc_port = free_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector[1]}")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        environment.setenv("RYZANSTEIN_LOOKUP_TIMEOUT_MS", "5000")  # on a busy machine five milliseconds are nothing
        folder: Path = tmp_path_factory.mktemp("run")
        with running_stack(folder, "--grpc-port", str(grpc_port)) as stack:
            yield stack, grpc_port


def rest(stack: RunningStack, grpc_port: int, traceparent: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": TOKENS}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, headers={"traceparent": traceparent}, timeout=60)
    assert answer.status_code == httpx.codes.OK


def websocket(stack: RunningStack, grpc_port: int, traceparent: str) -> None:
    async def stream() -> None:
        url = f"{stack.url.replace('http', 'ws')}/v1/stream"
        async with websockets.connect(url, additional_headers={"traceparent": traceparent}, proxy=None) as socket:
            request = {"prompt": PROMPT, "max_tokens": TOKENS}
            await socket.send(json.dumps({"type": "start", "id": "a", "kind": "completion", "request": request}))
            while json.loads(await socket.recv())["type"] != "done":
                pass

    asyncio.run(stream())


def public_grpc(stack: RunningStack, grpc_port: int, traceparent: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        options = inference_pb2.GenerationOptions(max_tokens=TOKENS)
        request = inference_pb2.GenerateRequest(prompt=PROMPT, options=options)
        assert list(
            inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=(("traceparent", traceparent),))
        )


@pytest.mark.parametrize(
    ("call", "arrival"),
    [(rest, "POST /v1/completions"), (websocket, "stream completion"), (public_grpc, "Generate")],
)
def test_one_trace_from_the_request_to_prefill_and_decode(
    collector: tuple[Collector, int],
    traced: tuple[RunningStack, int],
    call: Callable[[RunningStack, int, str], None],
    arrival: str,
) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    call(*traced, f"00-{trace_id}-{caller}-01")
    # child: (service, parent)
    family = {
        "route": ("ryzanstein-router", arrival),
        "lookup": ("ryzanstein-kv-coordinator", "route"),
        "worker.request": ("ryzanstein-worker", arrival),
        "worker.queue": ("ryzanstein-worker", "worker.request"),
        "worker.prefill": ("ryzanstein-worker", "worker.request"),
        "worker.decode": ("ryzanstein-worker", "worker.request"),
    }
    spans = collector[0].wait(trace_id, {arrival, *family})
    assert spans[arrival][0] == "ryzanstein-gateway"
    assert spans[arrival][1].parent_span_id.hex() == caller
    for name, (service, parent) in family.items():
        assert spans[name][0] == service
        assert spans[name][1].parent_span_id == spans[parent][1].span_id, name
    whole, queue, prefill, decode = (spans[name][1] for name in (arrival, *list(family)[-3:]))
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert whole.start_time_unix_nano <= queue.start_time_unix_nano < prefill.end_time_unix_nano
    assert decode.end_time_unix_nano <= whole.end_time_unix_nano + 1_000_000, "the arrival's span lasts to the end"
    attributes = {a.key: a.value for a in prefill.attributes}
    assert attributes["ryzanstein.prompt_tokens"].int_value > 0
