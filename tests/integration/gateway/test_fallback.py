"""The fallback model answers when a model has lost its workers: before the request came, or while it was under way."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio
import pytest
from ryzanstein.v1 import inference_pb2 as pb

from services.gateway.tenants.keys import digest_of
from tests.integration.gateway.fleet import MODEL, Worker, scripted_token
from tests.integration.gateway.gateways import GatewayStack, eventually
from tests.integration.gateway.test_inference_grpc import inference
from tests.integration.gateway.test_stream_socket import SocketClient, connect
from tests.integration.gateway.test_telemetry import scrape
from tests.unit.gateway.made_tokenizers import byte_level

if TYPE_CHECKING:
    from tests.integration.gateway.test_inference_grpc import Stub

PROMPT, COUNT = "User: hi", 6
OTHER = "fallback"


@dataclass(frozen=True)
class FallbackAnswer:
    """`model` is who is said to have answered; `refusal` the status of an error."""

    model: str = ""
    text: str = ""
    refusal: str = ""


Ask = Callable[[GatewayStack, "Stub"], Awaitable[FallbackAnswer]]


async def rest(stack: GatewayStack, stub: Stub) -> FallbackAnswer:
    answer = await stack.complete(prompt=PROMPT, model=MODEL, seed=1, max_tokens=COUNT)
    if answer.status_code != 200:
        return FallbackAnswer(refusal=str(answer.status_code))
    assert answer.headers.get("x-ryzanstein-fallback-model", MODEL) == answer.json()["model"]
    return FallbackAnswer(answer.json()["model"], answer.json()["choices"][0]["text"])


async def websocket(stack: GatewayStack, stub: Stub) -> FallbackAnswer:
    async with connect(stack) as socket:
        client = SocketClient(socket)
        await client.start("a", COUNT, seed=1, model=MODEL, prompt=PROMPT)
        model = ""
        while (message := await client.receive())["type"] != "done":
            if message["type"] == "error":
                return FallbackAnswer(refusal=message["error"]["code"])
            if message["type"] == "started":
                assert not client.ids, "only before the first token"
                model = message["model"]
        assert message["usage"]["completion_tokens"] == COUNT
        return FallbackAnswer(model, client.text["a"])


async def public_grpc(stack: GatewayStack, stub: Stub) -> FallbackAnswer:
    options = pb.GenerationOptions(seed=1, max_tokens=COUNT)
    call = stub.Generate(pb.GenerateRequest(model=MODEL, prompt=PROMPT, options=options))
    try:
        text = "".join([response.text async for response in call])
    except grpc.aio.AioRpcError as error:
        return FallbackAnswer(refusal=error.code().name)
    metadata = dict(await call.initial_metadata())
    return FallbackAnswer(str(metadata.get("x-ryzanstein-fallback-model", MODEL)), text)


APIS = pytest.mark.parametrize("ask", [rest, websocket, public_grpc])


def expected_text() -> str:
    ids = byte_level().encode(PROMPT).ids
    return byte_level().decode([scripted_token(ids, 1, position) for position in range(COUNT)])


@asynccontextmanager
async def two_models(**settings: object) -> AsyncIterator[tuple[GatewayStack, Stub]]:
    workers = [Worker("w0"), Worker("small", model=OTHER)]
    async with inference(workers, fallback_model=OTHER, **settings) as (stack, stub):
        yield stack, stub


@APIS
async def test_model_with_a_worker_answers_without_the_fallback(ask: Ask) -> None:
    async with two_models() as (stack, stub):
        assert await ask(stack, stub) == FallbackAnswer(MODEL, expected_text())
        assert ("fallbacks_total", MODEL) not in await scrape(stack)


@APIS
async def test_the_fallback_answers_for_a_model_without_workers(ask: Ask) -> None:
    async with two_models() as (stack, stub):
        stack.router.hidden = {"w0"}
        await eventually(lambda: len(stack.gateway.catalog.available()) == 1)
        assert await ask(stack, stub) == FallbackAnswer(OTHER, expected_text())
        assert (await scrape(stack))["fallbacks_total", MODEL] == 1


@APIS
async def test_fallback_answers_when_all_workers_leave_before_the_first_token(ask: Ask) -> None:
    async with two_models() as (stack, stub):
        stack.router.away = {"w0"}
        assert await ask(stack, stub) == FallbackAnswer(OTHER, expected_text())
        assert [submit.request_id for submit in stack.workers[1].submits], "the other model's worker did it"
        assert (await scrape(stack))["fallbacks_total", MODEL] == 1


@pytest.mark.parametrize(("ask", "refusal"), [(rest, "503"), (websocket, "no_workers"), (public_grpc, "UNAVAILABLE")])
async def test_without_any_worker_the_error_is_clear(ask: Ask, refusal: str) -> None:
    async with two_models() as (stack, stub):
        stack.router.away = {"w0", "small"}
        assert await ask(stack, stub) == FallbackAnswer(refusal=refusal)


async def test_a_tenant_gets_no_model_that_its_key_does_not_allow() -> None:
    keys = [{"key_sha256": digest_of("k"), "name": "t", "models": [MODEL]}]
    async with two_models(tenancy=True, api_keys=json.dumps(keys)) as (stack, stub):
        stack.http.headers["authorization"] = "Bearer k"
        stack.router.away = {"w0"}
        assert await rest(stack, stub) == FallbackAnswer(refusal="503")
