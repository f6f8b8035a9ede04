"""One try of a request on one worker: accepts its tokens in order and says how it ended."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from enum import StrEnum

from ryzanstein.v1 import worker_pb2

from services.common.silence import Silence
from services.gateway.generation.tokens import FinishReason, TokenBatch

# Pause between a sequence's frames. It is shorter than the eye notices, and each frame costs system calls. The first
# tokens, the last tokens and tokens that arrive more slowly are sent at once.
FRAME_S = 0.005


class Cause(StrEnum):
    """Why an attempt ended before its request did."""

    CONNECT = "connect"  # nothing was submitted
    CONNECTION_LOST = "connection_lost"
    STALL = "stall"
    PROTOCOL = "protocol"  # a gap in the tokens
    DRAIN = "drain"
    RANKS_LOST = "ranks_lost"
    OVERLOAD = "overload"
    LOADING = "loading"
    FAILED = "failed"  # the engine lives, and failed on the request alone


_HANDOFFS = {
    worker_pb2.Handoff.REASON_DRAIN: Cause.DRAIN,
    worker_pb2.Handoff.REASON_RANKS_LOST: Cause.RANKS_LOST,
    worker_pb2.Handoff.REASON_OVERLOAD: Cause.OVERLOAD,
    worker_pb2.Handoff.REASON_LOADING: Cause.LOADING,
    worker_pb2.Handoff.REASON_FAILED: Cause.FAILED,
}


@dataclass(frozen=True, slots=True)
class Interruption:
    """The request must continue on another worker."""

    cause: Cause
    detail: str
    death: bool = False  # the worker, or its ranks, died while they computed it: perhaps of it

    @property
    def handoff(self) -> bool:
        """Whether the worker asked for it, which is no fault of the worker."""
        return self.cause in _HANDOFFS.values()


@dataclass(frozen=True, slots=True)
class Rejection:
    """Final: another worker would refuse in the same way."""

    error: worker_pb2.RequestError


class Late:
    """Final: the time of the whole request is over."""


End = FinishReason | Interruption | Rejection | Late


class Attempt:
    """The sink of one submit. Tokens wait here; a slow reader takes them in bigger batches.

    Invariant: a token is accepted only if its attempt is this one and its index is the next one.
    """

    __slots__ = (
        "_batch", "_deadline", "_moved", "_next_frame", "_pausing", "_silence", "_waiter", "begun", "cached_tokens",
        "computed_tokens", "end", "next_index", "number", "on_trial",
    )  # fmt: skip

    def __init__(
        self, number: int, next_index: int, *, stall_s: float, deadline: float = math.inf, on_trial: bool = False
    ) -> None:
        """`stall_s`: longest time without a move; `deadline`: event-loop time at which the request's time is over."""
        self.number = number
        self.on_trial = on_trial  # the worker computes no other suspect meanwhile
        self.begun = not on_trial  # a suspect may wait for another suspect: its worker announces its start
        self.next_index = next_index
        self.end: End | None = None
        self.cached_tokens = 0
        self.computed_tokens = 0  # tokens of prompt and earlier output that the worker last reported
        self._silence = Silence(stall_s)
        self._moved = True  # since the last look
        self._deadline = deadline
        self._batch = TokenBatch([])
        self._waiter: asyncio.Future[None] | None = None
        self._pausing = False  # `_waiter` waits for the end or the time, not for tokens
        self._next_frame = 0.0  # event-loop time

    async def take(self) -> TokenBatch:
        """Wait for tokens, and return all that have arrived; empty only after the end, whose cause is `end`."""
        loop = asyncio.get_running_loop()
        if self.end is None and not self._batch.ids:
            self._waiter = loop.create_future()
            await self._waiter
        if self.end is None and loop.time() < self._next_frame:
            await self._pause(loop)
        self._next_frame = loop.time() + FRAME_S
        batch, self._batch = self._batch, TokenBatch([])
        return batch

    async def _pause(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until the next frame may be sent, or the attempt has ended."""
        waiter = self._waiter = loop.create_future()
        timer = loop.call_at(self._next_frame, _let_go, waiter)
        self._pausing = True
        try:
            await waiter
        finally:
            self._pausing = False
            timer.cancel()

    def deliver(self, output: worker_pb2.Output) -> bool:
        """See :class:`Sink`."""
        if output.attempt != self.number or self.end is not None:
            return False
        self._moved = True
        self.begun = self.begun or output.on_trial or bool(output.ids)
        if output.ids:
            self._accept(output)
        if output.cached_tokens:
            self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs:
            self._batch.prompt_logprobs = output.prompt_logprobs
        if output.embedding:
            self._batch.embedding = output.embedding
        kind = output.WhichOneof("end")
        if kind is not None and self.end is None:
            self.end = _read_end(kind, output)
        self._wake()
        return self.end is not None

    def move_on(self, progress: worker_pb2.Progress) -> None:
        """See :class:`Sink`."""
        if progress.attempt == self.number:
            self._moved, self.computed_tokens = True, progress.computed_tokens

    def lose(self, detail: str, *, died: bool) -> None:
        """See :class:`Sink`."""
        self._interrupt(Cause.CONNECTION_LOST, detail, death=died)

    def give_up(self, now: float, *, reported: bool) -> bool:
        """See :class:`Sink`."""
        moved, self._moved = self._moved or not reported, False
        if now >= self._deadline and self.end is None:
            self.end = Late()
            self._wake()
        elif self._silence.too_long(now, heard=moved):
            far = f", with {self.computed_tokens} tokens computed" if self.computed_tokens else ""
            self._interrupt(Cause.STALL, f"nothing has moved for {self._silence.limit_s:g} s{far}")
        return self.end is not None

    def _accept(self, output: worker_pb2.Output) -> None:
        repeated = self.next_index - output.first_index
        if repeated < 0:
            self._interrupt(Cause.PROTOCOL, f"token {output.first_index} came where {self.next_index} was due")
            return
        ids, batch = output.ids[repeated:], self._batch
        batch.ids += ids
        batch.accepted_prediction += output.accepted_prediction_tokens
        batch.rejected_prediction += output.rejected_prediction_tokens
        if output.logprobs:
            batch.logprobs = [*batch.logprobs, *output.logprobs[repeated:]]
        self.next_index += len(ids)

    def _interrupt(self, cause: Cause, detail: str, *, death: bool = False) -> None:
        if self.end is None:
            self.end = Interruption(cause, detail, death)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and (self.end is not None or not self._pausing):
            _let_go(self._waiter)


def _let_go(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _read_end(kind: str, output: worker_pb2.Output) -> End:
    if kind == "finish":
        if output.finish == worker_pb2.FINISH_REASON_CANCELLED:
            return Interruption(Cause.PROTOCOL, "the worker cancelled a request unasked")
        return FinishReason.LENGTH if output.finish == worker_pb2.FINISH_REASON_LENGTH else FinishReason.STOP
    if kind == "error":
        return Rejection(output.error)
    cause = _HANDOFFS.get(output.handoff.reason, Cause.DRAIN)
    return Interruption(cause, output.handoff.detail, death=output.handoff.in_flight)
