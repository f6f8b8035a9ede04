"""A gateway's connection to a worker ends when it is told to."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from ryzanstein.v1 import worker_pb2

from services.gateway.upstream import connection
from services.gateway.upstream.connection import WorkerConnection, WorkerPool, WorkerRef


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


class EndlessSink:
    def deliver(self, output: worker_pb2.Output) -> bool:
        return False

    def move_on(self, progress: worker_pb2.Progress) -> None: ...

    def lose(self, detail: str, *, died: bool) -> None: ...

    def give_up(self, now: float, *, reported: bool) -> bool:
        return False


async def test_idle_connection_is_closed_in_time_and_opened_again_for_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else every gateway ends up with a connection to every worker."""
    server = grpc.aio.server()
    ref = WorkerRef("w", "first", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    pool, live = WorkerPool("gateway", silence_timeout_s=60), frozenset({ref})
    opened = await pool.get(ref)
    await pool.keep(live)
    assert not opened.closed, "it has just been used"
    monkeypatch.setattr(connection, "IDLE_S", 0.0)
    opened.submit(worker_pb2.Submit(request_id="r"), EndlessSink())
    await pool.keep(live)
    assert not opened.closed, "it has a request"
    opened.cancel("r")
    await pool.keep(live)
    assert opened.closed
    assert not (await pool.get(ref)).closed
    await pool.close()
    await server.stop(None)


async def test_connection_is_idle_from_its_last_request_on() -> None:
    server = grpc.aio.server()
    ref = WorkerRef("w", "first", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    pool = WorkerPool("gateway", silence_timeout_s=1e6)
    opened = await pool.get(ref)
    opened.submit(worker_pb2.Submit(request_id="r"), EndlessSink())
    later = opened.used_at + 1000
    opened.watch(later)
    assert opened.used_at == later
    opened.cancel("r")
    opened.watch(later + 1000)
    assert opened.used_at == later
    await pool.close()
    await server.stop(None)


async def test_closed_connection_is_freed_without_a_collection() -> None:
    """The socket of a channel stays open until the channel is freed, and an idle gateway collects no garbage."""
    server = grpc.aio.server()
    ref = WorkerRef("w", "first", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    pool = WorkerPool("gateway", silence_timeout_s=60)
    freed = asyncio.Event()
    weakref.finalize(await pool.get(ref), freed.set)
    gc.disable()
    try:
        await pool.keep(frozenset())
        async with asyncio.timeout(60):
            await freed.wait()
    finally:
        gc.enable()
    await server.stop(None)
