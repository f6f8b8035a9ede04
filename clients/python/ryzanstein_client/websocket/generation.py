"""One generation of the `/v1/stream` protocol, without its connection: what to send, and what messages mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from ryzanstein_client.errors import ProtocolError, error_of_object, unreachable
from ryzanstein_client.rest import wire
from ryzanstein_client.rest.answers import error_fields, usage
from ryzanstein_client.results import Chunk

_NAME = "g"  # the protocol lets connections carry several; here each carries one
_CANCELLED = "cancelled"


class Started(Struct, tag="started"):
    """The server has begun, or found the generation again."""

    token: str
    model: str = ""


class Token(Struct, tag="token"):
    """Tokens from `index` on and the text that they add."""

    index: int
    text: str
    ids: list[int]


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


class Generation:
    """Knows how far a generation has come, so that a new connection can go on there."""

    def __init__(self, kind: Literal["chat", "completion"], request: Mapping[str, Any]) -> None:
        self._start = {"type": "start", "id": _NAME, "kind": kind, "request": request}
        self._token = ""  # the server's name for it, valid on any connection
        self._model = ""
        self._chars = 0
        # Token index at which each message began -> characters before it. A resumed stream may begin again at such a
        # place. The last entry is where the next message begins.
        self._begins = {0: 0}
        self._next_index = 0
        self.ended = False

    @property
    def resumable(self) -> bool:
        """Whether the server has told the token."""
        return bool(self._token)

    def opening(self) -> str:
        """The first message on a connection."""
        if not self._token:
            return _text(self._start)
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
        """What is new in a message: all of it, except after a resumption."""
        known_chars = self._begins.get(message.index)
        if known_chars is None:
            raise ProtocolError(f"tokens from {message.index} on came where {self._next_index} was due")
        known_ids = self._next_index - message.index
        text, ids = message.text[self._chars - known_chars :], message.ids[known_ids:]
        self._next_index += len(ids)
        self._chars += len(text)
        self._begins[self._next_index] = self._chars
        return Chunk(text, token_ids=tuple(ids), model=self._model) if text or ids else None


def _text(message: Mapping[str, Any]) -> str:
    return msgspec.json.encode(message).decode()
