"""Requests that two servers may read differently: none of them smuggles a request or a field past a proxy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack

SECOND = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = SECOND.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
LIST = b'"object":"list"'  # in the answer of the second request
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
CL = b"content-length: %d\r\n" % len(BODY)
TE = b"transfer-encoding: chunked\r\n"
HOST = b"host: x\r\n"
H2C = b"connection: upgrade\r\nupgrade: h2c\r\n"
HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")

# Each ends with what a server that is misled would take for a second request.
AMBIGUOUS = {
    "both lengths": HEAD + CL + TE + b"\r\n" + CHUNKED + SECOND,
    "both lengths, the other way round": HEAD + TE + CL + b"\r\n" + CHUNKED + SECOND,
    "no length, but the other": HEAD + b"content-length: 0\r\n" + TE + b"\r\n" + CHUNKED + SECOND,
    "two different lengths": HEAD + CL + b"content-length: 0\r\n\r\n" + BODY + SECOND,
    "two different lengths in a field": HEAD + b"content-length: %d, 0\r\n\r\n" % len(BODY) + BODY + SECOND,
    "a sign before the length": HEAD + b"content-length: +%d\r\n\r\n" % len(BODY) + BODY + SECOND,
    "a negative length": HEAD + b"content-length: -1\r\n\r\n" + BODY + SECOND,
    "a length in hexadecimal": HEAD + b"content-length: 0x20\r\n\r\n" + BODY + SECOND,
    "a length with digits of another script": HEAD + "content-length: ٣٢\r\n\r\n".encode() + BODY + SECOND,
    "a length with a space in it": HEAD + b"content-length: 3 2\r\n\r\n" + BODY + SECOND,
    "a length that overflows": HEAD + b"content-length: 18446744073709551648\r\n\r\n" + BODY + SECOND,
    "a space before a length's colon": HEAD + b"content-length : 0\r\n" + CL + b"\r\n" + BODY + SECOND,
    "a space before an encoding's colon": HEAD + b"transfer-encoding : chunked\r\n" + CL + b"\r\n" + BODY + SECOND,
    "an unknown encoding": HEAD + b"transfer-encoding: xchunked\r\n" + CL + b"\r\n" + BODY + SECOND,
    "chunked is not the last encoding": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNKED + SECOND,
    "an encoding with a tab inside": HEAD + b"transfer-encoding:\tchun\tked\r\n" + CL + b"\r\n" + BODY + SECOND,
    "an encoding on a folded line": HEAD + b"transfer-encoding:\r\n chunked\r\n" + CL + b"\r\n" + BODY + SECOND,
    "a folded field": HEAD + b"x: a\r\n " + CL + b"\r\n" + SECOND,
    "a bare CR within a field": HEAD + b"x: a\rcontent-length: 0\r\n" + CL + b"\r\n" + BODY + SECOND,
    "a NUL within a field": HEAD + b"x: a\x00b\r\n" + CL + b"\r\n" + BODY + SECOND,
    "a field without a colon": HEAD + b"content-length\r\n" + CL + b"\r\n" + BODY + SECOND,
    "a chunk's length in another base": HEAD + TE + b"\r\n0x20\r\n" + BODY + b"\r\n0\r\n\r\n" + SECOND,
    "a chunk's length with a sign": HEAD + TE + b"\r\n-1\r\n" + BODY + b"\r\n0\r\n\r\n" + SECOND,
    "a chunk's length that overflows": HEAD + TE + b"\r\n10000000000000020\r\n" + BODY + b"\r\n0\r\n\r\n" + SECOND,
    "a chunk longer than it says": HEAD + TE + b"\r\n5\r\n" + BODY + b"\r\n0\r\n\r\n" + SECOND,
    "a chunk that ends without CR LF": HEAD + TE + b"\r\n%x\r\n%bXX0\r\n\r\n" % (len(BODY), BODY) + SECOND,
    "a chunk's length that ends with LF": HEAD + TE + b"\r\n%x\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) + SECOND,
    "a version that does not exist": HEAD.replace(b"1.1", b"1.9") + CL + b"\r\n" + BODY + SECOND,
    "chunks and a length in an old version": HEAD.replace(b"1.1", b"1.0") + CL + TE + b"\r\n" + CHUNKED + SECOND,
    "chunks in an old version": HEAD.replace(b"1.1", b"1.0") + TE + b"\r\n" + CHUNKED + SECOND,
    "an encoding that is not decoded": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKED + SECOND,
    "an empty encoding before chunked": HEAD + b"transfer-encoding: , chunked\r\n\r\n" + CHUNKED + SECOND,
    "an encoding with a parameter": HEAD + b"transfer-encoding: chunked;q=1\r\n\r\n" + CHUNKED + SECOND,
    "a version of another kind": SECOND.replace(b"1.1", b"2.0") + SECOND,
    "a version before heads": SECOND.replace(b"1.1", b"0.9") + SECOND,
    "no version": SECOND.replace(b" HTTP/1.1", b"") + SECOND,
    "a version of another kind, with an upgrade": SECOND.replace(b"1.1", b"2.0").replace(HOST, HOST + H2C) + SECOND,
    "a fragment": SECOND.replace(b"models", b"models#a") + SECOND,
    "no host": SECOND.replace(HOST, b"") + SECOND,
    "no host, with an upgrade": SECOND.replace(HOST, H2C) + SECOND,
    "two hosts": SECOND.replace(HOST, HOST + b"Host: y\r\n") + SECOND,
    "a host twice": SECOND.replace(HOST, HOST * 2) + SECOND,
    "two hosts in an old version": SECOND.replace(b"1.1", b"1.0").replace(HOST, HOST * 2) + SECOND,
    "two hosts of a handshake": HANDSHAKE.replace(HOST, HOST * 2) + SECOND,
    "no host of a handshake": HANDSHAKE.replace(HOST, b"") + SECOND,
    "a handshake of another version": HANDSHAKE.replace(b"1.1", b"2.0") + SECOND,
    "a handshake of an old version": HANDSHAKE.replace(b"1.1", b"1.0") + SECOND,
} | {
    f"the host `{host}`": SECOND.replace(HOST, f"host: {host}\r\n".encode()) + SECOND
    for host in ("x, y", "x y", "x/y", "user@x", "x:a", "x:-1", "x:1:2", "<x>", "::1", "[::1", "[x/]", "ü")
}
HOSTS = ("x", "x:80", "x:", "", "a_b.c-d.example.", "127.0.0.1:8000", "[::1]:8000", " x ")


@pytest.fixture
async def stack() -> AsyncIterator[GatewayStack]:
    async with running_stack([Worker("w0")], header_timeout_s=1.0, body_timeout_s=1.0) as running:
        yield running


async def answers(stack: GatewayStack, data: bytes) -> bytes:
    """All that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http.port)
    writer.write(data)
    received = b""
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(60):
            while part := await reader.read(65_536):
                received += part
    writer.close()
    return received


