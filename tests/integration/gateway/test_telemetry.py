"""Telemetry for operators: metrics that add up, and a trace context that reaches the worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from ryzanstein.v1 import inference_pb2 as pb

from tests.integration.gateway.fleet import MODEL, Fault, Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, running_stack
from tests.integration.gateway.placing import running_fleet
from tests.integration.gateway.process import gateway_process
from tests.integration.gateway.test_inference_grpc import inference
from tests.integration.gateway.test_stream_socket import SocketClient, connect

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def scrape(stack: GatewayStack) -> dict[tuple[str, ...], float]:
    """Samples by name and label values, in the order of the labels' names."""
    text = (await stack.http.get("/metrics")).text
    return {
        (
            sample.name.removeprefix("ryzanstein_gateway_"),
            *(value for _, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape_until(stack: GatewayStack, value: float, *sample: str) -> dict[tuple[str, ...], float]:
    """All samples, as soon as one has a value: what ends a request is counted after its client has heard of it."""
    async with asyncio.timeout(60):
        while (seen := await scrape(stack)).get(sample) != value:  # noqa: ASYNC110  # nothing tells when
            await asyncio.sleep(0.01)
    return seen


async def test_metrics_add_up() -> None:
    async with running_stack([Worker("w0", faults=[Fault("handoff", 3)], step_s=0.05)]) as stack:
        prompt_tokens = (await stack.complete(prompt="a b", max_tokens=10)).json()["usage"]["prompt_tokens"]
        await stack.complete(prompt="a", temperature=-1)
        stream = await stack.client.completions.create(model=MODEL, prompt="a b", max_tokens=10, stream=True)
        assert [chunk async for chunk in stream]
        seen = await scrape_until(stack, 2, "request_seconds_count", "rest", MODEL, "/v1/completions")
        assert seen["request_seconds_count", "rest", "", "/v1/completions"] == 1
        assert seen["requests_total", "rest", MODEL, "/v1/completions", "200"] == 2
        assert seen["requests_total", "rest", "", "/v1/completions", "400"] == 1
        assert seen["tokens_total", "completion", MODEL, ""] == 20
        assert seen["tokens_total", "prompt", MODEL, ""] == 2 * prompt_tokens
        assert seen["resumes_total", "drain"] == 1
        assert seen["resumes_total", "stall"] == 0, (
            "what never happened is there, or its first time would be no increase"
        )
        assert seen["time_to_first_token_seconds_count", MODEL] == 2
        assert seen["inter_token_seconds_count", MODEL] > 0
        assert seen["inter_token_seconds_bucket", "+Inf", MODEL] == seen["inter_token_seconds_count", MODEL]
        assert seen["prompt_length_tokens_sum", MODEL] == 2 * prompt_tokens
        assert seen["completion_length_tokens_bucket", "16.0", MODEL] == 2
        assert seen["completion_length_tokens_bucket", "8.0", MODEL] == 0
        assert seen["resume_seconds_count",] == 1
        assert seen["resumed_tokens_total",] == 3
        assert seen["in_flight_requests", "rest", "/v1/completions"] == 0
        assert seen["waiting_sequences",] == 0
        assert seen["known_workers",] == 1
        assert seen["router_up",] == 1
        assert seen["sequences_total", "length", MODEL] == 2
        assert not any(key[0].startswith(("vllm:", "gen_ai")) for key in seen), "foreign names are an option"


async def test_series_also_have_the_names_of_other_tools() -> None:
    async with running_stack([Worker("w0", step_s=0.05)], telemetry_names=("vllm", "gen_ai")) as stack:
        used = (await stack.complete(prompt="a b", max_tokens=10)).json()["usage"]["prompt_tokens"]
        await stack.http.get("/v1/models")
        seen = await scrape_until(stack, 1, "request_seconds_count", "rest", MODEL, "/v1/completions")
        (duration,) = [key for key in seen if key[0] == "gen_ai_server_request_duration_seconds_count"]
        expected = {
            ("vllm:prompt_tokens_total", MODEL): used,
            ("vllm:generation_tokens_total", MODEL): 10,
            ("vllm:request_success_total", "length", MODEL): 1,
            ("vllm:e2e_request_latency_seconds_count", MODEL): 1,
            ("vllm:time_to_first_token_seconds_bucket", "+Inf", MODEL): 1,
            ("vllm:request_generation_tokens_sum", MODEL): 10,
            ("gen_ai_client_token_usage_sum", "generate_content", "ryzanstein", MODEL, "input"): used,
            ("gen_ai_client_token_usage_sum", "generate_content", "ryzanstein", MODEL, "output"): 10,
        }
        assert {key: seen.get(key) for key in expected} == expected
        assert duration[1:] == ("text_completion", "ryzanstein", MODEL), "no operation but the completion"
        for ours, theirs in (
            ("inter_token_seconds", "vllm:inter_token_latency_seconds"),
            ("inter_token_seconds", "vllm:time_per_output_token_seconds"),
        ):
            assert seen[f"{theirs}_sum", MODEL] == seen[f"{ours}_sum", MODEL] > 0


async def test_a_stream_that_ends_badly_is_no_success() -> None:
    # Slow workers: the client must be gone before its answer is complete.
    async with running_stack(
        [Worker(n, step_s=0.01, faults=[Fault("break", 3), Fault("break", 3)]) for n in ("w0", "w1")]
    ) as stack:
        body = {"prompt": "a", "max_tokens": 10, "stream": True}
        assert (await stack.http.post("/v1/completions", json=body)).status_code == 200
        for worker in stack.workers:  # between two workers of a stream no worker hears that its client is gone
            worker.faults.clear()
        async with stack.http.stream("POST", "/v1/completions", json=body | {"max_tokens": 200}) as response:
            await anext(response.aiter_bytes())
        await eventually(lambda: any(worker.cancelled for worker in stack.workers))
        seen = await scrape_until(stack, 1, "requests_total", "rest", MODEL, "/v1/completions", "499")
        assert seen["requests_total", "rest", MODEL, "/v1/completions", "500"] == 1, "poison, told by an event"
        assert ("requests_total", "rest", MODEL, "/v1/completions", "200") not in seen
        assert seen["streams_broken_total", "poison"] == 1
        assert ("streams_broken_total", "internal") not in seen


async def test_broken_streams_and_closed_sockets_are_counted_by_reason() -> None:
    async with inference([Worker("w0", step_s=0.01)], max_faults=0) as (stack, stub):
        async with connect(stack) as socket:
            client = SocketClient(socket)
            stack.workers[0].faults = [Fault("break", 3)]
            await client.start("a", 10)
            await client.until("error", "a")
            await socket.close(4321)
        async with connect(stack) as socket:
            await socket.close(1001)
        async with connect(stack) as socket:
            socket.transport.abort()
        stack.workers[0].faults = [Fault("break", 3)]
        with pytest.raises(grpc.aio.AioRpcError):
            assert [r async for r in stub.Generate(pb.GenerateRequest(prompt="a"))]
        seen = await scrape_until(stack, 2, "streams_broken_total", "generation_failed")
        assert [seen["websocket_closes_total", code] for code in ("other", "1001", "1005")] == [1, 1, 1]


async def test_routes_outside_the_hot_path_are_counted(stack: GatewayStack) -> None:
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/v1/models/nope", "/nothing", "/nothing/else"):
        await stack.http.get(path)
    seen = await scrape_until(stack, 2, "requests_total", "rest", "", "other", "404")  # paths of clients: one route
    assert seen["requests_total", "rest", "", "/v1/models", "200"] == 1
    assert seen["requests_total", "rest", "", "/v1/models/{name:path}", "200"] == 1
    assert seen["requests_total", "rest", "", "/v1/models/{name:path}", "404"] == 1


async def test_websocket_generations_are_counted_and_timed_like_requests() -> None:
    async with running_stack([Worker("w0", step_s=0.01)]) as stack, connect(stack) as socket:
        client = SocketClient(socket)
        await client.start("good", 10)
        await client.until("done", "good")
        await client.start("bad", 10, temperature=-1)
        await client.until("error", "bad")
        await client.start("cancelled", 200)
        await client.until("token", "cancelled")
        seen = await scrape_until(stack, 1, "in_flight_requests", "websocket", "completion")
        assert seen["websocket_connections",] == 1
        await client.send(type="cancel", id="cancelled")
        await client.until("done", "cancelled")
        seen = await scrape_until(stack, 0, "in_flight_requests", "websocket", "completion")
        assert seen["requests_total", "websocket", MODEL, "completion", "200"] == 1
        assert seen["requests_total", "websocket", "", "completion", "400"] == 1
        assert seen["requests_total", "websocket", MODEL, "completion", "499"] == 1
        assert seen["request_seconds_count", "websocket", MODEL, "completion"] == 2
        assert seen["request_seconds_count", "websocket", "", "completion"] == 1
        assert seen["request_seconds_sum", "websocket", MODEL, "completion"] > 0.1, "the generation, not its admission"
        assert seen["time_to_first_token_seconds_count", MODEL] == 2


async def test_grpc_calls_are_counted_and_timed_like_requests() -> None:
    worker = Worker("w0", step_s=0.01)
    async with inference([worker]) as (stack, stub):
        options = pb.GenerationOptions(max_tokens=10)
        assert [r async for r in stub.Generate(pb.GenerateRequest(prompt="a", options=options))]
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(aiter(stub.Generate(pb.GenerateRequest(prompt="a", model="nope"))))
        await stub.Tokenize(pb.TokenizeRequest(text="a"))
        call = stub.Generate(pb.GenerateRequest(prompt="a", options=pb.GenerationOptions(max_tokens=200)))
        await anext(aiter(call))
        await scrape_until(stack, 1, "in_flight_requests", "grpc", "Generate")
        call.cancel()
        await eventually(lambda: worker.cancelled)
        seen = await scrape_until(stack, 2, "request_seconds_count", "grpc", MODEL, "Generate")
        assert seen["requests_total", "grpc", MODEL, "Generate", "200"] == 1
        assert seen["requests_total", "grpc", "", "Generate", "404"] == 1
        assert seen["requests_total", "grpc", MODEL, "Generate", "499"] == 1
        assert seen["requests_total", "grpc", MODEL, "Tokenize", "200"] == 1
        await scrape_until(stack, 0, "in_flight_requests", "grpc", "Generate")


async def test_the_callers_trace_context_reaches_the_worker(stack: GatewayStack) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    await stack.http.post("/v1/completions", json=body, headers={"traceparent": PARENT})
    assert stack.workers[0].submits[-1].traceparent == PARENT
    await stack.http.post("/v1/completions", json=body, headers={"traceparent": "nonsense"})
    assert stack.workers[0].submits[-1].traceparent == ""


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


async def only_span(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    """The span of that name, once it has ended."""
    await eventually(lambda: any(span.name == name for span in exporter.get_finished_spans()))
    (span,) = [span for span in exporter.get_finished_spans() if span.name == name]
    return span


async def test_a_span_lasts_as_long_as_its_generation_in_every_api(exporter: InMemorySpanExporter) -> None:
    """Ten tokens at 10 ms, interrupted once: the second worker continues the same span."""
    caller = {"traceparent": PARENT, "x-request-id": "mine"}
    async with inference([Worker("w0", step_s=0.01)], traced=True) as (stack, stub):
        worker = stack.workers[0]

        async def rest() -> None:
            await stack.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 10}, headers=caller)

        async def websocket() -> None:
            async with connect(stack, additional_headers=caller) as socket:
                client = SocketClient(socket)
                await client.start("a", 10)
                await client.until("done")

        async def grpc_() -> None:
            request = pb.GenerateRequest(prompt="a", options=pb.GenerationOptions(max_tokens=10))
            assert [r async for r in stub.Generate(request, metadata=tuple(caller.items()))]

        for call, name in ((rest, "POST /v1/completions"), (websocket, "stream completion"), (grpc_, "Generate")):
            exporter.clear()
            worker.submits.clear()
            worker.faults = [Fault("handoff", 5)]
            await call()
            span = await only_span(exporter, name)
            assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
            assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
            assert span.end_time - span.start_time > 80_000_000, "nanoseconds: all of the generation"
            assert [event.name for event in span.events] == ["submitted", "interrupted", "submitted"]
            assert span.attributes["http.response.status_code"] == 200
            assert span.attributes["ryzanstein.request_id"] == "mine"
            assert span.attributes["ryzanstein.generation_id"] == worker.submits[0].request_id
            assert 10 <= span.attributes["ryzanstein.first_token_ms"] < (span.end_time - span.start_time) / 1e6
            own = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"
            assert [submit.traceparent for submit in worker.submits] == [own, own]
            assert stack.router.traceparents[-1] == own, "routing is part of the trace"


@pytest.mark.parametrize("schemes", [(), ("gen_ai",)])
async def test_span_has_the_attributes_of_opentelemetrys_conventions_when_chosen(
    exporter: InMemorySpanExporter, schemes: tuple[str, ...]
) -> None:
    exporter.clear()
    async with running_stack([Worker("w0")], traced=True, telemetry_names=schemes) as stack:
        body = {"prompt": "a secret", "max_tokens": 10, "temperature": 0.5, "n": 2}
        answer = (await stack.complete(**body)).json()
        span = await only_span(exporter, "POST /v1/completions")
        named = {name: value for name, value in span.attributes.items() if name.startswith("gen_ai.")}
        assert "secret" not in str(dict(span.attributes))
        assert named == (
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "ryzanstein",
                "gen_ai.request.model": MODEL,
                "gen_ai.request.max_tokens": 10,
                "gen_ai.request.temperature": 0.5,
                "gen_ai.request.top_p": 1.0,
                "gen_ai.request.top_k": 0,
                "gen_ai.request.frequency_penalty": 0.0,
                "gen_ai.request.presence_penalty": 0.0,
                "gen_ai.request.choice.count": 2,
                "gen_ai.response.model": MODEL,
                "gen_ai.response.id": answer["id"],
                "gen_ai.response.finish_reasons": ("length", "length"),
                "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
                "gen_ai.usage.cache_read.input_tokens": 0,
                "gen_ai.usage.output_tokens": 20,
            }
            if schemes
            else {}
        )


async def test_a_failed_request_is_an_error_in_its_trace(exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    async with running_stack([Worker("w0")], traced=True) as stack:
        stack.router.empty = True
        assert (await stack.complete(prompt="a")).status_code == 503
        span = await only_span(exporter, "POST /v1/completions")
        assert not span.status.is_ok
        assert span.attributes["http.response.status_code"] == 503


async def test_an_answer_names_its_request_and_its_trace(exporter: InMemorySpanExporter) -> None:
    async with inference([Worker("w0")], traced=True) as (stack, stub):
        exporter.clear()
        answer = await stack.complete(prompt="a", max_tokens=1)
        span = await only_span(exporter, "POST /v1/completions")
        assert answer.headers["x-trace-id"] == f"{span.context.trace_id:032x}"
        assert answer.headers["x-request-id"] == span.attributes["ryzanstein.request_id"]
        assert answer.json()["id"] == span.attributes["ryzanstein.generation_id"]
        for request in (pb.TokenizeRequest(text="a"), pb.TokenizeRequest(text="a", model="nope")):
            exporter.clear()
            call = stub.Tokenize(request, metadata=(("x-request-id", "mine"),))
            trailing = dict(await call.trailing_metadata())
            span = await only_span(exporter, "Tokenize")
            assert (trailing["x-request-id"], trailing["x-trace-id"]) == ("mine", f"{span.context.trace_id:032x}")
        async with connect(stack, additional_headers={"x-request-id": "mine"}) as socket:
            assert socket.response.headers["x-request-id"] == "mine"


async def test_probes_and_scrapes_make_no_spans(exporter: InMemorySpanExporter) -> None:
    async with running_stack([Worker("w0")], traced=True) as stack:
        exporter.clear()
        for path in ("/livez", "/readyz", "/health", "/metrics", "/v1/models", "/nothing"):
            await stack.http.get(path)
        await stack.complete(prompt="a", max_tokens=1)
        await only_span(exporter, "POST /v1/completions")
        assert len(exporter.get_finished_spans()) == 1


async def test_connection_close_is_not_logged_under_the_request_that_opened_the_connection(tmp_path: Path) -> None:
    worker, other = Worker("w0"), Worker("w1")
    async with (
        running_fleet([worker, other]) as router,
        gateway_process(router.address, tmp_path / "log") as gateway,
        httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=60) as http,
    ):
        for name in ("opener", "opener", "loser", "loser"):
            worker.faults = [Fault("break", 1)] if name == "loser" else []
            headers = {"x-request-id": name}
            body = {"prompt": "a", "max_tokens": 3}
            assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    lost = [line for line in gateway.log() if "connection to w0 lost" in line["message"]]
    assert lost
    assert "request_id" not in lost[0]
    reported = [line for line in gateway.log() if "request interrupted" in line["message"]]
    assert reported[0]["request_id"] == "loser"
    assert reported[0]["generation_id"].startswith("cmpl-")
