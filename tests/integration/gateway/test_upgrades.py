"""A client may ask for another protocol: WebSocket where there is one, and every other request is served as it is."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable

import pytest
import websockets

from tests.integration.gateway.gateways import GatewayStack
from tests.integration.gateway.test_bad_clients import raw, rest_of

BODY = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"  # Java's own
WEBSOCKET = b"connection: upgrade\r\nupgrade: websocket\r\n"
KEY = b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
LAST = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def sized(fields: bytes) -> bytes:
    return HEAD + fields + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


def chunked(fields: bytes) -> bytes:
    halves = b"".join(b"%x\r\n%b\r\n" % (len(half), half) for half in (BODY[:5], BODY[5:]))
    return HEAD + fields + b"transfer-encoding: chunked\r\n\r\n" + halves + b"0\r\n\r\n"


async def statuses(client: socket.socket) -> list[bytes]:
    """Of all answers until the server closes."""
    received = await rest_of(client)
    return [part[1:4] for part in received.split(b"HTTP/1.1")[1:]]


@pytest.mark.parametrize("request_of", [sized, chunked])
@pytest.mark.parametrize("fields", [H2C, b"connection: upgrade\r\nupgrade: TLS/1.0\r\n"])
async def test_an_upgrade_that_is_not_offered_is_ignored(
    stack: GatewayStack, request_of: Callable[[bytes], bytes], fields: bytes
) -> None:
    data = request_of(fields)
    assert await statuses(await raw(stack, data + data + LAST)) == [b"200"] * 3, "at once, one behind the other"
    client = await raw(stack, b"")
    for piece in (data[:30], data[30:-20], data[-20:-3], data[-3:] + data + LAST):
        await asyncio.get_running_loop().sock_sendall(client, piece)
        await asyncio.sleep(0.02)
    assert await statuses(client) == [b"200"] * 3, "in pieces"
    get = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\n"
    assert await statuses(await raw(stack, get + data + LAST)) == [b"200"] * 3
    assert len(stack.workers[0].submits) == 5


async def test_invalid_handshake_is_rejected_at_once(stack: GatewayStack) -> None:
    opening = b"GET /v1/stream HTTP/1.1\r\nhost: x\r\n" + WEBSOCKET + KEY
    for data in (
        sized(WEBSOCKET),
        sized(WEBSOCKET + KEY),
        HEAD.replace(b"POST", b"PUT") + WEBSOCKET + KEY + b"\r\n",
        opening + b"content-length: 1\r\n\r\nx",
        opening + b"x: " + b"a" * 20_000 + b"\r\n\r\n",
        b"CONNECT example.com:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    ):
        head, _, body = (await rest_of(await raw(stack, data))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 "), data
        assert json.loads(body)["error"]["code"] == "invalid_http_request", data


async def test_a_websocket_to_another_path_is_404(stack: GatewayStack) -> None:
    for path in ("/v1/nothing", "/v1/chat/completions", "/"):
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(stack.url.replace("http", "ws") + path, proxy=None)
        answer = refused.value.response
        error = json.loads(answer.body)["error"]
        assert (answer.status_code, error["code"]) == (404, "not_found")
        assert "/v1/stream" in error["message"]
        assert answer.headers["x-request-id"]
