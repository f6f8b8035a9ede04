"""WebSocket streams: several on one connection, resumable, and complete for the slowest reader."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import websockets

from services.gateway.tenants.keys import digest_of
from tests.integration.gateway.fleet import Fault, Worker, scripted_token
from tests.integration.gateway.gateways import GatewayStack, eventually, running_stack
from tests.unit.gateway.made_tokenizers import byte_level

PROMPT = "User: What is a list?"


def expected_ids(seed: int, count: int) -> list[int]:
    prompt = byte_level().encode(PROMPT).ids
    return [scripted_token(prompt, seed, position) for position in range(count)]


class SocketClient:
    """A client that checks the promises of the protocol on every message."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self.socket = socket
        self.ids: dict[str, list[int]] = {}
        self.text: dict[str, str] = {}
        self.messages = 0

    async def send(self, **message: Any) -> None:
        await self.socket.send(json.dumps(message))

    async def start(self, name: str, count: int, seed: int = 0, **fields: Any) -> None:
        request = {"prompt": PROMPT, "max_tokens": count, "seed": seed, **fields}
        await self.send(type="start", id=name, kind="completion", request=request)

    async def receive(self) -> dict[str, Any]:
        message = json.loads(await asyncio.wait_for(self.socket.recv(), 120))
        self.messages += 1
        if message["type"] == "token":
            ids = self.ids.setdefault(message["id"], [])
            assert message["index"] == len(ids), "no gap, no repetition"
            ids += message["ids"]
            self.text[message["id"]] = self.text.get(message["id"], "") + message["text"]
        return message

    async def until(self, kind: str, name: str | None = None) -> dict[str, Any]:
        while True:
            message = await self.receive()
            if message["type"] == kind and name in (None, message.get("id")):
                return message


def connect(stack: GatewayStack, **options: Any) -> websockets.connect:
    return websockets.connect(stack.url.replace("http", "ws") + "/v1/stream", proxy=None, **options)


async def test_several_generations_share_a_connection() -> None:
    async with running_stack([Worker("w0", step_s=0.002)]) as stack, connect(stack) as socket:
        client = SocketClient(socket)
        for seed in range(5):
            await client.start(f"g{seed}", 20 + seed, seed)
        ends = {}
        while len(ends) < 5:
            message = await client.receive()
            if message["type"] == "done":
                ends[message["id"]] = message
        for seed in range(5):
            assert client.ids[f"g{seed}"] == expected_ids(seed, 20 + seed)
            assert client.text[f"g{seed}"] == byte_level().decode(client.ids[f"g{seed}"])
            assert ends[f"g{seed}"]["finish_reason"] == "length"
            assert ends[f"g{seed}"]["usage"]["completion_tokens"] == 20 + seed


async def test_chat_and_ping(stack: GatewayStack) -> None:
    async with connect(stack) as socket:
        client = SocketClient(socket)
        await client.send(type="ping")
        assert (await client.receive()) == {"type": "pong"}
        request = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        await client.send(type="start", id="c", kind="chat", request=request)
        started = await client.until("started")
        assert started["model"] == "test-model"
        assert started["prompt_tokens"] > 0
        assert "ignored" not in started
        await client.until("done", "c")
        assert len(client.ids["c"]) == 4
        await client.send(type="start", id="d", kind="chat", request=request | {"nonsense": 1}, trace={"of": "mine"})
        assert (await client.until("started", "d"))["ignored"] == "message.trace, nonsense"
        await client.send(type="ping", now=12)
        assert (await client.until("pong")) == {"type": "pong", "ignored": "message.now"}
        await client.send(type="cancel", id="d", why="enough")
        assert (await client.until("done", "d"))["usage"]


async def test_strict_gateway_rejects_a_message_with_an_unknown_field() -> None:
    async with running_stack(unknown_fields="refuse") as stack, connect(stack) as socket:
        client = SocketClient(socket)
        for message in ({"type": "ping"}, {"type": "start", "id": "a", "kind": "chat", "request": {}}):
            await client.send(**message, extra=1)
            error = (await client.receive())["error"]
            assert error["code"] == "invalid_message"
            assert "`extra`" in error["message"]


async def test_field_unsupported_over_websocket_is_rejected_by_name(stack: GatewayStack) -> None:
    async with connect(stack) as socket:
        client = SocketClient(socket)
        for field, fields in (
            ("echo", {"echo": True, "max_tokens": 0}),
            ("prompt_logprobs", {"prompt_logprobs": 0}),
            ("stream_options.continuous_usage_stats", {"stream_options": {"continuous_usage_stats": True}}),
        ):
            await client.send(type="start", id="a", kind="completion", request={"prompt": PROMPT, **fields})
            error = (await client.until("error", "a"))["error"]
            assert (error["param"], error["code"]) == (field, "unsupported_field")
        assert not stack.workers[0].submits


@pytest.mark.parametrize("received", [0, 1, 7, 30])
async def test_a_lost_connection_is_resumed_by_index(received: int) -> None:
    async with running_stack([Worker("w0", step_s=0.005)]) as stack:
        async with connect(stack) as socket:
            client = SocketClient(socket)
            await client.start("a", 60, 3)
            token = (await client.until("started"))["token"]
            while len(client.ids.get("a", [])) < received:
                await client.receive()
            socket.transport.abort()
        await asyncio.sleep(0.05)
        async with connect(stack) as socket:
            again = SocketClient(socket)
            again.ids["b"], again.text["b"] = client.ids.get("a", []), client.text.get("a", "")
            await again.send(type="resume", id="b", token=token, **{"from": len(again.ids["b"])})
            await again.until("done", "b")
            assert again.ids["b"] == expected_ids(3, 60)
            assert again.text["b"] == byte_level().decode(again.ids["b"])
        assert len(stack.workers[0].submits) == 1, "nothing was generated twice"


