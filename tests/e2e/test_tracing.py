"""A request can be followed from its arrival to the ranks' prefill and decode, whichever API it came through."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable

import grpc
import httpx
import pytest
import websockets
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc

from tests.otlp import Collector
from tests.stack import RunningStack

PROMPT = "def fibonacci(n):\n    " * 4  # several hash blocks: the coordinator is asked
TOKENS = 12


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
def test_trace_spans_the_request_to_prefill_and_decode(
    traces: tuple[Collector, dict[str, str]],
    stack: RunningStack,
    grpc_port: int,
    call: Callable[[RunningStack, int, str], None],
    arrival: str,
) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    collector, _ = traces
    call(stack, grpc_port, f"00-{trace_id}-{caller}-01")
    # child: (service, parent)
    family = {
        "route": ("ryzanstein-router", arrival),
        "lookup": ("ryzanstein-kv-coordinator", "route"),
        "worker.request": ("ryzanstein-worker", arrival),
        "worker.queue": ("ryzanstein-worker", "worker.request"),
        "worker.prefill": ("ryzanstein-worker", "worker.request"),
        "worker.decode": ("ryzanstein-worker", "worker.request"),
    }
    spans = collector.wait(trace_id, {arrival, *family})
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
    attributes = {a.key: a.value for span in (prefill, spans["route"][1]) for a in span.attributes}
    assert attributes["ryzanstein.prompt_tokens"].int_value > 0
    assert attributes["route.worker"].string_value == "worker-0"
    assert attributes["route.cost_ms"].double_value > 0
