"""Answers of `/v1/responses`, whole and as events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct

from ryzanstein_client.errors import ErrorFields, ProtocolError, error_of_object, unreachable
from ryzanstein_client.rest import wire
from ryzanstein_client.rest.answers import item_usage, reader_of, scored
from ryzanstein_client.rest.sse import SseParser
from ryzanstein_client.results import Chunk, Page, Response, ToolCall, ToolCallDelta
from ryzanstein_client.settings import Message


class _Part(Struct):
    text: str = ""
    refusal: str = ""  # in place of text, in what other models had answered
    logprobs: list[wire.ScoredText] | None = None


class _Item(Struct):
    type: str
    role: Literal["system", "developer", "user", "assistant"] = "assistant"  # messages have one
    content: str | list[_Part] | None = None  # messages and reasoning have it
    output: str | list[_Part] = ""  # result of a call
    call_id: str = ""  # calls have it and the next two
    name: str | None = None
    arguments: str = ""


class _Failure(Struct):
    message: str
    code: str = ""
    type: str | None = None  # the code that other streams' errors have


class _Incomplete(Struct):
    reason: str = ""


class _Response(Struct):
    id: str
    status: str
    output: list[_Item]
    store: bool
    model: str = ""
    usage: wire.ItemUsage | None = None
    incomplete_details: _Incomplete | None = None
    error: _Failure | None = None


class _Input(Struct):
    data: list[_Item]
    has_more: bool = False
    last_id: str = ""


class _Counted(Struct):
    input_tokens: int


class _Event(Struct):
    type: str
    delta: str = ""
    logprobs: list[wire.ScoredText] = []
    output_index: int = 0
    item: _Item | None = None
    response: _Response | None = None
    message: str = ""  # errors have it and the next two
    code: str | None = None
    param: str | None = None


def read_response(data: bytes) -> Response:
    """A response."""
    return _response_of(_response(data))


def read_count(data: bytes) -> int:
    """Tokens of a prompt."""
    return _counted(data).input_tokens


def read_input(data: bytes) -> Page[Message]:
    """The input of a response, each item a message."""
    sent = _input(data)
    return Page(tuple(map(_message_of, sent.data)), sent.last_id if sent.has_more else None)


def _message_of(item: _Item) -> Message:
    match item.type:
        case "message":
            return Message(item.role, _text(item.content))
        case "function_call":
            return Message("assistant", tool_calls=(ToolCall(item.call_id, item.name or "", item.arguments),))
        case "function_call_output":
            return Message("tool", _text(item.output), tool_call_id=item.call_id, name=item.name or "")
        case "reasoning":
            return Message("assistant", reasoning=_text(item.content))
    raise ProtocolError(f"a response was given an item of the type {item.type!r}, which this client does not know")


def _text(content: str | list[_Part] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text or part.refusal for part in content or ())


def _response_of(sent: _Response) -> Response:
    calls = (item for item in sent.output if item.type == "function_call")
    return Response(
        id=sent.id,
        text="".join(part.text for part in _parts(sent, "message")),
        status=sent.status,
        usage=item_usage(sent.usage),
        stored=sent.store,
        model=sent.model,
        reasoning="".join(part.text for part in _parts(sent, "reasoning")),
        tool_calls=tuple(ToolCall(item.call_id, item.name or "", item.arguments) for item in calls),
        incomplete_reason=sent.incomplete_details.reason if sent.incomplete_details else "",
        logprobs=scored([token for part in _parts(sent, "message") for token in part.logprobs or ()]),
    )


def _parts(sent: _Response, kind: str) -> Iterator[_Part]:
    contents = (item.content for item in sent.output if item.type == kind)
    return (part for content in contents if isinstance(content, list) for part in content)


class ResponseReader:
    """Reads the stream of a response."""

    def __init__(self) -> None:
        self._parser = SseParser()
        self._id = ""
        self._model = ""
        self._calls: dict[int, int] = {}  # index among the items -> among the calls
        self._last: Chunk | None = None

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """See :class:`ChunkReader`."""
        for sent in map(_event, self._parser.feed(data)):
            match sent.type:
                case "response.output_text.delta" if sent.delta or sent.logprobs:
                    yield self._chunk(text=sent.delta, logprobs=scored(sent.logprobs))
                case "response.reasoning_text.delta":
                    yield self._chunk(reasoning=sent.delta)
                case "response.function_call_arguments.delta":
                    yield self._call(sent.output_index, arguments=sent.delta)
                case "response.output_item.added" if sent.item is not None and sent.item.type == "function_call":
                    self._calls[sent.output_index] = len(self._calls)
                    yield self._call(sent.output_index, id=sent.item.call_id, name=sent.item.name or "")
                case "error":
                    kind = "invalid_request_error" if sent.param else ""
                    raise error_of_object(ErrorFields(sent.message, kind, sent.param, sent.code))
                case _ if sent.response is not None:
                    self._read_response(sent.response)

    def last(self) -> Chunk:
        """See :class:`ChunkReader`."""
        if self._last is None:
            raise unreachable("the connection ended before the stream did")
        return self._last

    def _read_response(self, sent: _Response) -> None:
        """The response as it begins, or as it has ended."""
        self._id, self._model = sent.id, sent.model
        if sent.error is not None:
            raise error_of_object(ErrorFields(sent.error.message, sent.error.code, code=sent.error.type))
        if sent.status in ("completed", "incomplete"):
            reason = "length" if sent.status == "incomplete" else "tool_calls" if self._calls else "stop"
            whole = _response_of(sent)
            self._last = self._chunk(finish_reason=reason, usage=whole.usage, response=whole)

    def _call(self, place: int, **piece: str) -> Chunk:
        if place not in self._calls:
            raise ProtocolError(f"arguments came for item {place}, which is no call")
        return self._chunk(tool_calls=(ToolCallDelta(self._calls[place], **piece),))

    def _chunk(self, **fields: Any) -> Chunk:
        return Chunk(**fields, request_id=self._id, model=self._model)


_response = reader_of(_Response)
_input = reader_of(_Input)
_counted = reader_of(_Counted)
_event = reader_of(_Event)
