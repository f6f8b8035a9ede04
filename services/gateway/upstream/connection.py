"""One long-lived bidirectional stream to a worker, shared by all of the worker's requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextvars import Context
from typing import Protocol

import grpc
import grpc.aio
from msgspec import Struct
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc

from services.common.batches import batches
from services.common.rpc import open_channel
from services.common.silence import TICK_S, Silence
from services.common.tasks import end_tasks
from services.common.tls.credentials import Tls
from services.gateway.upstream.channels import became_ready

CONNECT_TIMEOUT_S = 2.0
# A connection takes a descriptor and 70 KiB of a gateway, and as much of its worker
# (docs/adr/030-idle-connections-are-closed.md).
IDLE_S = 60.0

log = logging.getLogger(__name__)


class WorkerUnreachableError(Exception):
    """There is no connection to the worker; nothing was submitted."""


class WorkerRef(Struct, frozen=True):
    """One process of one worker. A restarted worker has another ref."""

    worker_id: str
    incarnation: str
    address: str


class Sink(Protocol):
    """Receives the outputs of one attempt. The reader calls it, so it must not block."""

    def deliver(self, output: worker_pb2.Output) -> bool:
        """Take an output; returns True for the attempt's last output."""

    def move_on(self, progress: worker_pb2.Progress) -> None:
        """The request has moved on without an output."""

    def lose(self, detail: str, *, died: bool) -> None:
        """The connection has broken; `died`: by its other end, not for its silence."""

    def give_up(self, now: float, *, reported: bool) -> bool:
        """Called every `TICK_S`; returns True when nothing has moved for too long, or the request's time is over.

        `reported`: the worker says when a request moves on; else its silence about a request means nothing.
        """


class WorkerConnection:
    """Sends submits and delivers outputs to their sinks; when the stream breaks, it calls every sink's `lose`."""

    def __init__(
        self, ref: WorkerRef, gateway_id: str, silence_timeout_s: float, heartbeat_s: float, tls: Tls | None = None
    ) -> None:
        """`heartbeat_s`: while requests run, a message arrives within twice this time."""
        self.ref = ref
        self._silence = Silence(silence_timeout_s)
        self._beats = self._heard = self._reports_progress = False
        self._sinks: dict[str, Sink] = {}
        hello = worker_pb2.Hello(gateway_id=gateway_id, heartbeat_ms=round(heartbeat_s * 1e3))
        self._unsent: asyncio.Queue[worker_pb2.ConnectFrame | None] = asyncio.Queue()
        self._unsent.put_nowait(worker_pb2.ConnectFrame(hello=hello))
        self._channel = open_channel(ref.address, to="worker", tls=tls, small_messages=True)
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self.closed = False
        self.used_at = asyncio.get_running_loop().time()  # when it had a request, or was given to one

    @property
    def open_requests(self) -> int:
        """The number of requests that have not ended."""
        return len(self._sinks)

    async def open(self, timeout_s: float) -> None:
        """Connect; raises :class:`WorkerUnreachableError`."""
        if not await became_ready(self._channel, timeout_s):
            self.closed = True
            await self._channel.close()
            raise WorkerUnreachableError(f"{self.ref.worker_id} at {self.ref.address} cannot be reached")
        call = worker_pb2_grpc.WorkerStub(self._channel).Connect()
        self._tasks = (asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call)))

    def submit(self, submit: worker_pb2.Submit, sink: Sink) -> None:
        """Start a request; raises :class:`WorkerUnreachableError` when the connection has broken."""
        if self.closed:
            raise WorkerUnreachableError(f"the connection to {self.ref.worker_id} was lost")
        self._sinks[submit.request_id] = sink
        self._unsent.put_nowait(worker_pb2.ConnectFrame(submit=submit))

    def cancel(self, request_id: str) -> None:
        """Stop a request; its sink gets no further calls."""
        self._sinks.pop(request_id, None)
        if not self.closed:
            self._unsent.put_nowait(worker_pb2.ConnectFrame(cancel=worker_pb2.Cancel(request_id=request_id)))

    def watch(self, now: float) -> None:
        """Give up requests whose time is over, and lose all of them when the worker is silent; called every `TICK_S`.

        A silent worker's process is stopped, or its machine is down. A worker without heartbeats is never silent.
        """
        if self._sinks:
            self.used_at = now
        heard = self._heard or not self._beats or not self._sinks
        self._heard = False
        if self._silence.too_long(now, heard=heard):
            self._fail(f"the worker has said nothing for {self._silence.limit_s:g} s")
            return
        reported = self._reports_progress
        for request_id, sink in list(self._sinks.items()):
            if sink.give_up(now, reported=reported):
                self.cancel(request_id)

    async def close(self) -> None:
        """End the stream; the worker cancels the stream's running requests."""
        self._fail("the gateway closed the connection")
        await end_tasks(self._tasks)
        # Their errors refer to this object and to the call, which would keep the socket open until a collection.
        self._tasks = ()
        await self._channel.close()

    async def _write(self, call: grpc.aio.StreamStreamCall[worker_pb2.ConnectFrames, worker_pb2.StepOutputs]) -> None:
        try:
            # The reader gets the status of a broken stream and reports it.
            with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                async for frames in batches(self._unsent):
                    await call.write(worker_pb2.ConnectFrames(frames=frames))
        except Exception as error:  # a bug, with which the connection would take requests and send none
            log.exception("frames to %s cannot be sent", self.ref.worker_id)
            self._fail(f"frames cannot be sent: {error!r}")

    async def _read(self, call: grpc.aio.StreamStreamCall[worker_pb2.ConnectFrames, worker_pb2.StepOutputs]) -> None:
        reason, died, sinks = "the worker ended the stream", False, self._sinks
        try:
            async for step in call:
                self._heard = True
                if step.heartbeat:
                    self._beats, self._reports_progress = True, step.reports_progress
                for output in step.outputs:
                    sink = sinks.get(output.request_id)
                    if sink is not None and sink.deliver(output):
                        sinks.pop(output.request_id, None)
                for progress in step.progress:
                    if (sink := sinks.get(progress.request_id)) is not None:
                        sink.move_on(progress)
        except grpc.aio.AioRpcError as error:
            reason, died = f"{error.code().name}: {error.details()}", error.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            call.cancel()
            self._fail(reason, died=died)

    def _fail(self, reason: str, *, died: bool = False) -> None:
        if self.closed:
            return
        self.closed = True
        sinks, self._sinks = self._sinks, {}
        if sinks:
            log.warning("connection to %s lost with %d requests: %s", self.ref.worker_id, len(sinks), reason)
        for sink in sinks.values():
            sink.lose(reason, died=died)
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()


