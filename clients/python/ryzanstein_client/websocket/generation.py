"""One generation of the `/v1/stream` protocol, without its connection: what to send, and what messages mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from ryzanstein_client.errors import ProtocolError, error_of_object, unreachable
from ryzanstein_client.rest import wire
from ryzanstein_client.rest.answers import (
    call_deltas,
    chat_logprobs,
    error_fields,
    reader_of,
    text_logprobs,
    usage,
)
from ryzanstein_client.results import Chunk, TokenLogprob, ToolCallDelta

_NAME = "g"  # the protocol lets connections carry several; here each carries one
_CANCELLED = "cancelled"


class Started(Struct, tag="started"):
    """The server has begun, or found the generation again."""

    token: str
    model: str = ""


class Token(Struct, tag="token"):
    """Tokens from `index` on and what they add."""

    index: int
    text: str
    ids: list[int]
    logprobs: Raw = Raw(b"null")  # in the shape of the kind
    reasoning_content: str = ""
    tool_calls: list[wire.ToolCall] | None = None


class Done(Struct, tag="done"):
    """The end."""

    finish_reason: str
    usage: wire.Usage | None = None


class Failed(Struct, tag="error"):
    """The end, too early."""

    error: wire.Failure


class Pong(Struct, tag="pong"):
    """The server is there."""


_decoder: msgspec.json.Decoder[Started | Token | Done | Failed | Pong] = msgspec.json.Decoder(
    Started | Token | Done | Failed | Pong
)
_text_logprobs = reader_of(wire.TextLogprobs | None)  # type: ignore[arg-type]  # a union is no type to mypy
_chat_logprobs = reader_of(wire.ChatLogprobs | None)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Reached:
    """How much of everything has come."""

    chars: int = 0
    thought: int = 0  # characters of reasoning
    scored: int = 0  # tokens with logprobs
    arguments: tuple[int, ...] = ()  # characters, of each call

    def after(self, chunk: Chunk) -> _Reached:
        """With what a chunk adds."""
        arguments = list(self.arguments)
        for call in chunk.tool_calls:
            arguments += [0] * (call.index + 1 - len(arguments))
            arguments[call.index] += len(call.arguments)
        return _Reached(
            self.chars + len(chunk.text),
            self.thought + len(chunk.reasoning),
            self.scored + len(chunk.logprobs),
            tuple(arguments),
        )


class Generation:
    """Knows how far a generation has come, so that a new connection can go on there."""

    def __init__(self, kind: Literal["chat", "completion"], request: Mapping[str, Any]) -> None:
        self._kind = kind
        self._start = {"type": "start", "id": _NAME, "kind": kind, "request": request}
        self._token = ""  # the server's name for it, valid on any connection
        self._model = ""
        self._reached = _Reached()
        # Token index at which a message began -> what had come before it. A resumed stream may begin again at such a
        # place; it does where the last message had text and no token.
        self._begins: dict[int, _Reached] = {}
        self._next_index = 0
        self._resumes = False  # the next message may repeat something
        self.ended = False

    @property
    def resumable(self) -> bool:
        """Whether the server has sent the token."""
        return bool(self._token)

    def opening(self) -> str:
        """The first message on a connection."""
        if not self._token:
            return _text(self._start)
        self._resumes = True
        return _text({"type": "resume", "id": _NAME, "token": self._token, "from": self._next_index})

    @staticmethod
    def cancellation() -> str:
        """The message that ends it."""
        return _text({"type": "cancel", "id": _NAME})

    def read(self, data: str | bytes) -> Chunk | None:
        """The chunk of a message, if it has one; raises the error that a message carries."""
        try:
            message = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the server's message cannot be read: {error}") from error
        match message:
            case Started(token=token, model=model):
                self._token, self._model = token, model
            case Token():
                return self._chunk(message)
            case Done(finish_reason=reason, usage=used):
                self.ended = True
                if reason == _CANCELLED:  # not by this client, which stops reading when it cancels
                    raise unreachable("the server gave the generation up")
                return Chunk(finish_reason=reason, usage=usage(used), model=self._model)
            case Failed(error=failure):
                self.ended = True
                raise error_of_object(error_fields(failure))
        return None

    def _chunk(self, message: Token) -> Chunk | None:
        """The new part of a message: all of it, except after a resumption."""
        known = self._known(message.index)
        chunk = Chunk(
            text=message.text[self._reached.chars - known.chars :],
            logprobs=self._logprobs(message)[self._reached.scored - known.scored :],
            token_ids=tuple(message.ids[self._next_index - message.index :]),
            model=self._model,
            reasoning=message.reasoning_content[self._reached.thought - known.thought :],
            tool_calls=self._new_calls(message, known),
        )
        self._next_index += len(chunk.token_ids)
        self._reached = self._reached.after(chunk)
        return None if chunk == Chunk(model=self._model) else chunk

    def _known(self, index: int) -> _Reached:
        """The content received when a message from `index` on began for the first time."""
        resumes, self._resumes = self._resumes, False
        if index == self._next_index and not resumes:
            self._begins.setdefault(index, self._reached)
            return self._reached
        known = self._begins.get(index, self._reached if index == self._next_index else None)
        if known is None:
            raise ProtocolError(f"tokens from {index} on came where {self._next_index} was due")
        return known

    def _logprobs(self, message: Token) -> tuple[TokenLogprob, ...]:
        if self._kind == "chat":
            return chat_logprobs(_chat_logprobs(bytes(message.logprobs)))
        return text_logprobs(_text_logprobs(bytes(message.logprobs)))

    def _new_calls(self, message: Token, known: _Reached) -> tuple[ToolCallDelta, ...]:
        reached = self._reached.arguments
        left = [now - then for now, then in zip_longest(reached, known.arguments, fillvalue=0)]
        new = []
        for call in call_deltas(message.tool_calls):
            if call.index >= len(reached):
                new.append(call)
                continue
            cut = min(left[call.index], len(call.arguments))
            left[call.index] -= cut
            if rest := call.arguments[cut:]:
                new.append(ToolCallDelta(call.index, arguments=rest))
        return tuple(new)


def _text(message: Mapping[str, Any]) -> str:
    return msgspec.json.encode(message).decode()
