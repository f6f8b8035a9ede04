"""Many requests over one bidirectional gRPC call: a message costs a third of a call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio
from ryzanstein.v1 import kv_pb2, kv_pb2_grpc, routing_pb2, routing_pb2_grpc

from services.common.batches import MAX_BATCH, Sized, batches
from services.common.silence import TICK_S, Silence
from services.common.tasks import end_tasks

# The longest wait of a request for the answer to the message before it: the answer may have to wait for a worker.
MERGE_S = 0.002


class Tagged(Sized, Protocol):
    """A message with a field `tag`: an answer has the tag of its request."""

    tag: int


RequestT = TypeVar("RequestT", bound=Tagged)
AnswerT = TypeVar("AnswerT", bound=Tagged)


class CallBrokenError(Exception):
    """The call has ended without an answer."""


class PeerSilentError(CallBrokenError):
    """The peer has sent nothing for too long, not even a heartbeat."""


class SharedCall(Generic[RequestT, AnswerT]):
    """The client's side of a shared call. Open one at first use, and a new one when it is `broken`.

    `pack` makes a message of several requests, `unpack` splits a message into answers. `cancel` makes the message that
    cancels a request whose caller has given up; without it, a late answer is ignored. A peer may send heartbeats,
    answers with the tag 0, while requests wait; the call then ends after `silent_s` without any message. Each heartbeat
    is given to `on_beat`.

    While a message is unanswered, requests gather for the next one. So a peer that falls behind gets fewer messages and
    not more, each of which costs it as much as a decision (docs/adr/009-decisions-and-lookups-share-a-call.md).
    """

    def __init__(
        self,
        open_call: Callable[[AsyncIterator[Any]], grpc.aio.StreamStreamCall[Any, Any]],
        pack: Callable[[list[RequestT]], Any],
        unpack: Callable[[Any], Sequence[AnswerT]],
        cancel: Callable[[int], RequestT] | None = None,
        silent_s: float | None = None,
        on_beat: Callable[[AnswerT], None] = lambda beat: None,
    ) -> None:
        self.broken = False
        self._pack = pack
        self._unpack = unpack
        self._cancel = cancel
        self._on_beat = on_beat
        self._tags = itertools.count(1)
        self._unsent: asyncio.Queue[RequestT | None] = asyncio.Queue()  # None ends the stream
        self._unanswered: dict[int, asyncio.Future[AnswerT]] = {}
        self._answered = asyncio.Event()  # a message has come since the last one was sent
        self._beats = self._heard = False
        self._silent = False
        self._call = open_call(self._messages())
        self._tasks = [asyncio.create_task(self._read(), name="answers")]
        if silent_s is not None:
            self._tasks.append(asyncio.create_task(self._watch(Silence(silent_s)), name="silence"))

    def ask(self, request: RequestT, timeout_s: float) -> asyncio.Future[AnswerT]:
        """Set the request's tag and send it; the future gets the answer, CallBrokenError or TimeoutError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[AnswerT] = loop.create_future()
        if self.broken:
            answer.set_exception(CallBrokenError("the call has ended"))
            return answer
        tag = request.tag = next(self._tags)
        self._unanswered[tag] = answer
        self._unsent.put_nowait(request)
        # A plain timer costs a fraction of asyncio.timeout().
        timer = loop.call_later(timeout_s, self._give_up, tag)
        answer.add_done_callback(lambda answer: self._finish(tag, answer, timer))
        return answer

    def _give_up(self, tag: int) -> None:
        answer = self._unanswered[tag]
        if not answer.done():
            answer.set_exception(TimeoutError())

    def _finish(self, tag: int, answer: asyncio.Future[AnswerT], timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        del self._unanswered[tag]
        given_up = answer.cancelled() or isinstance(answer.exception(), TimeoutError)
        if given_up and self._cancel is not None:
            self._unsent.put_nowait(self._cancel(tag))

    async def close(self) -> None:
        """End the call; waiting requests get CallBrokenError."""
        await end_tasks(self._tasks)

    async def _messages(self) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        async for requests in batches(self._unsent):
            self._answered.clear()
            yield self._pack(requests)
            if len(requests) < MAX_BATCH:
                timer = loop.call_later(MERGE_S, self._answered.set)  # a fraction of asyncio.timeout() here as well
                await self._answered.wait()
                timer.cancel()

    async def _read(self) -> None:
        reason = "the peer has ended the call"
        try:
            async for message in self._call:
                self._heard = True
                self._answered.set()
                for answer in self._unpack(message):
                    if not answer.tag:
                        self._beats = True
                        self._on_beat(answer)
                    waiting = self._unanswered.get(answer.tag)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(answer)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        finally:
            self.broken = True
            self._call.cancel()
            self._unsent.put_nowait(None)
            self._end(PeerSilentError("the peer is silent") if self._silent else CallBrokenError(reason))

    def _end(self, error: CallBrokenError) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for waiting in self._unanswered.values():
            if not waiting.done():
                waiting.set_exception(error)

    async def _watch(self, silence: Silence) -> None:
        """End the call when the peer's heartbeats stop."""
        while not self._silent:
            await asyncio.sleep(TICK_S)
            heard = self._heard or not self._beats or not self._unanswered
            self._heard = False
            self._silent = silence.too_long(asyncio.get_running_loop().time(), heard=heard)
        self._tasks[0].cancel()


Routes = SharedCall[routing_pb2.RouteFrame, routing_pb2.RouteAnswer]
Lookups = SharedCall[kv_pb2.LookupRequest, kv_pb2.LookupResponse]


def share_routes(
    router: routing_pb2_grpc.RouterAsyncStub,
    silent_s: float | None = None,
    on_beat: Callable[[routing_pb2.RouteAnswer], None] = lambda beat: None,
) -> Routes:
    """A gateway's call to a router."""
    return SharedCall(
        router.RouteMany,
        pack=lambda frames: routing_pb2.RouteFrames(frames=frames),
        unpack=lambda message: message.answers,
        cancel=lambda tag: routing_pb2.RouteFrame(tag=tag, cancel=True),
        silent_s=silent_s,
        on_beat=on_beat,
    )


def share_lookups(coordinator: kv_pb2_grpc.KvCoordinatorAsyncStub) -> Lookups:
    """A router's call to the coordinator."""
    return SharedCall(
        coordinator.Lookup,
        pack=lambda requests: kv_pb2.LookupRequests(requests=requests),
        unpack=lambda message: message.responses,
    )
