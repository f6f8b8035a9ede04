"""A mistake of the gateway's own ends its request with an honest error, in every API, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from ryzanstein.v1 import inference_pb2 as pb

from services.gateway.batches.lines import Inspector
from services.gateway.generation.output import Generation, OutputChunk
from services.gateway.generation.pipeline import Pipeline
from services.gateway.generation.request import GenerationRequest
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack
from tests.integration.gateway.redis_server import running_redis
from tests.integration.gateway.test_batches import begin, gateway, lines_of, over, request
from tests.integration.gateway.test_inference_grpc import inference
from tests.integration.gateway.test_stream_socket import SocketClient, connect
from tests.integration.gateway.test_telemetry import scrape_until

SAID = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": SAID},
    "/v1/responses": {"input": "a", "store": False},
    "/v1/messages": {"messages": SAID, "max_tokens": 4},
    "/v1/embeddings": {"input": "a"},
}


@pytest.fixture
def before_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def prepare(*_arguments: object, **_more: object) -> GenerationRequest:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Pipeline, "prepare", prepare)


@pytest.fixture
def in_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """After three chunks of each generation that has more than eight tokens."""
    take = Generation.next
    taken: dict[Generation, int] = {}

    async def take_three(generation: Generation) -> OutputChunk:
        taken[generation] = taken.get(generation, 0) + 1
        if taken[generation] > 3 and generation.request.options.max_tokens > 8:
            raise ZeroDivisionError("planted")
        return await take(generation)

    monkeypatch.setattr(Generation, "next", take_three)


async def _socket_error(stack: GatewayStack, tokens: int) -> dict[str, Any]:
    async with connect(stack) as socket:
        client = SocketClient(socket)
        await client.start("a", tokens)
        error = await client.until("error", "a")
        await client.send(type="ping")
        await client.until("pong")  # the connection is not ended by it
    return dict(error["error"])


async def test_before_an_answer(before_answers: None) -> None:
    async with inference() as (stack, stub):
        for path, body in BODIES.items():
            for stream in (None,) if path == "/v1/embeddings" else (None, True):
                answer = await stack.http.post(path, json=body if stream is None else body | {"stream": stream})
                assert answer.status_code == 500, (path, answer.text)
                assert "The gateway failed to serve the request." in answer.text
                assert "planted" not in answer.text
        assert (await _socket_error(stack, 4))["code"] == "internal_error"
        with pytest.raises(grpc.aio.AioRpcError, match="The gateway failed to serve the request") as failure:
            await anext(aiter(stub.Generate(pb.GenerateRequest(prompt="a"))))
        assert failure.value.code() is grpc.StatusCode.INTERNAL
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Embed(pb.EmbedRequest(input=["a"]))
        assert failure.value.code() is grpc.StatusCode.INTERNAL
        await scrape_until(stack, 2, "requests_total", "rest", "", "/v1/chat/completions", "500")


async def test_in_the_middle_of_an_answer(in_answers: None) -> None:
    async with inference([Worker("w0", step_s=0.01)]) as (stack, stub):
        with pytest.raises(httpx.RemoteProtocolError):  # no client may take it for whole
            await stack.complete(prompt="a", max_tokens=40, stream=True)
        await scrape_until(stack, 1, "streams_broken_total", "internal")
        assert (await _socket_error(stack, 40))["code"] == "internal_error"
        options = pb.GenerationOptions(max_tokens=40)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stub.Generate(pb.GenerateRequest(prompt="a", options=options)):
                pass
        assert failure.value.code() is grpc.StatusCode.INTERNAL
        assert (await stack.complete(prompt="a", max_tokens=8)).status_code == 200


async def test_in_the_work_on_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is left as it is, and taken up again."""
    look = Inspector.look
    looks: list[int] = []

    def stumble_once(inspector: Inspector, number: int, data: bytes) -> bool:
        looks.append(number)
        if len(looks) == 2:
            raise ZeroDivisionError("planted")
        return look(inspector, number, data)

    monkeypatch.setattr(Inspector, "look", stumble_once)
    with running_redis(tmp_path) as server:
        async with gateway(server) as stack:
            batch = await over(stack.client, await begin(stack.client, [request("a"), request("b")]))
            assert batch.status == "completed"
            assert {line["custom_id"] for line in await lines_of(stack.client, batch.output_file_id)} == {"a", "b"}
    assert looks == [1, 2, 1, 2]
