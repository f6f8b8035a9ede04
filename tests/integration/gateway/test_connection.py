"""A gateway's connection to a worker ends on request."""

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


@pytest.fixture
async def ref() -> AsyncIterator[WorkerRef]:
    """A worker that accepts connections and answers nothing."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield WorkerRef("w", "first", f"127.0.0.1:{port}")
    await server.stop(None)


async def test_a_cancellation_that_is_lost_does_not_hold_a_gateway_up(
    ref: WorkerRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries swallow one now and then: it is said again until the tasks have ended."""
    lost = []

    async def swallowing(queue: asyncio.Queue[Any]) -> AsyncIterator[list[Any]]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            lost.append(error)
        yield [await asyncio.Queue[Any]().get()]

    monkeypatch.setattr(connection, "batches", swallowing)
    opened = WorkerConnection(ref, "gateway", silence_timeout_s=60)
    await opened.open(timeout_s=30)
    await asyncio.sleep(0)  # its tasks wait
    async with asyncio.timeout(30):
        await opened.close()
    assert lost


class EndlessSink:
    def deliver(self, output: worker_pb2.Output) -> bool:
        return False

    def move_on(self, progress: worker_pb2.Progress) -> None: ...

    def lose(self, detail: str, *, died: bool) -> None: ...

    def give_up(self, now: float, *, reported: bool) -> bool:
        return False


async def test_idle_connection_is_closed_in_time_and_opened_again_for_a_request(
    ref: WorkerRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every gateway ends up with a connection to every worker."""
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


async def test_connection_is_idle_from_its_last_request_on(ref: WorkerRef) -> None:
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


async def test_closed_connection_is_freed_without_a_collection(ref: WorkerRef) -> None:
    """The socket of a channel stays open until the channel is freed, and an idle gateway collects no garbage."""
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