class WorkerPool:
    """The worker connections of a gateway, opened on first use and closed when they are idle."""

    def __init__(self, gateway_id: str, silence_timeout_s: float, heartbeat_s: float, tls: Tls | None = None) -> None:
        self._gateway_id = gateway_id
        self._tls = tls
        self._silence_timeout_s, self._heartbeat_s = silence_timeout_s, heartbeat_s
        self._opening: dict[WorkerRef, asyncio.Task[WorkerConnection]] = {}

    async def get(self, ref: WorkerRef) -> WorkerConnection:
        """The connection to a worker; raises :class:`WorkerUnreachableError`."""
        opening = self._opening.get(ref)
        if opening is None or self._is_dead(opening):
            # An empty context: the shared connection must not carry the first request's trace.
            opening = self._opening[ref] = asyncio.create_task(self._open(ref), context=Context())
        # Shielded: the cancellation of one request must not cancel the opening for others.
        connection = opening.result() if opening.done() else await asyncio.shield(opening)
        connection.used_at = asyncio.get_running_loop().time()
        return connection

    async def _open(self, ref: WorkerRef) -> WorkerConnection:
        connection = WorkerConnection(ref, self._gateway_id, self._silence_timeout_s, self._heartbeat_s, self._tls)
        await connection.open(CONNECT_TIMEOUT_S)
        return connection

    @staticmethod
    def _is_dead(opening: asyncio.Task[WorkerConnection]) -> bool:
        if not opening.done():
            return False
        return opening.cancelled() or opening.exception() is not None or opening.result().closed

    def _connections(self) -> list[WorkerConnection]:
        return [task.result() for task in self._opening.values() if task.done() and not self._is_dead(task)]

    async def keep(self, live: frozenset[WorkerRef]) -> None:
        """Close broken connections, and those without requests: at once if the worker is not `live`, else in time."""
        now = asyncio.get_running_loop().time()
        for ref, opening in list(self._opening.items()):
            if not opening.done():
                continue
            if opening.cancelled() or opening.exception() is not None:
                del self._opening[ref]
                continue
            connection = opening.result()
            idle = connection.open_requests == 0 and (ref not in live or now - connection.used_at > IDLE_S)
            if connection.closed or idle:
                del self._opening[ref]
                await connection.close()

    async def watch(self) -> None:
        """Find stalled and late requests, and silent workers, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(TICK_S)
            for connection in self._connections():
                connection.watch(clock())

    async def close(self) -> None:
        """Close every connection."""
        await asyncio.gather(*(connection.close() for connection in self._connections()))
        self._opening.clear()
