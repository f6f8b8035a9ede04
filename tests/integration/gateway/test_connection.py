"""A gateway's connection to a worker ends on request."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc

from services.gateway.settings import GatewaySettings
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
    opened = WorkerConnection(ref, "gateway", silence_timeout_s=60, heartbeat_s=0.3)
    await opened.open(timeout_s=30)
    await asyncio.sleep(0)  # its tasks wait
    async with asyncio.timeout(30):
        await opened.close()
    assert lost


class HelloRecorder(worker_pb2_grpc.WorkerServicer):
    def __init__(self) -> None:
        self.hello = asyncio.get_running_loop().create_future()

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.ConnectFrames], context: object
    ) -> AsyncIterator[worker_pb2.StepOutputs]:
        async for message in request_iterator:
            self.hello.set_result(message.frames[0].hello)
            yield worker_pb2.StepOutputs()


async def test_heartbeats_come_several_times_within_the_limits_of_a_silence() -> None:
    """A fleet with a longer silence sends fewer messages; a shorter limit of progress wants more."""
    assert GatewaySettings().heartbeat_s == pytest.approx(2.5 / 8)
    assert GatewaySettings(progress_timeout_s=2).heartbeat_s == pytest.approx(2 / 8)
    longer = GatewaySettings(silence_timeout_s=10)
    server, recorder = grpc.aio.server(), HelloRecorder()  # type: ignore[abstract]
    worker_pb2_grpc.add_WorkerServicer_to_server(recorder, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pool = WorkerPool("gateway", longer.silence_timeout_s, longer.heartbeat_s)
    await pool.get(WorkerRef("w", "first", f"127.0.0.1:{port}"))
    async with asyncio.timeout(30):
        assert (await recorder.hello).heartbeat_ms == 1250
    await pool.close()
    await server.stop(None)


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
    pool, live = WorkerPool("gateway", silence_timeout_s=60, heartbeat_s=0.3), frozenset({ref})
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
    pool = WorkerPool("gateway", silence_timeout_s=1e6, heartbeat_s=0.3)
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
    pool = WorkerPool("gateway", silence_timeout_s=60, heartbeat_s=0.3)
    freed = asyncio.Event()
    weakref.finalize(await pool.get(ref), freed.set)
    gc.disable()
    try:
        await pool.keep(frozenset())
        async with asyncio.timeout(60):
            await freed.wait()
    finally:
        gc.enable()


async def test_connection_closes_when_sending_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would take requests for ever, and none would reach the worker."""
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    class LossRecorder:
        def lose(self, detail: str, *, died: bool) -> None:
            lost.set_result(detail)

    def fail(queue: asyncio.Queue[Any]) -> AsyncIterator[list[Any]]:
        raise ZeroDivisionError

    monkeypatch.setattr(connection, "batches", fail)
    server, recorder = grpc.aio.server(), HelloRecorder()  # type: ignore[abstract]
    worker_pb2_grpc.add_WorkerServicer_to_server(recorder, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    opened = WorkerConnection(WorkerRef("w", "first", f"127.0.0.1:{port}"), "gateway", 60, 0.3)
    await opened.open(timeout_s=30)
    try:
        opened.submit(worker_pb2.Submit(request_id="r"), LossRecorder())  # type: ignore[arg-type]
        assert await asyncio.wait_for(lost, 60) == "frames cannot be sent: ZeroDivisionError()"
        assert opened.closed
    finally:
        await opened.close()
        await server.stop(None)
