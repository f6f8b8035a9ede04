"""The largest input that may be sent: it is refused or served, and no other request waits."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc
from websockets.sync.client import connect

from services.common.ports import free_port
from services.common.rpc import open_channel
from services.gateway.tenants.keys import digest_of
from tests.integration.gateway.fleet import MAX_LEN, Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack

LONGEST_S = 1.5  # CPU time of this process, independent of the machine's load


def many(piece: bytes, n: int) -> bytes:
    """A list of one value, again and again."""
    return b"[" + (piece + b",") * n + piece + b"]"


def pairs(n: int) -> bytes:
    return b",".join(b'"%d": 1' % i for i in range(n))


TEXT = b'"' + b"x " * 7_000_000 + b'"'
MESSAGE = b'{"role": "user", "content": []}'
BLOCK = b'{"type": "text", "text": "x x"}'


@functools.cache
def bodies() -> dict[str, tuple[str, bytes, str]]:
    """By what is large in each: the path, the body, and the field that the refusal names."""
    ids, texts, lists = many(b"5", 7_000_000), many(b'"x"', 3_500_000), many(b"[1]", 3_500_000)
    messages, blocks = many(MESSAGE, 100_000), many(BLOCK, 130_000)
    odd = many(MESSAGE.removesuffix(b"}") + b', "mood": 1}', 90_000)
    parts = many(b'{"type": "input_text", "text": "x"}', 130_000)
    completions, chat, large = "/v1/completions", "/v1/chat/completions", b"LARGE"
    made: dict[str, tuple[str, bytes, bytes, str]] = {
        "text": (completions, b'{"prompt": LARGE}', TEXT, "prompt"),
        "ids": (completions, b'{"prompt": LARGE}', ids, "prompt"),
        "lists of ids": (completions, b'{"prompt": LARGE}', lists, "prompt"),
        "a batch of texts": (completions, b'{"prompt": LARGE}', texts, "prompt"),
        "text to embed": ("/v1/embeddings", b'{"input": [LARGE]}', TEXT, "input"),
        "ids to embed": ("/v1/embeddings", b'{"input": LARGE}', lists, "input"),
        "one message": (chat, b'{"messages": [{"role": "user", "content": LARGE}]}', TEXT, "messages"),
        "messages": (chat, b'{"messages": LARGE}', many(MESSAGE, 450_000), "messages"),
        "fewer messages": (chat, b'{"messages": LARGE}', messages, "messages"),
        "template variables": (
            chat, b'{"messages": [{"role": "user"}], "chat_template_kwargs": {"a": LARGE}}', lists,
            "chat_template_kwargs",
        ),
        "biases": (completions, b'{"prompt": "a", "logit_bias": {LARGE}}', pairs(1_000_000), "logit_bias"),
        "some biases": (completions, b'{"prompt": "a", "logit_bias": {LARGE}}', pairs(1_025), "logit_bias"),
        "a stop string": (completions, b'{"prompt": "a", "stop": LARGE}', b'"' + b"x" * 200_000 + b'"', "stop"),
        "blocks": (
            "/v1/messages", b'{"max_tokens": 1, "messages": [{"role": "user", "content": LARGE}]}', blocks, "messages",
        ),
        "blocks of the system": (
            "/v1/messages/count_tokens", b'{"messages": [{"role": "user", "content": "a"}], "system": LARGE}', blocks,
            "system",
        ),
        "turns": ("/v1/messages", b'{"max_tokens": 1, "messages": LARGE}', messages, "messages"),
        "items": ("/v1/responses", b'{"input": LARGE}', messages, "input"),
        "parts of an item": ("/v1/responses", b'{"input": [{"role": "user", "content": LARGE}]}', parts, "input"),
        "a text that is answered": ("/v1/responses", b'{"input": LARGE}', TEXT, "input"),
        "a document": ("/v1/rerank", b'{"query": "a", "documents": [LARGE]}', TEXT, "documents[0]"),
        "documents": ("/v1/rerank", b'{"query": "a", "documents": LARGE}', texts, "documents"),
        "text to tokenize": ("/tokenize", b'{"prompt": LARGE}', TEXT, "prompt"),
        "ids to detokenize": ("/detokenize", b'{"tokens": LARGE}', ids, "tokens"),
        "unknown fields": (completions, b'{"prompt": "a", LARGE}', pairs(1_000_000), "0"),
        "unknown fields of messages": ("/v1/messages", b'{"max_tokens": 1, "messages": LARGE}', odd, "messages"),
    }  # fmt: skip
    return {name: (path, body.replace(large, value), field) for name, (path, body, value, field) in made.items()}


@pytest.fixture(scope="module", autouse=True)
def _made() -> None:
    bodies()  # takes a second, before any event loop runs


class Gaps:
    """The most CPU, s, that this process has used while its event loop did nothing else."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.process_time()
            self.longest, last = max(self.longest, now - last), now