async def test_a_generation_may_be_taken_over_while_its_first_connection_lives() -> None:
    async with running_stack([Worker("w0", step_s=0.01)]) as stack:
        async with connect(stack) as first, connect(stack) as second:
            one, two = SocketClient(first), SocketClient(second)
            await one.start("a", 100, 3)
            token = (await one.until("started"))["token"]
            await one.until("token")
            await two.send(type="resume", id="b", token=token)
            await two.until("token")
        async with connect(stack) as socket:  # both are lost
            last = SocketClient(socket)
            await last.send(type="resume", id="c", token=token)
            await last.until("done", "c")
            assert last.ids["c"] == expected_ids(3, 100)


async def test_a_slow_reader_gets_larger_messages_and_every_token() -> None:
    """More text than the socket buffers hold is produced while the client does not read."""
    workers = [Worker("w0", tokens_per_step=2)]
    async with running_stack(workers) as stack, connect(stack, max_queue=1, compression=None) as socket:
        client = SocketClient(socket)
        for seed in range(60):
            await client.start(f"g{seed}", 200, seed)
        await eventually(lambda: workers[0].given == 60 * 200)
        finished = 0
        while finished < 60:
            finished += (await client.receive())["type"] == "done"
        for seed in range(60):
            assert client.ids[f"g{seed}"] == expected_ids(seed, 200)
        assert client.messages < 60 * 100, "tokens travelled together"


async def test_errors_end_a_generation_and_not_the_connection() -> None:
    async with running_stack(stream_max_generations=2) as stack, connect(stack) as socket:
        client = SocketClient(socket)
        for text, code in (
            ("{", "invalid_message"),
            ('{"type": "dance"}', "invalid_message"),
            ('{"type": "start", "id": "x", "kind": "chat", "request": {"messages": "\\ud800"}}', "invalid_unicode"),
            ('{"type": "cancel", "id": "x"}', "unknown_generation"),
            ('{"type": "start", "id": "x", "kind": "completion", "request": {"prompt": 5}}', "invalid_value"),
            ('{"type": "start", "id": "x", "kind": "completion", "request": {"prompt": "a", "n": 2}}', "invalid_value"),
        ):
            await socket.send(text)
            error = (await client.receive())["error"]
            assert error["code"] == code
            assert "dance" not in text or "'dance' is none of `auth`, `start`" in error["message"]
        await client.start("a", 200, ignore_eos=True)
        await client.start("a", 5)
        assert (await client.until("error"))["error"]["code"] == "duplicate_id"
        for name in ("b", "c"):
            await client.start(name, 200, ignore_eos=True)
        assert (await client.until("error", "c"))["error"]["code"] == "too_many_generations"
        await client.until("done", "a")
        await client.start("fine", 3)
        await client.until("done", "fine")
        assert len(client.ids["fine"]) == 3


async def test_a_key_may_come_with_a_message_as_browsers_send_no_header() -> None:
    keys = [{"key_sha256": digest_of("k"), "name": "t"}]
    async with running_stack(tenancy=True, api_keys=json.dumps(keys)) as stack, connect(stack) as socket:
        client = SocketClient(socket)
        await client.start("a", 3)
        assert (await client.until("error", "a"))["error"]["code"] == "invalid_api_key"
        await client.send(type="auth", key="k")
        await client.start("a", 3)
        await client.until("done", "a")
        assert len(client.ids["a"]) == 3


async def test_generation_cancelled_at_once_releases_its_reservation() -> None:
    """Both messages arrive together, before the generation has taken its first step."""
    keys = [{"key_sha256": digest_of("k"), "name": "t", "max_concurrent": 1}]
    async with (
        running_stack(tenancy=True, api_keys=json.dumps(keys)) as stack,
        connect(stack, additional_headers={"authorization": "Bearer k"}) as socket,
    ):
        client = SocketClient(socket)
        for name in ("a", "b", "c"):
            start = {"type": "start", "id": name, "kind": "completion", "request": {"prompt": PROMPT}}
            frames = [json.dumps(start), json.dumps({"type": "cancel", "id": name})]
            for frame in frames:
                socket.protocol.send_text(frame.encode())
            socket.transport.write(b"".join(socket.protocol.data_to_send()))
            assert (await client.until("done", name))["finish_reason"] == "cancelled"


async def test_token_message_names_the_worker_on_request() -> None:
    workers = [Worker("w0"), Worker("w1")]
    async with running_stack(workers) as stack, connect(stack) as socket:
        for worker in workers:
            worker.faults = [Fault("break", 3)]
        client, reported = SocketClient(socket), []
        await client.start("a", 10, stream_options={"include_workers": True})
        while (message := await client.receive())["type"] != "done":
            reported += [message["worker"]] if "worker" in message else []
        assert client.ids["a"] == expected_ids(0, 10)
        assert (reported[-1]["attempt"], reported[-1]["after"], reported[-1]["resume"]) == (
            3,
            "connection_lost",
            "exact",
        )
