"""The public gRPC service gives what REST gives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc

from services.common.ports import free_port
from services.common.rpc import open_channel
from tests.integration.gateway.fleet import MODEL, Worker
from tests.integration.gateway.gateways import Stack, eventually, running_stack
from tests.unit.gateway.made_tokenizers import byte_level

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceAsyncStub

PROMPT = "The quick brown fox"


HOT = pb.GenerationOptions(temperature=-1)


@asynccontextmanager
async def inference(workers: list[Worker] | None = None, **options: Any) -> AsyncIterator[tuple[Stack, Stub]]:
    port = free_port()
    async with running_stack(workers, grpc_port=port, **options) as stack, open_channel(f"127.0.0.1:{port}") as channel:
        yield stack, inference_pb2_grpc.InferenceStub(channel)


async def test_generate_equals_rest() -> None:
    async with inference() as (stack, stub):
        rest = (await stack.complete(prompt=PROMPT, seed=-7, max_tokens=30, stop="zz")).json()
        options = pb.GenerationOptions(seed=2**64 - 7, max_tokens=30, stop=["zz"], logprobs=2)
        responses = [r async for r in stub.Generate(pb.GenerateRequest(model=MODEL, prompt=PROMPT, options=options))]
        assert "".join(r.text for r in responses) == rest["choices"][0]["text"]
        index = 0
        for response in responses:
            assert response.first_index == index
            index += len(response.ids)
        assert index == 30
        assert sum(len(r.logprobs) for r in responses) == 30
        assert responses[-1].finish_reason == "length"
        assert responses[-1].usage.completion_tokens == 30
        assert responses[-1].usage.prompt_tokens == rest["usage"]["prompt_tokens"]


async def test_token_ids_and_chat() -> None:
    async with inference() as (stack, stub):
        ids = byte_level().encode(PROMPT).ids
        request = pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=ids), options=pb.GenerationOptions(seed=1))
        assert len([r async for r in stub.Generate(request)][-1].finish_reason)
        assert [s.prompt_ids for worker in stack.workers for s in worker.submits] == [ids]
        options = pb.GenerationOptions(seed=1, max_tokens=8)
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")], options=options)
        text = "".join([r.text async for r in stub.Chat(chat)])
        rest = await stack.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], seed=1, max_tokens=8
        )
        assert text == rest.choices[0].message.content


async def test_the_unary_calls() -> None:
    async with inference() as (_, stub):
        ids = list((await stub.Tokenize(pb.TokenizeRequest(text=PROMPT))).ids)
        assert ids == byte_level().encode(PROMPT).ids
        assert (await stub.Detokenize(pb.DetokenizeRequest(ids=ids))).text == PROMPT
        models = (await stub.ListModels(pb.ListModelsRequest())).models
        assert [(m.id, m.max_model_len) for m in models] == [(MODEL, 256)]
        embedded = await stub.Embed(pb.EmbedRequest(input=["a", "bc"]))
        assert [len(e.values) for e in embedded.data] == [4, 4]


@pytest.mark.parametrize(
    ("request_", "code", "param", "details"),
    [
        (pb.GenerateRequest(prompt="a", options=HOT), "INVALID_ARGUMENT", "temperature", "temperature"),
        (pb.GenerateRequest(prompt=""), "INVALID_ARGUMENT", "prompt", "prompt"),
        (pb.GenerateRequest(prompt="a", model="nope"), "NOT_FOUND", "model", "nope"),
    ],
)
async def test_errors_are_status_codes_that_name_the_field(
    request_: pb.GenerateRequest, code: str, param: str, details: str
) -> None:
    async with inference() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await anext(aiter(stub.Generate(request_)))
        assert failure.value.code().name == code
        assert details in failure.value.details()
        assert dict(failure.value.trailing_metadata())["param"] == param


async def test_busy_is_resource_exhausted_with_retry_after() -> None:
    async with inference() as (stack, stub):
        stack.router.busy = True
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await anext(aiter(stub.Generate(pb.GenerateRequest(prompt="a"))))
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(failure.value.trailing_metadata())["retry-after"] == "7"


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_a_text_that_is_not_utf8_is_an_invalid_argument(method: str) -> None:
    async with inference([Worker("w0")]) as (stack, stub):
        assert stub
        async with open_channel(f"127.0.0.1:{stack.gateway.grpc.port}") as channel:
            kind = channel.unary_stream if method == "Generate" else channel.unary_unary
            call = kind(f"/ryzanstein.v1.Inference/{method}", request_serializer=None, response_deserializer=None)
            answer = call(b"\x12\x02\xff\xfe")  # field 2 of both is a text
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await (answer if method == "Tokenize" else anext(aiter(answer)))
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "UTF-8" in error.value.details()


async def test_a_routers_mistake_over_a_request_costs_neither_it_nor_the_next_one() -> None:
    async with inference() as (stack, stub):
        stack.router.mistaken = True
        for asked in (1, 2):
            pieces = [
                piece
                async for piece in stub.Generate(
                    pb.GenerateRequest(prompt="a", options=pb.GenerationOptions(max_tokens=4))
                )
            ]
            assert pieces[-1].finish_reason == "length"
            assert len(stack.router.routes) == asked, "the router is asked again"


async def test_a_cancelled_call_cancels_the_worker() -> None:
    worker = Worker("w0", step_s=0.02)
    async with inference([worker]) as (_, stub):
        call = stub.Generate(pb.GenerateRequest(prompt=PROMPT, options=pb.GenerationOptions(max_tokens=200)))
        await anext(aiter(call))
        call.cancel()
        await eventually(lambda: worker.cancelled)


async def test_health_says_serving() -> None:
    async with inference() as (stack, _), open_channel(f"127.0.0.1:{stack.gateway.grpc.port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="ryzanstein.v1.Inference")
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
