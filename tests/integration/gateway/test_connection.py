"""A gateway's connection to a worker ends when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from services.gateway.upstream import connection
from services.gateway.upstream.connection import WorkerConnection, WorkerRef


async def test_a_cancellation_that_is_lost_does_not_hold_a_gateway_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries swallow one now and then: it is said again until the tasks have ended."""
    lost = []

    async def swallowing(queue: asyncio.Queue[Any]) -> AsyncIterator[list[Any]]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            lost.append(error)
        yield [await asyncio.Queue[Any]().get()]

    monkeypatch.setattr(connection, "batches", swallowing)
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    opened = WorkerConnection(WorkerRef("w", "first", f"127.0.0.1:{port}"), "gateway", silence_timeout_s=60)
    await opened.open(timeout_s=30)
    await asyncio.sleep(0)  # its tasks wait
    async with asyncio.timeout(30):
        await opened.close()
    assert lost
    await server.stop(None)
