"""Many requests over one bidirectional gRPC call: a message costs a third of what a call of its own does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, TypeVar

import grpc.aio

from services.common.tasks import end_tasks


class Tagged(Protocol):
    """A message with a field `tag`: an answer bears that of its request."""

    tag: int


RequestT = TypeVar("RequestT", bound=Tagged)
AnswerT = TypeVar("AnswerT", bound=Tagged)


class CallBrokenError(Exception):
    """The call has ended: there will be no answer."""


class SharedCall(Generic[RequestT, AnswerT]):
    """The client's side. Open one at first use and another one when it is `broken`.

    `cancel` makes the message that takes a request back whose caller has given up; without one the answer is ignored.
    """

    def __init__(
        self,
        open_call: Callable[[AsyncIterator[RequestT]], grpc.aio.StreamStreamCall[RequestT, AnswerT]],
        cancel: Callable[[int], RequestT] | None = None,
    ) -> None:
        self.broken = False
        self._cancel = cancel
        self._tags = itertools.count(1)
        self._unsent: asyncio.Queue[RequestT | None] = asyncio.Queue()  # None: nothing more
        self._unanswered: dict[int, asyncio.Future[AnswerT]] = {}
        self._call = open_call(self._requests())
        self._reader = asyncio.create_task(self._read(), name="answers")

    async def ask(self, request: RequestT) -> AnswerT:
        """The answer to a request, whose tag is set here; raises CallBrokenError."""
        if self.broken:
            raise CallBrokenError("the call has ended")
        tag = request.tag = next(self._tags)
        answer: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._unanswered[tag] = answer
        self._unsent.put_nowait(request)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._cancel is not None:
                self._unsent.put_nowait(self._cancel(tag))
            raise
        finally:
            self._unanswered.pop(tag, None)

    async def close(self) -> None:
        """End the call; who waits for an answer hears that it is broken."""
        await end_tasks([self._reader])

    async def _requests(self) -> AsyncIterator[RequestT]:
        while (request := await self._unsent.get()) is not None:
            yield request

    async def _read(self) -> None:
        reason = "the peer has ended the call"
        try:
            async for message in self._call:
                answer = self._unanswered.get(message.tag)
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        finally:
            self.broken = True
            self._call.cancel()
            self._unsent.put_nowait(None)
            for answer in self._unanswered.values():
                if not answer.done():
                    answer.set_exception(CallBrokenError(reason))