async def test_ambiguous_request_gets_a_single_answer_a_rejection(stack: GatewayStack) -> None:
    plain = await answers(stack, HEAD + CL + b"\r\n" + BODY + LAST)
    assert STATUS.findall(plain) == [b"200", b"200"]
    assert LIST in plain, "two plain requests on a connection are two"
    received = await asyncio.gather(*(answers(stack, data) for data in AMBIGUOUS.values()))
    refused = dict(zip(AMBIGUOUS, (STATUS.findall(answer) for answer in received), strict=True))
    assert refused == {name: [b"400"] for name in AMBIGUOUS}
    assert not any(LIST in answer for answer in received)


async def test_every_form_of_a_host_is_served(stack: GatewayStack) -> None:
    for host in HOSTS:
        received = await answers(stack, LAST.replace(HOST, f"host: {host}\r\n".encode()))
        assert STATUS.findall(received) == [b"200"], host
    old = await answers(stack, SECOND.replace(b"1.1", b"1.0").replace(HOST, b""))
    assert STATUS.findall(old) == [b"200"], "HTTP/1.0 has no field Host"


async def test_a_trailer_changes_no_field_of_the_head(stack: GatewayStack) -> None:
    trailed = CHUNKED.removesuffix(b"\r\n") + b"content-encoding: gzip\r\nhost: y\r\n\r\n"
    received = await answers(stack, HEAD + TE + b"\r\n" + trailed + LAST)
    assert STATUS.findall(received) == [b"200", b"200"]
