"""The gRPC Worker service; it translates messages and decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import grpc
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

from services.worker.api.card import EngineIdentity, adapter_message, model_card
from services.worker.api.gateways import Gateways
from services.worker.api.state import StateForRouters
from services.worker.api.stream_buffer import StreamBuffer
from services.worker.engine.base import Engine
from services.worker.engine.errors import (
    BlocksUnavailableError,
    InvalidRequestError,
    NoRoomError,
    PhaseRefusedError,
    Unavailable,
    UnsupportedError,
)
from services.worker.engine.kv_events import PLACES, BlockPlace, KvEvent

STATE_THROTTLE_S = 0.020
STATE_HEARTBEAT_S = 2.0  # for clients that request no other interval
MIN_HEARTBEAT_S = 0.1
MAX_SLEEP_LEVEL = 2
# Fields that change with every token wait for the heartbeat or a change by a tenth: every state goes to all routers.
_DRIFTING = (
    *("kv_blocks_used", "kv_blocks_cached", "prefill_tokens_per_s", "decode_step_ms", "pull_bytes_per_s"),
    *("computed_tokens", "drafted_tokens", "accepted_tokens", "memory_bytes", "promised_bytes"),
)
_DRIFT = 0.1
_CODES = {
    Unavailable.GONE: grpc.StatusCode.NOT_FOUND,
    Unavailable.MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Unavailable.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable.LOST: grpc.StatusCode.UNAVAILABLE,
}
_REFUSED: dict[type[Exception], grpc.StatusCode] = {
    PhaseRefusedError: grpc.StatusCode.FAILED_PRECONDITION,
    NoRoomError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
}


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Implements worker.proto for one engine."""

    def __init__(self, identity: EngineIdentity, engine: Engine, gateways: Gateways) -> None:
        self._identity, self._engine, self._gateways = identity, engine, gateways
        self._state = StateForRouters(identity, engine)

    async def Connect(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.ConnectFrames],
        context: grpc.aio.ServicerContext[pb.ConnectFrames, pb.StepOutputs],
    ) -> AsyncIterator[pb.StepOutputs]:
        """Serve one gateway: a task reads its frames while this generator writes its outputs."""
        buffer = self._gateways.connect()
        beats = asyncio.Event()
        reader = asyncio.create_task(self._read(buffer, request_iterator, beats))
        heart = asyncio.create_task(_beat(buffer, beats))
        reader.add_done_callback(lambda _: buffer.wake())
        try:
            while not ((reader.done() or self._gateways.closed) and buffer.empty):
                message = await buffer.take()
                if message.outputs or message.heartbeat or message.progress:
                    yield message
            if reader.done():
                reader.result()  # raises the stream's error
        finally:
            heart.cancel()
            reader.cancel()
            self._gateways.drop(buffer)

    async def _read(
        self, buffer: StreamBuffer, messages: AsyncIterator[pb.ConnectFrames], beats: asyncio.Event
    ) -> None:
        """Read frames until the gateway closes its side; those of a newer protocol version are passed over."""
        async for message in messages:
            for frame in message.frames:
                match frame.WhichOneof("frame"):
                    case "submit":
                        if frame.submit.HasField("ticket"):
                            self._state.acknowledge(frame.submit.ticket)
                        self._gateways.submit(buffer, frame.submit)
                    case "cancel":
                        self._gateways.cancel(buffer, frame.cancel.request_id)
                    case "hello":
                        buffer.gateway_id = frame.hello.gateway_id
                        if frame.hello.heartbeat_ms:
                            buffer.heartbeat_s = max(frame.hello.heartbeat_ms / 1e3, MIN_HEARTBEAT_S)
                            beats.set()

    async def WatchState(  # noqa: N802
        self, request: pb.WatchStateRequest, context: grpc.aio.ServicerContext[pb.WatchStateRequest, pb.WorkerState]
    ) -> AsyncIterator[pb.WorkerState]:
        """The state now and after every change that matters; a heartbeat after an interval without a change."""
        sent, due = pb.WorkerState(), 0.0
        beat_s = max(request.heartbeat_ms / 1e3, MIN_HEARTBEAT_S) if request.heartbeat_ms else STATE_HEARTBEAT_S
        with self._engine.changes.watch() as changed:
            while not self._gateways.closed:
                changed.clear()
                state, now = self._state(), time.monotonic()
                state.heartbeat_ms = int(beat_s * 1e3)
                if now >= due or _matters(state, sent):
                    sent.seq = state.seq
                    yield _heartbeat(state) if sent == state else state
                    sent, due = state, now + beat_s
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(due - now):
                        await changed.wait()
                    await asyncio.sleep(STATE_THROTTLE_S)  # merges the changes of this time into one message

    async def KvSync(  # noqa: N802
        self, request: pb.KvSyncRequest, context: grpc.aio.ServicerContext[pb.KvSyncRequest, pb.KvEvents]
    ) -> AsyncIterator[pb.KvEvents]:
        """Replay or dump, then live events.

        A dump is one event, numbered just before the first live event, so that sequence numbers continue. The first
        message comes at once and is empty when the receiver has missed nothing; it confirms that the receiver is up to
        date.
        """
        known = request.incarnation == self._identity.incarnation
        next_seq = request.next_seq if known else -1  # -1 is never in the log and leads to a dump
        begun = False
        with self._engine.changes.watch() as changed:
            while not self._gateways.closed:
                changed.clear()
                if not begun or next_seq != self._engine.kv_events.next_seq:
                    begun, message = True, self._kv_events(next_seq)
                    next_seq = self._engine.kv_events.next_seq
                    yield message
                await changed.wait()

    def _kv_events(self, next_seq: int) -> pb.KvEvents:
        identity, log = self._identity, self._engine.kv_events
        message = pb.KvEvents(
            worker_id=identity.worker_id, incarnation=identity.incarnation, first_seq=max(0, next_seq)
        )
        fresh = log.since(next_seq)
        if fresh is None:
            log.flush()
            held = {BlockPlace.DEVICE: self._engine.cached_hashes(), **self._engine.offloaded_hashes()}
            message.reset = True
            fresh = [KvEvent(stored=tuple(hashes), place=place) for place, hashes in held.items() if hashes]
            message.first_seq = log.next_seq - len(fresh)
        message.events.extend(map(_event_message, fresh))
        return message

    async def GetModelCard(  # noqa: N802
        self, request: pb.GetModelCardRequest, context: grpc.aio.ServicerContext[pb.GetModelCardRequest, pb.ModelCard]
    ) -> pb.ModelCard:
        """The model card; UNAVAILABLE until the engine has started once."""
        if self._engine.facts is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._engine.detail)
        return model_card(self._identity, self._engine.model, self._engine.facts)

    async def InspectAdapter(  # noqa: N802
        self,
        request: pb.InspectAdapterRequest,
        context: grpc.aio.ServicerContext[pb.InspectAdapterRequest, pb.Adapter],
    ) -> pb.Adapter:
        """Digest and rank of an adapter that fits."""
        try:
            return adapter_message(await self._engine.inspect_adapter(request.source))
        except InvalidRequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except UnsupportedError as error:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))

    async def Sleep(  # noqa: N802
        self, request: pb.SleepRequest, context: grpc.aio.ServicerContext[pb.SleepRequest, pb.SleepResponse]
    ) -> pb.SleepResponse:
        """Give the model's memory back."""
        if request.level > MAX_SLEEP_LEVEL:
            problem = f"level: {request.level} is not one of 0, 1, 2"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        try:
            await self._engine.sleep(request.level or 1)
        except (PhaseRefusedError, UnsupportedError) as error:
            await context.abort(_REFUSED[type(error)], str(error))
        return pb.SleepResponse()

    async def Wake(  # noqa: N802
        self, request: pb.WakeRequest, context: grpc.aio.ServicerContext[pb.WakeRequest, pb.WakeResponse]
    ) -> pb.WakeResponse:
        """Begin to wake."""
        try:
            self._engine.wake(request.promised_bytes)
        except (PhaseRefusedError, NoRoomError) as error:
            await context.abort(_REFUSED[type(error)], str(error))
        return pb.WakeResponse()

    async def Drain(  # noqa: N802
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse]
    ) -> pb.DrainResponse:
        """Refuse new requests from now on and empty the worker."""
        handed_off, completed = await self._engine.drain(request.grace_ms / 1e3)
        return pb.DrainResponse(handed_off=handed_off, completed=completed)

    async def PullBlocks(  # noqa: N802
        self, request: pb.PullBlocksRequest, context: grpc.aio.ServicerContext[pb.PullBlocksRequest, pb.KvBlock]
    ) -> AsyncIterator[pb.KvBlock]:
        """Send blocks to another worker until it closes the stream."""
        if request.incarnation != self._identity.incarnation:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the worker that held these blocks is gone")
        try:
            async with contextlib.aclosing(self._engine.read_blocks(request)) as blocks:
                async for block in blocks:
                    yield block
        except BlocksUnavailableError as error:
            await context.abort(_CODES[error.reason], str(error))

    async def CopyBlocks(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.CopyBlocksRequest],
        context: grpc.aio.ServicerContext[pb.CopyBlocksRequest, pb.CopyBlocksResponse],
    ) -> AsyncIterator[pb.CopyBlocksResponse]:
        """Take copies of a request of another worker until that closes the stream."""
        try:
            async with contextlib.aclosing(self._engine.take_copies(request_iterator)) as answers:
                async for answer in answers:
                    yield answer
        except BlocksUnavailableError as error:
            await context.abort(_CODES[error.reason], str(error))


def _event_message(event: KvEvent) -> pb.KvEvent:
    if event.place is BlockPlace.DEVICE:
        return pb.KvEvent(stored=event.stored, removed=event.removed, cleared=event.cleared)
    return pb.KvEvent(offloaded=event.stored, dropped=event.removed, place=PLACES[event.place])


async def _beat(buffer: StreamBuffer, wanted: asyncio.Event) -> None:
    await wanted.wait()
    buffer.beat()
    while True:
        await asyncio.sleep(buffer.heartbeat_s)
        buffer.beat_if_due()


def _matters(state: pb.WorkerState, sent: pb.WorkerState) -> bool:
    """Whether `state` differs so much from the last sent state that routers need it at once."""
    same = pb.WorkerState()
    same.CopyFrom(state)
    same.seq = sent.seq
    for name in _DRIFTING:
        old = getattr(sent, name)
        if abs(getattr(state, name) - old) <= _DRIFT * old:
            setattr(same, name, old)
    return same != sent


def _heartbeat(state: pb.WorkerState) -> pb.WorkerState:
    return pb.WorkerState(worker_id=state.worker_id, incarnation=state.incarnation, seq=state.seq, unchanged=True)