@asynccontextmanager
async def no_gap() -> AsyncIterator[Gaps]:
    gaps = Gaps()
    watcher = asyncio.create_task(gaps.watch())
    yield gaps
    watcher.cancel()
    assert gaps.longest < LONGEST_S


def post(port: int, path: str, body: bytes, key: str = "") -> tuple[int, dict]:
    """On a thread of its own: the test's event loop is the gateway's."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, body, {"Authorization": f"Bearer {key}"} if key else {})
    answer = connection.getresponse()
    status, read = answer.status, json.loads(answer.read())
    connection.close()
    return status, read


async def refusal(stack: GatewayStack, path: str, body: bytes, key: str = "") -> tuple[int, dict]:
    status, answer = await asyncio.to_thread(post, stack.gateway.http.port, path, body, key)
    return status, answer["error"] | answer["error"].get("details", {})


async def test_largest_bodies_are_rejected_by_field_name_without_delaying_other_requests(stack: GatewayStack):
    for name, (path, body, param) in bodies().items():
        async with no_gap():
            began = time.process_time()
            status, error = await refusal(stack, path, body)
        assert (status, error["param"]) == (400, param), (name, error)
        assert time.process_time() - began < 5, name
    assert not stack.workers[0].submits


async def test_requests_that_fit_are_served_with_large_fields(stack: GatewayStack):
    text = "x" * (MAX_LEN - 20)
    ran = await stack.complete(prompt=text, max_tokens=1, metadata={"a": "b" * 100_000})
    assert ran.status_code == 200, ran.text
    assert (
        stack.workers[0].submits[0].prompt_ids
        == (await stack.http.post("/tokenize", json={"prompt": text})).json()["tokens"]
    )


async def test_the_same_over_grpc():
    port = free_port()
    async with running_stack([Worker("w0")], grpc_port=port) as stack, open_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        large = {
            "prompt": stub.Generate(inference_pb2.GenerateRequest(prompt="x " * 7_000_000)),
            "prompt_ids": stub.Generate(
                inference_pb2.GenerateRequest(prompt_ids=inference_pb2.TokenIds(ids=[5] * 3_000_000))
            ),
            "messages": stub.Chat(
                inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user")] * 300_000)
            ),
            "logit_bias": stub.Generate(
                inference_pb2.GenerateRequest(
                    prompt="a", options=inference_pb2.GenerationOptions(logit_bias=dict.fromkeys(range(100_000), 1.0))
                )
            ),
        }
        for name, call in large.items():
            async with no_gap():
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(inference_pb2.GenerateRequest(prompt="x" * (17 << 20))).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not stack.workers[0].submits


def start(url: str, kind: str, body: bytes) -> dict:
    """Begin a generation, on a thread of its own; returns the first message."""
    with connect(f"{url.replace('http', 'ws')}/v1/stream") as socket:
        socket.send(b'{"type": "start", "id": "a", "kind": "%b", "request": %b}' % (kind.encode(), body))
        return json.loads(socket.recv())


async def test_the_same_over_a_websocket(stack: GatewayStack):
    for name in ("text", "lists of ids", "one message"):
        path, body, param = bodies()[name]
        async with no_gap():
            kind = "chat" if "chat" in path else "completion"
            answer = await asyncio.to_thread(start, stack.url, kind, body)
        assert answer["error"]["param"] == param, name


async def test_rate_limited_request_gets_429_before_its_prompt_is_read(tmp_path):
    keys = [{"key_sha256": digest_of("k"), "name": "acme", "requests_per_minute": 1}]
    url = f"unix://{tmp_path}/none.sock"
    async with running_stack([Worker("w0")], tenancy=True, api_keys=json.dumps(keys), redis_url=url) as stack:
        seen = [await refusal(stack, *bodies()["text"][:2], "k") for _ in range(2)]
        assert [(status, error["code"]) for status, error in seen] == [
            (400, "context_length_exceeded"),
            (429, "rate_limit_exceeded"),
        ]
        assert (await refusal(stack, "/tokenize", b'{"prompt": "a"}', "k"))[0] == 429
