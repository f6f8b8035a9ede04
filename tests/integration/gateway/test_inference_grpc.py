"""The public gRPC service gives what REST gives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc

from services.common.ports import free_port
from services.common.rpc import open_channel
from services.gateway.api.fields import advisory_fields, neutral_values
from services.gateway.api.ignored import IGNORED_HEADER
from services.gateway.api.schema import ChatBody, CompletionBody, Message
from tests.integration.gateway.fleet import MODEL, Fault, Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.unit.gateway.made_tokenizers import byte_level

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceAsyncStub

PROMPT = "The quick brown fox"


@asynccontextmanager
async def inference(workers: list[Worker] | None = None, **options: Any) -> AsyncIterator[tuple[GatewayStack, Stub]]:
    port = free_port()
    async with running_stack(workers, grpc_port=port, **options) as stack, open_channel(f"127.0.0.1:{port}") as channel:
        yield stack, inference_pb2_grpc.InferenceStub(channel)


TEMPLATE = (
    "{{ reasoning_effort }}{{ tone }}{% for m in messages %}{{ m.name }}{{ m.reasoning_content }}"
    "{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
IDS = pb.TokenIds(ids=byte_level().encode(PROMPT).ids)
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}, "strict": True}}
FORMAT_PB = pb.ResponseFormat(
    type="json_schema", json_schema=pb.JsonSchemaFormat(name="n", schema='{"type": "integer"}', strict=True)
)


def options(**fields: Any) -> pb.GenerationOptions:
    return pb.GenerationOptions(seed=3, **{"max_tokens": 12, **fields})


SAID = [
    {"role": "user", "content": "hi", "name": "Ada"},
    {"role": "assistant", "content": "ho", "reasoning_content": "hm"},
]
SAID_PB = [
    pb.ChatMessage(role="user", content="hi", name="Ada"),
    pb.ChatMessage(role="assistant", content="ho", reasoning="hm"),
]
SAME: list[tuple[dict[str, Any], pb.GenerateRequest | pb.ChatRequest]] = [
    ({"echo": True}, pb.GenerateRequest(echo=True, options=options())),
    ({"echo": True, "prompt": list(IDS.ids)}, pb.GenerateRequest(echo=True, options=options(), prompt_ids=IDS)),
    ({"echo": True, "logprobs": 2, "n": 3}, pb.GenerateRequest(echo=True, options=options(logprobs=2, n=3))),
    (
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        pb.GenerateRequest(echo=True, options=options(logprobs=1, max_tokens=0)),
    ),
    ({"prompt_logprobs": 1}, pb.GenerateRequest(prompt_logprobs=1, options=options())),
    (
        {"prompt": "<|bos|>a", "add_special_tokens": False, "skip_special_tokens": False},
        pb.GenerateRequest(prompt="<|bos|>a", add_special_tokens=False, options=options(skip_special_tokens=False)),
    ),
    (
        {"stop": ["e", "a", "\n", " "], "include_stop_str_in_output": True, "max_tokens": 60},
        pb.GenerateRequest(options=options(stop=["e", "a", "\n", " "], include_stop_str_in_output=True, max_tokens=60)),
    ),
    ({"prediction": "a list", "n": 2}, pb.GenerateRequest(options=options(prediction="a list", n=2))),
    (
        {"messages": SAID, "prediction": {"type": "content", "content": "a list"}},
        pb.ChatRequest(messages=SAID_PB, options=options(prediction="a list")),
    ),
    ({"response_format": FORMAT}, pb.GenerateRequest(options=options(response_format=FORMAT_PB))),
    (
        {"messages": SAID, "reasoning_effort": "low", "chat_template_kwargs": {"tone": "dry"}},
        pb.ChatRequest(
            messages=SAID_PB, reasoning_effort="low", chat_template_kwargs='{"tone": "dry"}', options=options()
        ),
    ),
    (
        {"messages": SAID, "continue_final_message": True, "add_generation_prompt": False, "n": 2, "logprobs": True},
        pb.ChatRequest(
            messages=SAID_PB,
            continue_final_message=True,
            add_generation_prompt=False,
            options=options(n=2, logprobs=0),
        ),
    ),
    (
        {"messages": SAID, "response_format": {"type": "json_object"}},
        pb.ChatRequest(messages=SAID_PB, options=options(response_format=pb.ResponseFormat(type="json_object"))),
    ),
]


def scored(logprobs: dict[str, Any] | None) -> list[float]:
    """The log probabilities that REST gives, the first of a prompt left out: it has none."""
    if logprobs is None:
        return []
    actual = [t["logprob"] for t in logprobs["content"]] if "content" in logprobs else logprobs["token_logprobs"]
    return [logprob for logprob in actual if logprob is not None]


async def test_grpc_fields_equal_rest_fields() -> None:
    async with inference([Worker("w0", template=TEMPLATE)]) as (stack, stub):
        worker = stack.workers[0]
        for fields, request in SAME:
            chat = isinstance(request, pb.ChatRequest)
            if not chat and request.WhichOneof("input") is None:
                request.prompt = PROMPT
            path = "/v1/chat/completions" if chat else "/v1/completions"
            body = {"seed": 3, "max_tokens": 12, **({} if chat else {"prompt": PROMPT}), **fields}
            answer = await stack.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            rest, of_rest = answer.json(), len(worker.submits)
            responses = [r async for r in (stub.Chat(request) if chat else stub.Generate(request))]
            first, second = worker.submits[of_rest - body.get("n", 1)], worker.submits[of_rest]
            assert list(first.prompt_ids) == list(second.prompt_ids), fields
            assert first.sampling == second.sampling, fields
            assert list(first.prediction_ids) == list(second.prediction_ids), fields
            for choice in rest["choices"]:
                own = [r for r in responses if r.choice == choice["index"]]
                assert [r.first_index for r in own] == list(accumulate((len(r.ids) for r in own[:-1]), initial=0))
                expected = choice["message"]["content"] if chat else choice["text"]
                assert "".join(r.text for r in own) == expected, fields
                assert own[-1].finish_reason == choice["finish_reason"], fields
                actual = [t.logprob for r in own for t in (*r.prompt_logprobs, *r.logprobs)]
                if "prompt_logprobs" not in choice:
                    assert actual == pytest.approx(scored(choice["logprobs"])), fields
                else:
                    by_id = [entry for entry in choice["prompt_logprobs"] if entry is not None]
                    assert [str(t.token_id) for t in own[0].prompt_logprobs] == [next(iter(e)) for e in by_id]
                assert list(own[0].prompt_ids) == (list(second.prompt_ids) if body.get("echo") else [])
            assert len({r.choice for r in responses}) == len(rest["choices"])
            used = responses[-1].usage
            assert (used.prompt_tokens, used.completion_tokens) == (
                rest["usage"]["prompt_tokens"], rest["usage"]["completion_tokens"],
            ), fields  # fmt: skip
            drafted = {"accepted_prediction_tokens", "rejected_prediction_tokens"}
            counts = {name: getattr(used, name) for name in drafted if used.HasField(name)}
            assert counts == rest["usage"].get("completion_tokens_details", {}), fields
            assert bool(counts) is ("prediction" in fields)


# Options that the contract has under another name, or always applies.
ELSEWHERE = {
    "prompt": "prompt_ids", "stream": "first_index", "stream_options": "include_workers", "return_token_ids": "ids",
    "user": "session_id", "guided_json": "structured_outputs", "guided_regex": "structured_outputs",
    "guided_choice": "structured_outputs", "guided_grammar": "structured_outputs",
    "guided_whitespace_pattern": "structured_outputs", "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs", "functions": "tools", "function_call": "tool_choice", "best_of": "n",
    "reasoning_content": "reasoning", "reasoning_details": "reasoning", "enable_thinking": "chat_template_kwargs",
    "thinking": "chat_template_kwargs",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        (CompletionBody, (pb.GenerateRequest, pb.GenerationOptions, pb.GenerateResponse)),
        (ChatBody, (pb.ChatRequest, pb.GenerationOptions, pb.GenerateResponse)),
        (Message, (pb.ChatMessage,)),
    ],
)
def test_the_contract_has_every_field_that_rest_honours(kind: type[msgspec.Struct], messages: tuple[Any, ...]) -> None:
    there = {name for message in messages for name in message.DESCRIPTOR.fields_by_name}
    honoured = set(kind.__struct_encode_fields__) - advisory_fields(kind) - neutral_values(kind).keys()
    missing = {name for name in honoured if ELSEWHERE.get(name, name) not in there}
    assert missing == (
        {"function_call", "prefix", "partial"} if kind is Message else set()
    )  # other forms of fields there


async def test_unsupported_field_is_rejected_by_name() -> None:
    newer = pb.GenerateRequest(prompt="a", options=options())
    newer.options.MergeFromString(b"\xf8\x3e\x01")  # field 1007
    async with inference(unknown_fields="refuse") as (_, stub):
        for call, request, names in (
            (stub.Generate, newer, "Unknown field 1007 of GenerationOptions"),
            (stub.Generate, pb.GenerateRequest(prompt="a", options=options(n=2000)), "`n`"),
            (stub.Generate, pb.GenerateRequest(prompt="a", options=options(max_tokens=0)), "`max_tokens`"),
            (stub.Chat, pb.ChatRequest(messages=SAID_PB, chat_template_kwargs="{"), "`chat_template_kwargs`"),
            (stub.Chat, pb.ChatRequest(messages=SAID_PB, chat_template_kwargs='{"tools": 1}'), "tools"),
            (stub.Chat, pb.ChatRequest(messages=SAID_PB, continue_final_message=True), "`continue_final_message`"),
            (
                stub.Generate,
                pb.GenerateRequest(prompt="a", options=options(response_format=pb.ResponseFormat(type="xml"))),
                "`response_format.type`",
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await anext(aiter(call(request)))
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT, names
            assert names in failure.value.details()
        for unary, known in (
            (stub.Embed, pb.EmbedRequest(input=["a"])),
            (stub.Tokenize, pb.TokenizeRequest(text="a")),
            (stub.Detokenize, pb.DetokenizeRequest(ids=[5])),
            (stub.ListModels, pb.ListModelsRequest()),
        ):
            await unary(known)
            known.MergeFromString(b"\xf8\x3e\x01")
            with pytest.raises(grpc.aio.AioRpcError, match=f"Unknown field 1007 of {type(known).__name__}"):
                await unary(known)


async def test_fields_of_a_newer_contract_are_left_out_and_named() -> None:
    newer = b"\xf8\x3e\x01"  # field 1007
    async with inference() as (_, stub):
        for unary, request in (
            (stub.Embed, pb.EmbedRequest(input=["a"])),
            (stub.Tokenize, pb.TokenizeRequest(text="a")),
            (stub.ListModels, pb.ListModelsRequest()),
        ):
            assert IGNORED_HEADER not in dict(await (call := unary(request)) and await call.trailing_metadata())
            request.MergeFromString(newer)
            await (call := unary(request))
            metadata = dict(await call.trailing_metadata())
            assert metadata[IGNORED_HEADER] == f"{type(request).__name__}.1007"
            assert metadata["x-request-id"]
        generate = pb.GenerateRequest(prompt="a", options=options(max_tokens=2))
        generate.options.MergeFromString(newer)
        stream = stub.Generate(generate)
        assert [response.finish_reason async for response in stream][-1] == "length"
        assert dict(await stream.trailing_metadata())[IGNORED_HEADER] == "GenerationOptions.1007"


async def test_a_response_says_which_worker_answers_when_asked() -> None:
    workers = [Worker(name, faults=[Fault("break", 3)]) for name in ("w0", "w1")]
    async with inference([*workers, Worker("w2")]) as (_, stub):
        sent = pb.GenerateRequest(prompt=PROMPT, options=options(include_workers=True))
        reported = [r.worker async for r in stub.Generate(sent) if r.HasField("worker")]
        assert len({worker.id for worker in reported}) == len(reported) >= 1
        assert not reported[0].after
        assert all((worker.after, worker.resume) == ("connection_lost", "exact") for worker in reported[1:])
        (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
        assert (model.id, model.resume) == (MODEL, "exact")
        sent.options.include_workers = False
        assert not any([r.HasField("worker") async for r in stub.Generate(sent)])


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


async def test_router_mistake_fails_neither_its_request_nor_the_following_request() -> None:
    async with inference() as (stack, stub):
        stack.router.mistaken = True
        for sent in (1, 2):
            pieces = [
                piece
                async for piece in stub.Generate(
                    pb.GenerateRequest(prompt="a", options=pb.GenerationOptions(max_tokens=4))
                )
            ]
            assert pieces[-1].finish_reason == "length"
            assert len(stack.router.routes) == sent, "the router is asked again"


async def test_health_says_serving() -> None:
    async with inference() as (stack, _), open_channel(f"127.0.0.1:{stack.gateway.grpc.port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="ryzanstein.v1.Inference")
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
