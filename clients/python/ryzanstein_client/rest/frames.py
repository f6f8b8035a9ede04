"""From the bytes of a streamed answer to chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ryzanstein_client.errors import error_of_object, unreachable
from ryzanstein_client.rest import wire
from ryzanstein_client.rest.answers import call_deltas, chat_logprobs, error_fields, reader_of, text_logprobs, usage
from ryzanstein_client.rest.sse import SseParser
from ryzanstein_client.results import Chunk, TokenLogprob, ToolCallDelta

_DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Frame:
    """One event of a stream, whatever the endpoint."""

    request_id: str
    model: str
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    usage: wire.Usage | None
    error: wire.Failure | None
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


def text_frame(data: str) -> Frame:
    """An event of /v1/completions."""
    body = _text_body(data)
    choice = body.choices[0] if body.choices else _NO_TEXT
    logprobs = text_logprobs(choice.logprobs)
    return Frame(body.id, body.model, choice.text, logprobs, choice.finish_reason, body.usage, body.error)


def chat_frame(data: str) -> Frame:
    """An event of /v1/chat/completions."""
    body = _chat_body(data)
    choice = body.choices[0] if body.choices else _NO_DELTA
    logprobs, text = chat_logprobs(choice.logprobs), choice.delta.content or ""
    calls = call_deltas(choice.delta.tool_calls)
    thought = choice.delta.reasoning_content or ""
    return Frame(body.id, body.model, text, logprobs, choice.finish_reason, body.usage, body.error, thought, calls)


_text_body = reader_of(wire.TextBody)
_chat_body = reader_of(wire.ChatFrame)
_NO_TEXT = wire.TextChoice("")
_NO_DELTA = wire.ChatDelta(wire.ChatMessage())


class FrameReader:
    """Reads the stream of a completion or a chat."""

    def __init__(self, read: Callable[[str], Frame]) -> None:
        self._read = read
        self._parser = SseParser()
        self._finish_reason: str | None = None
        self._usage: wire.Usage | None = None
        self._request_id = ""
        self._model = ""
        self._done = False

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """See :class:`ChunkReader`."""
        for event in self._parser.feed(data):
            if event == _DONE:
                self._done = True
                return
            frame = self._read(event)
            if frame.error is not None:
                raise error_of_object(error_fields(frame.error))
            self._request_id, self._model = frame.request_id, frame.model
            self._finish_reason = frame.finish_reason or self._finish_reason
            self._usage = frame.usage or self._usage
            if frame.text or frame.logprobs or frame.reasoning or frame.calls:
                yield Chunk(
                    frame.text,
                    frame.logprobs,
                    request_id=frame.request_id,
                    model=frame.model,
                    reasoning=frame.reasoning,
                    tool_calls=frame.calls,
                )

    def last(self) -> Chunk:
        """See :class:`ChunkReader`."""
        if not self._done or self._finish_reason is None:
            raise unreachable("the connection ended before the stream did")
        return Chunk(
            finish_reason=self._finish_reason,
            usage=usage(self._usage),
            request_id=self._request_id,
            model=self._model,
        )
