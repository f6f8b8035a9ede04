"""Streams of chunks, the same for every transport: they retry until the first chunk and never after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator

from ryzanstein_client.errors import ProtocolError, RyzansteinError, StreamInterrupted
from ryzanstein_client.lifetimes import AsyncClosing, Closing
from ryzanstein_client.results import Chunk, Completion, Response, TokenLogprob, ToolCall
from ryzanstein_client.retries import Call

# One try of a stream: chunks up to one with a finish reason, or a RyzansteinError. Closing it cancels the generation.
Source = Callable[[Call], Generator[Chunk, None, None]]
AsyncSource = Callable[[Call], AsyncGenerator[Chunk, None]]


class Transcript:
    """The content of a stream so far."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: Chunk | None = None
        self._reasoning: list[str] = []
        self._calls: dict[int, ToolCall] = {}

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def add(self, chunk: Chunk) -> None:
        """A chunk is about to be delivered."""
        self._texts.append(chunk.text)
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._reasoning.append(chunk.reasoning)
        for piece in chunk.tool_calls:
            call = self._calls.get(piece.index, ToolCall("", "", ""))
            joined = ToolCall(call.id or piece.id, call.name + piece.name, call.arguments + piece.arguments)
            self._calls[piece.index] = joined
        self._last = chunk

    @property
    def begun(self) -> bool:
        """Whether anything was delivered: from then on a retry would repeat it."""
        return self._last is not None

    @property
    def ended(self) -> bool:
        """Whether the last chunk has come."""
        return self._last is not None and self._last.finish_reason is not None

    def interruption(self, cause: RyzansteinError) -> StreamInterrupted:
        """The error of a stream that broke."""
        return StreamInterrupted(self.text, tuple(self._token_ids), cause)

    def completion(self) -> Completion:
        """The whole generation; raises :class:`ProtocolError` while it has not ended."""
        last = self._last
        if last is None or last.finish_reason is None or last.usage is None:
            raise ProtocolError("the stream has not ended: there is no whole completion")
        return Completion(
            text=self.text,
            finish_reason=last.finish_reason,
            usage=last.usage,
            logprobs=tuple(self._logprobs),
            token_ids=tuple(self._token_ids),
            request_id=last.request_id,
            model=last.model,
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls.values()),
        )

    def response(self) -> Response:
        """The whole response; raises :class:`ProtocolError` while it has not ended."""
        if self._last is None or self._last.response is None:
            raise ProtocolError("the stream has not ended: there is no whole response")
        return self._last.response


class Stream(Iterator[Chunk], Closing):
    """Chunks of a generation as they come. Close it (or leave its `with` block) to cancel the generation.

    The call begins with the first chunk asked for. Raises what the call raises before that chunk has come, and
    :class:`StreamInterrupted` after it.
    """

    def __init__(self, source: Source, call: Callable[[], Call]) -> None:
        self._source = source
        self._new_call = call
        self._call: Call | None = None
        self._chunks: Generator[Chunk, None, None] | None = None
        self._transcript = Transcript()
        self._closed = False

    @property
    def text(self) -> str:
        """The text so far."""
        return self._transcript.text

    def completion(self) -> Completion:
        """The whole generation, once the stream has ended."""
        return self._transcript.completion()

    def close(self) -> None:
        """Cancel what still runs."""
        self._closed = True
        if self._chunks is not None:
            self._chunks.close()

    def __next__(self) -> Chunk:
        if self._closed or self._transcript.ended:
            self.close()
            raise StopIteration
        chunk = self._first() if self._call is None else self._further(self._call)
        self._transcript.add(chunk)
        return chunk

    def _first(self) -> Chunk:
        self._call = self._new_call()
        while True:
            try:
                return self._try(self._call)
            except RyzansteinError as error:
                time.sleep(self._call.pause_after(error))

    def _try(self, call: Call) -> Chunk:
        call.remaining()
        self._chunks = self._source(call)
        return _next(self._chunks)

    def _further(self, call: Call) -> Chunk:
        assert self._chunks is not None
        try:
            call.remaining()
            return _next(self._chunks)
        except RyzansteinError as error:
            self.close()
            raise self._transcript.interruption(error) from error


class ResponseStream(Stream):
    """Chunks of a response as they come."""

    def response(self) -> Response:
        """The whole response, once the stream has ended."""
        return self._transcript.response()


def _next(chunks: Generator[Chunk, None, None]) -> Chunk:
    chunk = next(chunks, None)
    if chunk is None:
        raise ProtocolError("the stream ended without a finish reason")
    return chunk


class AsyncStream(AsyncIterator[Chunk], AsyncClosing):
    """:class:`Stream` for asyncio."""

    def __init__(self, source: AsyncSource, call: Callable[[], Call]) -> None:
        self._source = source
        self._new_call = call
        self._call: Call | None = None
        self._chunks: AsyncGenerator[Chunk, None] | None = None
        self._transcript = Transcript()
        self._closed = False

    @property
    def text(self) -> str:
        """The text so far."""
        return self._transcript.text

    def completion(self) -> Completion:
        """The whole generation, once the stream has ended."""
        return self._transcript.completion()

    async def aclose(self) -> None:
        """Cancel what still runs."""
        self._closed = True
        if self._chunks is not None:
            await self._chunks.aclose()

    async def __anext__(self) -> Chunk:
        if self._closed or self._transcript.ended:
            await self.aclose()
            raise StopAsyncIteration
        chunk = await (self._first() if self._call is None else self._further(self._call))
        self._transcript.add(chunk)
        return chunk

    async def _first(self) -> Chunk:
        self._call = self._new_call()
        while True:
            try:
                return await self._try(self._call)
            except RyzansteinError as error:
                await asyncio.sleep(self._call.pause_after(error))

    async def _try(self, call: Call) -> Chunk:
        call.remaining()
        self._chunks = self._source(call)
        return await _next_in_time(self._chunks, call)

    async def _further(self, call: Call) -> Chunk:
        assert self._chunks is not None
        try:
            return await _next_in_time(self._chunks, call)
        except RyzansteinError as error:
            await self.aclose()
            raise self._transcript.interruption(error) from error


class AsyncResponseStream(AsyncStream):
    """:class:`ResponseStream` for asyncio."""

    def response(self) -> Response:
        """The whole response, once the stream has ended."""
        return self._transcript.response()


async def _next_in_time(chunks: AsyncGenerator[Chunk, None], call: Call) -> Chunk:
    try:
        async with asyncio.timeout(call.remaining()):
            chunk = await anext(chunks, None)
    except TimeoutError as error:
        raise call.timed_out() from error
    if chunk is None:
        raise ProtocolError("the stream ended without a finish reason")
    return chunk


def collect(chunks: Iterable[Chunk]) -> Completion:
    """The whole generation of its chunks."""
    transcript = Transcript()
    for chunk in chunks:
        transcript.add(chunk)
    return transcript.completion()


async def collect_async(chunks: AsyncIterable[Chunk]) -> Completion:
    """The whole generation of its chunks."""
    transcript = Transcript()
    async for chunk in chunks:
        transcript.add(chunk)
    return transcript.completion()
