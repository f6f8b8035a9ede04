"""Connections are shared, and closing one user's stops no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from ryzanstein_client import AsyncClient, Client, ProtocolError, StreamInterrupted
from ryzanstein_client.grpc import AsyncGrpcClient, GrpcClient

from tests.integration.clients.serving import ALL, PROMPT, Served, call, read, served
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import eventually

every_client = pytest.mark.parametrize("kind", ALL)


@pytest.fixture
async def slow() -> AsyncIterator[Served]:
    async with served([Worker("w0", step_s=0.02)]) as running:
        yield running


@every_client
async def test_calls_share_connections(slow: Served, kind: str) -> None:
    async with slow.client(kind) as client:
        for _ in range(3):
            await read(client, "stream_completion", PROMPT, max_tokens=2)
            await call(client, "tokenize", PROMPT)
        assert slow.network(kind).connections == 1
        await asyncio.gather(*(call(client, "complete", PROMPT, max_tokens=3) for _ in range(6)))
        assert slow.network(kind).connections <= (1 if kind.startswith("grpc") else 6)


@every_client
async def test_closing_a_stream_cancels_its_generation(slow: Served, kind: str) -> None:
    worker = slow.stack.workers[0]

    def first_two(client: Client | GrpcClient) -> list[str]:
        with client.stream_completion(PROMPT, max_tokens=200) as stream:
            texts = [next(stream).text, next(stream).text]
        assert list(stream) == []
        assert stream.text == "".join(texts)
        with pytest.raises(ProtocolError, match="not ended"):
            stream.completion()
        return texts

    async with slow.client(kind) as client:
        if isinstance(client, Client | GrpcClient):
            await asyncio.to_thread(first_two, client)
        else:
            async with client.stream_completion(PROMPT, max_tokens=200) as stream:
                assert [(await anext(stream)).finish_reason, (await anext(stream)).finish_reason] == [None, None]
            assert [chunk async for chunk in stream] == []
        await eventually(lambda: worker.cancelled)
        assert (await call(client, "complete", PROMPT, max_tokens=2)).finish_reason == "length"


@every_client
async def test_closing_a_client_cancels_its_streams(slow: Served, kind: str) -> None:
    async with slow.client(kind) as client:
        reading = asyncio.create_task(read(client, "stream_completion", PROMPT, max_tokens=200))
        await eventually(lambda: slow.stack.workers[0].given > 3)
        assert not reading.done()
        if isinstance(client, AsyncClient | AsyncGrpcClient):
            await client.aclose()
        else:
            client.close()
        await eventually(lambda: slow.stack.workers[0].cancelled)
        with pytest.raises((StreamInterrupted, asyncio.CancelledError)):
            await reading


async def test_a_cancelled_task_cancels_its_generation(slow: Served) -> None:
    for kind in ("rest-async", "grpc-async"):
        slow.stack.workers[0].cancelled.clear()
        async with slow.client(kind) as client:
            task = asyncio.create_task(call(client, "complete", PROMPT, max_tokens=200))
            before = len(slow.stack.workers[0].submits)
            await eventually(lambda before=before: len(slow.stack.workers[0].submits) > before)
            task.cancel()
            await eventually(lambda: slow.stack.workers[0].cancelled)


def test_urls_are_checked() -> None:
    for url in ("localhost:8000", "ftp://x", "http://"):
        with pytest.raises(ValueError, match="http://host:port"):
            Client(url)
    for kind in (GrpcClient, AsyncGrpcClient):
        with pytest.raises(ValueError, match=r"must be host:port, as in '127\.0\.0\.1:8001'"):
            kind("http://127.0.0.1:8001")
