"""Faults of requests are refused in OpenAI's shape, with the field and the allowed values."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.gateway.fleet import MAX_LEN, MODEL
from tests.integration.gateway.gateways import GatewayStack, running_stack

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
IMAGE = {"type": "image_url"}
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BROKEN = {"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}
TAGS = {
    "type": "structural_tag", "triggers": ["<f>"], "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
}  # fmt: skip


@pytest.fixture
async def stack() -> AsyncIterator[GatewayStack]:
    async with running_stack(max_body_bytes=50_000, body_timeout_s=1.0, header_timeout_s=1.0) as running:
        yield running


# body, status, param, part of the message
BAD_COMPLETIONS: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({}, 400, "prompt", "Missing required field `prompt`"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature", ">= 0"),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature", "got `str`"),
    ({"prompt": "a", "top_p": -0.1}, 400, "top_p", ">= 0"),
    ({"prompt": "a", "top_p": 1.1}, 400, "top_p", "<= 1"),
    ({"prompt": "a", "top_k": -2}, 400, "top_k", ">= -1"),
    ({"prompt": "a", "min_p": 2}, 400, "min_p", "<= 1"),
    ({"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty", "<= 2"),
    ({"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty", ">= 0.01"),
    ({"prompt": "a", "repetition_penalty": 1e-320}, 400, "repetition_penalty", ">= 0.01"),
    ({"prompt": "a", "user": "u" * 513}, 400, "user", "length <= 512"),
    ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias", "at most 1024 tokens"),
    ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens", ">= 0"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ({"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens", "got `float`"),
    ({"prompt": "a", "max_tokens": MAX_LEN}, 400, "prompt", f"maximum context length is {MAX_LEN} tokens"),
    ({"prompt": "a " * 400}, 400, "prompt", "in the prompt"),
    ({"prompt": "a", "n": 0}, 400, "n", ">= 1"),
    ({"prompt": "a", "n": 999}, 400, "n", "at most"),
    ({"prompt": "a", "stop": [""]}, 400, "stop[0]", "length >= 1"),
    ({"prompt": "a", "stop": ["x"] * 17}, 400, "stop", "at most 16"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs", "<= 20"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "not available with `stream`"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias[...]", "<= 100"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "expected `int`"),
    ({"prompt": "a", "logit_bias": {"999999": 1}}, 400, "logit_bias", "names token 999999"),
    ({"prompt": "a", "stop_token_ids": [999999]}, 400, "stop_token_ids", "names token 999999"),
    ({"prompt": "a", "seed": 2**70}, 400, "seed", "seed"),
    ({"prompt": "a", "best_of": 3}, 400, "best_of", "only supported with the value of `n`"),
    ({"prompt": "a", "prediction": "a " * 400}, 400, "prediction", f"more than {MAX_LEN} tokens"),
    ({"prompt": "a", "prediction": "a " * 20_000}, 400, "prediction", f"more than {MAX_LEN} tokens"),
    ({"prompt": "a", "prediction": [5]}, 400, "prediction", "expected `str | object | null`, got `array`"),
    ({"prompt": "a", "prediction": {"type": "text"}}, 400, "prediction.type", "'text' is none of `content`"),
    ({"prompt": "a", "suffix": "b"}, 400, "suffix", "not supported"),
    ({"prompt": "a", "min_tokens": 20}, 400, "min_tokens", "larger than"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": [[]]}, 400, "prompt", "empty"),
    ({"prompt": ["a", 1]}, 400, "prompt", "mixes"),
    ({"prompt": [-1]}, 400, "prompt[0]", ">= 0"),
    ({"prompt": [999999]}, 400, "prompt", "holds token id 999999"),
    ({"prompt": {"a": 1}}, 400, "prompt", "got `object`"),
    ({"prompt": "a", "model": "nope"}, 404, "model", f"`{MODEL}`"),
]  # fmt: skip

BAD_CHATS: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({}, 400, "messages", "Missing required field"),
    ({"messages": []}, 400, "messages", "length >= 1"),
    ({"messages": [{"content": "a"}]}, 400, "messages[0].role", "Missing required field"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, 400, "messages[0].role", "'wizard' is none of `assistant`, "),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", "got `int`"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "messages[0].content[0].type", "the vision of"),
    ({"messages": HELLO, "prediction": "a"}, 400, "prediction", "expected `object | null`, got `str`"),
    ({"messages": HELLO, "prediction": {"content": "a"}}, 400, "prediction.type", "Missing required field"),
    ({"messages": HELLO, "prediction": {"type": "content", "content": [{"text": "a"}]}}, 400,
     "prediction.content[0].type", "Missing required field"),
    ({"messages": HELLO, "prediction": {"type": "content"}}, 400, "prediction.content", "Missing required field"),
    ({"messages": HELLO, "prediction": {"type": "content", "content": [IMAGE]}}, 400, "prediction.content[0].type",
     "'image_url' is none of `text`"),
    ({"messages": HELLO, "prediction": {"type": "content", "content": [{"type": "text", "text": "a " * 400}]}}, 400,
     "prediction", f"more than {MAX_LEN} tokens"),
    ({"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs", "needs `logprobs`"),
    ({"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format.type", "is none of `json`"),
    ({"messages": HELLO, "max_completion_tokens": 0}, 400, "max_completion_tokens", ">= 1"),
    ({"messages": HELLO, "continue_final_message": True}, 400, "continue_final_message", "add_generation_prompt"),
    ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "may not set"),
    ({"messages": [{"role": "user", "content": "a " * 400}]}, 400, "messages", "maximum context length"),
    ({"messages": HELLO, "tools": [BROKEN], "tool_choice": "required"}, 400, "tools", "cannot be followed"),
    ({"messages": HELLO, "tools": [TOOL], "guided_regex": "a+"}, 400, "guided_regex", "leaves no room for calls"),
    ({"messages": HELLO, "tools": [TOOL], "response_format": TAGS}, 400, "response_format.structures", "no room for"),
    ({"messages": HELLO, "structured_outputs": {"structural_tag": '{"type": "text"}'}}, 400,
     "structured_outputs.structural_tag", "its `type` must be `structural_tag`"),
    ({"messages": HELLO, "guided_grammar": 'start: %json {"contains": {}}'}, 400, "guided_grammar",
     "uses `contains`, which structured output does not support"),
]  # fmt: skip


def assert_shape(body: dict[str, Any], param: str | None, message: str) -> None:
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"]
    assert message in body["error"]["message"], body
    assert body["error"]["param"] == param, body


async def test_every_bad_field_is_named(stack: GatewayStack) -> None:
    for path, table in ((COMPLETIONS, BAD_COMPLETIONS), (CHAT, BAD_CHATS)):
        for body, status, param, message in table:
            answer = await stack.http.post(path, json=body)
            assert answer.status_code == status, (body, answer.text)
            assert_shape(answer.json(), param, message)
    assert not any(worker.submits for worker in stack.workers)


async def test_malformed_bodies(stack: GatewayStack) -> None:
    for body, code, message in (
        (b"", "invalid_json", "truncated"),
        (b"{", "invalid_json", "truncated"),
        (b'{"prompt": "a"} x', "invalid_json", "trailing"),
        (b'{"prompt": NaN}', "invalid_json", "malformed"),
        (b'{"prompt": "\xff\xfe"}', "invalid_utf8", "UTF-8"),
        (b"[1]", "invalid_value", "expected `object`"),
        (b'{"chat_template_kwargs": {"a": ' + b"[" * 20_000, "invalid_json", ""),
        (b'{"prompt": "\\ud800"}', "invalid_unicode", "the lone surrogate `\\ud800`"),
        (b'{"prompt": "\\\\ud83d\\ude00\\udE00"}', "invalid_unicode", "the lone surrogate `\\ude00`"),
        (b'{"prompt": "\\ud83d\\ude00 \\\\ud800", x}', "invalid_json", "malformed"),
        (b'{"temperature": 1e999, "prompt": "a"}', "invalid_value", "`temperature`: number out of range"),
        (
            b'{"prompt": "a", "guided_json": {"items": [{"const": -1E400}]}}',
            "invalid_value",
            "`guided_json.items[0].const`",
        ),
    ):
        path = CHAT if b"kwargs" in body else COMPLETIONS
        answer = await stack.http.post(path, content=body)
        assert answer.status_code == 400
        assert_shape(answer.json(), answer.json()["error"]["param"], message)
        assert answer.json()["error"]["code"] == code


async def test_a_byte_order_mark_before_a_body_is_skipped(stack: GatewayStack) -> None:
    body = b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}'
    assert (await stack.http.post(COMPLETIONS, content=body)).status_code == 200
    packed = {"content-encoding": "gzip"}
    assert (await stack.http.post(COMPLETIONS, content=gzip.compress(body), headers=packed)).status_code == 200


async def test_a_huge_body_is_413_declared_or_not(stack: GatewayStack) -> None:
    whole = await stack.http.post(COMPLETIONS, content=b"x" * 60_000)
    assert whole.status_code == 413
    assert_shape(whole.json(), None, "50000 bytes")

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 5_000

    chunked = await stack.http.post(COMPLETIONS, content=pieces())
    assert chunked.status_code == 413


async def _raw(stack: GatewayStack, *parts: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http.port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    try:
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


async def test_a_slow_body_is_408(stack: GatewayStack) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n"
    answer = await _raw(stack, head, b'{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_gets_no_chunks(stack: GatewayStack, stream: bool) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body)
    headers, _, answer = (await _raw(stack, head + body)).partition(b"\r\n\r\n")
    assert b"chunked" not in headers
    if stream:
        assert all(line.startswith(b"data: ") for line in answer.split(b"\n\n")[:-1])
        assert answer.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(answer)["usage"]["completion_tokens"] == 3


async def test_compressed_bodies(stack: GatewayStack) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    bomb = gzip.compress(body + b" " * 60_000)
    for encoding, data, status, code in (
        ("gzip", gzip.compress(body), 200, None),
        ("deflate", zlib.compress(body), 200, None),
        ("identity", body, 200, None),
        ("gzip", body, 400, "invalid_encoding"),
        ("gzip", gzip.compress(body)[:-9], 400, "invalid_encoding"),
        ("gzip", bomb, 413, "body_too_large"),
        ("br", body, 415, "unsupported_content_encoding"),
    ):
        headers = {"content-encoding": encoding, "content-type": "application/json"}
        answer = await stack.http.post(COMPLETIONS, content=data, headers=headers)
        assert answer.status_code == status, answer.text
        if code is not None:
            assert answer.json()["error"]["code"] == code
    assert answer.headers["accept-encoding"] == "gzip, deflate"


async def test_head_and_a_slash_at_the_end(stack: GatewayStack) -> None:
    for path in ("/health", "/livez", "/readyz", "/metrics", "/v1/models"):
        head, get = await stack.http.head(path), await stack.http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
    assert (await stack.http.get("/v1/models/")).json() == (await stack.http.get("/v1/models")).json()
    assert (await stack.http.post("/v1/completions/", json={"prompt": "a"})).status_code == 200


async def test_other_methods_and_paths(stack: GatewayStack) -> None:
    answer = await stack.http.get(CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert_shape(answer.json(), None, "use POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"
    health = await stack.http.post("/health")
    assert (health.status_code, health.headers["allow"]) == (405, "GET")
    assert health.json()["error"]["code"] == "method_not_allowed"
    for method, path, meant in (
        ("GET", "/v1/nothing", "/v1/nothing. The paths"),
        ("POST", "/chat/completions", f"Did you mean {CHAT}?"),
        ("POST", f"/v1{CHAT}", f"Did you mean {CHAT}?"),
        ("POST", f"/openai{CHAT}", f"Did you mean {CHAT}?"),
        ("POST", f"{CHAT}/chat/completions", f"Did you mean {CHAT}?"),
        ("POST", "/v1/chat/completion", f"Did you mean {CHAT}?"),
        ("GET", "/models", "Did you mean /v1/models?"),
        ("POST", "/v1/audio/speech", "/v1/audio/speech. "),
    ):
        unknown = await stack.http.request(method, path)
        assert unknown.status_code == 404
        assert_shape(unknown.json(), None, meant)
        assert unknown.json()["error"]["code"] == "not_found"
    missing = await stack.http.get("/v1/models/nope")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_a_request_id_comes_back(stack: GatewayStack) -> None:
    answer = await stack.http.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    for path in ("/v1/models", "/v1/models/nope", "/health", "/v1/nothing", "/", "/openapi.json", "/metrics"):
        assert (await stack.http.get(path, headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
        assert len((await stack.http.get(path)).headers["x-request-id"]) == 16
    assert b"x-request-id: " in await _raw(stack, b"nonsense\r\n\r\n")


async def test_the_openapi_document_describes_every_route(stack: GatewayStack) -> None:
    document = (await stack.http.get("/openapi.json")).json()
    assert {CHAT, COMPLETIONS, "/v1/embeddings", "/tokenize", "/detokenize", "/v1/models", "/health"} <= set(
        document["paths"]
    )
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["$ref"] == "#/components/schemas/ChatBody"
    assert "temperature" in document["components"]["schemas"]["ChatBody"]["properties"]
    answer = await stack.http.post(CHAT, json=body["example"] | {"model": MODEL})
    assert answer.status_code == 200
    assert (await stack.http.get("/docs")).status_code == 200
