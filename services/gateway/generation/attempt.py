"""One try of a request on one worker: accepts its tokens in order and says how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from ryzanstein.v1 import worker_pb2

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


_HANDOFFS = {
    worker_pb2.Handoff.REASON_DRAIN: Cause.DRAIN,
    worker_pb2.Handoff.REASON_RANKS_LOST: Cause.RANKS_LOST,
    worker_pb2.Handoff.REASON_OVERLOAD: Cause.OVERLOAD,
    worker_pb2.Handoff.REASON_LOADING: Cause.LOADING,
}


@dataclass(frozen=True, slots=True)
class Interruption:
    """The request must continue on another worker."""

    cause: Cause
    detail: str
    in_flight: bool = False  # ranks were lost while they computed it

    @property
    def handoff(self) -> bool:
        """Whether the worker asked for it, which is no fault."""
        return self.cause in _HANDOFFS.values()

    @property
    def death(self) -> bool:
        """Whether the worker, or its ranks, may have died of this request."""
        return self.in_flight or self.cause in (Cause.CONNECTION_LOST, Cause.STALL)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Final: another worker would refuse in the same way."""

    error: worker_pb2.RequestError


End = FinishReason | Interruption | Rejection


class Attempt:
    """The sink of one submit. Tokens wait here; a slow reader takes them in bigger batches.

    Invariant: a token is accepted only if its attempt is this one and its index is the next one.
    """

    __slots__ = (
        "_batch", "_next_frame", "_patience_s", "_pausing", "_waiter", "begun", "cached_tokens", "deadline", "end",
        "next_index", "number", "on_trial",
    )  # fmt: skip

    def __init__(
        self, number: int, next_index: int, *, first_token_s: float, stall_s: float, on_trial: bool = False
    ) -> None:
        self.number = number
        self.on_trial = on_trial  # the worker computes no other suspect meanwhile
        self.begun = not on_trial  # a suspect may wait for another suspect: its worker announces its start
        self.next_index = next_index
        self.end: End | None = None
        self.cached_tokens = 0
        self.deadline = asyncio.get_running_loop().time() + first_token_s
        self._patience_s = stall_s
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

    def deliver(self, output: worker_pb2.Output, now: float) -> bool:
        """See :class:`Sink`."""
        if output.attempt != self.number or self.end is not None:
            return False
        self.deadline = now + self._patience_s
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

    def lose(self, detail: str) -> None:
        """See :class:`Sink`."""
        self._interrupt(Cause.CONNECTION_LOST, detail)

    def stall(self) -> None:
        """See :class:`Sink`."""
        self._interrupt(Cause.STALL, "no output in time")

    def _accept(self, output: worker_pb2.Output) -> None:
        repeated = self.next_index - output.first_index
        if repeated < 0:
            self._interrupt(Cause.PROTOCOL, f"token {output.first_index} came where {self.next_index} was due")
            return
        ids, batch = output.ids[repeated:], self._batch
        batch.ids += ids
        if output.logprobs:
            batch.logprobs = [*batch.logprobs, *output.logprobs[repeated:]]
        self.next_index += len(ids)

    def _interrupt(self, cause: Cause, detail: str) -> None:
        if self.end is None:
            self.end = Interruption(cause, detail)
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
    return Interruption(cause, output.handoff.detail, output.handoff.in_flight)
