"""Clients that stall, vanish or speak nonsense are cut off in time, and no other client notices."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import websockets

from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, running_stack
from tests.integration.gateway.test_resume import expected_ids, stream_once
from tests.integration.gateway.test_stream_socket import SocketClient, connect
from tests.integration.gateway.test_telemetry import scrape_until

SMALL = {"prompt": "a", "max_tokens": 2}


@pytest.fixture
async def stack() -> AsyncIterator[GatewayStack]:
    limits = {"header_timeout_s": 1.0, "body_timeout_s": 1.0, "send_timeout_s": 1.0, "max_body_bytes": 50_000}
    async with running_stack([Worker("w0", step_s=0.005)], **limits) as running:
        yield running


@asynccontextmanager
async def neighbour(stack: GatewayStack) -> AsyncIterator[None]:
    """A stream that runs while the block does, and comes out whole."""
    running = asyncio.create_task(stream_once(stack, 7, 150))
    await eventually(lambda: stack.workers[0].submits)
    yield
    assert (await running)[1] == expected_ids(7, 150)


async def raw(stack: GatewayStack, data: bytes, *, receive_buffer: int = 0) -> socket.socket:
    """A connection that has sent `data` and reads nothing."""
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", stack.gateway.http.port))
    await loop.sock_sendall(client, data)
    return client


async def send_without_end(client: socket.socket, data: bytes) -> None:
    async with asyncio.timeout(60):
        while True:
            await asyncio.get_running_loop().sock_sendall(client, data)


async def rest_of(client: socket.socket) -> bytes:
    """Everything until the server closes."""
    received, loop = b"", asyncio.get_running_loop()
    async with asyncio.timeout(60):
        while data := await loop.sock_recv(client, 65_536):
            received += data
    client.close()
    return received


def post(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


async def test_a_hundred_slow_heads_and_bodies_are_cut_off(stack: GatewayStack) -> None:
    async with neighbour(stack):
        heads = [await raw(stack, b"POST /v1/completions HTTP/1.1\r\nhost: ") for _ in range(50)]
        bodies = [await raw(stack, post(SMALL)[:-3]) for _ in range(50)]
        assert (await stack.complete(**SMALL)).status_code == 200
        assert {await rest_of(client) for client in heads} == {b""}
        assert {(await rest_of(client))[:13] for client in bodies} == {b"HTTP/1.1 408 "}


async def test_a_client_that_stops_reading_is_dropped_and_its_place_is_free(stack: GatewayStack) -> None:
    """Sixty sequences with twenty alternatives a token: megabytes, more than all buffers on the way hold."""
    body = {"prompt": "a", "max_tokens": 250, "stream": True, "n": 60, "logprobs": 20, "ignore_eos": True}
    stack.workers[0].tokens_per_step = 10
    async with neighbour(stack):
        client = await raw(stack, post(body), receive_buffer=4096)
        await scrape_until(stack, 1, "requests_total", "rest", "test-model", "/v1/completions", "499")
    await scrape_until(stack, 0, "in_flight_requests", "rest", "/v1/completions")
    assert not (await rest_of(client)).endswith(b"0\r\n\r\n"), "what was on its way, and no end"


async def test_a_client_that_reads_late_gets_all(stack: GatewayStack) -> None:
    body = {"prompt": "a", "max_tokens": 250, "stream": True, "n": 60, "logprobs": 20, "ignore_eos": True}
    stack.workers[0].tokens_per_step = 10
    client = await raw(stack, post(body), receive_buffer=4096)
    connections = stack.gateway.http.server_state.connections
    await eventually(lambda: any(each._send_timer for each in connections))  # type: ignore[union-attr]  # noqa: SLF001
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += await asyncio.get_running_loop().sock_recv(client, 1 << 20)
    client.close()
    assert b"data: [DONE]" in received[-100:]


@pytest.mark.parametrize("stream", [False, True])
async def test_half_closed_client_still_gets_the_answer(stack: GatewayStack, stream: bool) -> None:
    worker = stack.workers[0]
    async with neighbour(stack):
        client = await raw(stack, post({"prompt": "a", "max_tokens": 20, "stream": stream}))
        client.shutdown(socket.SHUT_WR)
        answer = (await rest_of(client)).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
        client.close()

        worker.step_s = 0.05  # it is not over before it is given up
        client = await raw(stack, post({"prompt": "a", "max_tokens": 250, "stream": stream}))
        await eventually(lambda: len(worker.submits) == 3)
        client.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0.1)
        assert not worker.cancelled
        client.close()
        await eventually(lambda: worker.cancelled == [worker.submits[2].request_id])
        worker.step_s = 0.0


async def test_a_websocket_that_stops_reading_is_dropped(stack: GatewayStack) -> None:
    key = b"dGhlIHNhbXBsZSBub25jZQ=="
    upgrade = (
        b"GET /v1/stream HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: " + key + b"\r\n\r\n"
    )
    nonsense = json.dumps({"type": "cancel", "id": "x" * 100}).encode()  # answered by a longer error
    frame = bytes([0x81, 0xFE]) + len(nonsense).to_bytes(2, "big") + bytes(4) + nonsense
    async with neighbour(stack):
        client = await raw(stack, upgrade, receive_buffer=4096)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await send_without_end(client, frame * 50)
        client.close()
        await scrape_until(stack, 0, "websocket_connections")


async def test_broken_frames_end_their_connection_with_a_reason(stack: GatewayStack) -> None:
    for frame, code in (
        (bytes([0x81, 0x82]) + bytes(4) + b"\xff\xfe", 1007),  # text that is no UTF-8
        (bytes([0x81, 0xFF]) + (60_000).to_bytes(8, "big") + bytes(4) + b"x" * 60_000, 1009),  # longer than a body
        (bytes([0x83, 0x80]) + bytes(4), 1002),  # an opcode that does not exist
        (bytes([0x81, 0x01]) + b"x", 1002),  # not masked
    ):
        async with neighbour(stack), connect(stack) as good, connect(stack) as bad:
            client = SocketClient(good)
            await client.start("a", 50, 3)
            bad.transport.write(frame)
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await bad.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == code
            await client.until("done", "a")
            assert client.ids["a"] == expected_ids(3, 50)


async def test_nonsense_that_is_no_http_is_400(stack: GatewayStack) -> None:
    async with neighbour(stack):
        for data in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
            b"HELLO\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        ):
            head, _, body = (await rest_of(await raw(stack, data))).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert f"content-length: {len(body)}".encode() in head
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http_request")
        negative = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n"
        assert (await rest_of(await raw(stack, negative))).startswith(b"HTTP/1.1 400 ")
        handshake = b"GET /v1/stream HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
        assert (await rest_of(await raw(stack, handshake))).startswith(b"HTTP/1.1 400 ")


async def test_a_head_that_is_too_large_is_431(stack: GatewayStack) -> None:
    begin, end = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n", b"\r\n"
    for largest in (b"x: y\r\n" * 126, b"x: %b\r\n" % (b"y" * 65_000)):
        received = await rest_of(await raw(stack, begin + largest + end))
        assert received.startswith(b"HTTP/1.1 200 "), received
    for larger in (b"x: y\r\n" * 127, b"x: %b\r\n" % (b"y" * 66_000)):
        head, _, body = (await rest_of(await raw(stack, begin + larger + end))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        error = json.loads(body)["error"]
        assert error["code"] == "request_header_fields_too_large"
        assert "128 header fields and 65536 bytes" in error["message"]
    endless = await raw(stack, begin + b"x: ")
    connections = stack.gateway.http.server_state.connections
    await eventually(lambda: any(each._head_timer for each in connections))  # type: ignore[union-attr]  # noqa: SLF001
    await asyncio.get_running_loop().sock_sendall(endless, b"y" * 70_000)
    assert (await rest_of(endless)).startswith(b"HTTP/1.1 431 ")


async def test_an_answer_that_is_under_way_gets_no_error_into_its_middle(stack: GatewayStack) -> None:
    stack.workers[0].step_s = 0.05
    client = await raw(stack, post({**SMALL, "max_tokens": 150, "stream": True}))
    received = await asyncio.get_running_loop().sock_recv(client, 65_536)
    await asyncio.get_running_loop().sock_sendall(client, b"nonsense\r\n\r\n")
    received += await rest_of(client)
    assert received.count(b"HTTP/1.1") == 1
    assert b"invalid_http_request" not in received
    await eventually(lambda: stack.workers[0].cancelled)


async def test_endless_grammar_does_not_delay_other_requests() -> None:
    # Its conversion looks for the beginning of a line in each of these, and looks at all lines that follow.
    hostile = {**SMALL, "guided_grammar": 'root ::= "a"' + "\n" * 60_000}
    async with running_stack([Worker("w0", step_s=0.005)], grammar_timeout_s=3.0) as stack, neighbour(stack):
        refused = asyncio.create_task(stack.complete(**hostile))
        alive = 0
        while not refused.done():
            assert (await stack.http.get("/livez")).status_code == 200
            alive += 1
            await asyncio.sleep(0.02)
        assert alive > 5
        answer = await refused
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_grammar")
        assert "longer than 3 s" in answer.json()["error"]["message"]
        follows = await stack.complete(**SMALL, guided_grammar='root ::= "a" | b\nb ::= [x-z]+')
        assert follows.status_code == 200, follows.text
        assert 'start: "a"' in stack.workers[0].submits[-1].sampling.grammar
        for wrong, why in (
            ('root ::= "a', "cannot be followed"),
            ("root ::= " + '("a" | ' * 4_000, "cannot be followed"),
        ):
            answer = await stack.complete(**SMALL, guided_grammar=wrong)
            assert answer.status_code == 400
            assert why in answer.json()["error"]["message"]
