"""The WebSocket protocol of ``/v1/stream``: JSON text messages, several generations on one connection.

Client to server, distinguished by ``type``:

* ``auth``: ``{"type": "auth", "key": "..."}``, first, where the client cannot set an Authorization header (browsers).
* ``start``: ``{"type": "start", "id": "a", "kind": "chat", "request": {...}}`` where ``request`` is the body of
  ``/v1/chat/completions`` (``kind: chat``) or ``/v1/completions`` (``kind: completion``) for one sequence, without
  ``echo`` and ``prompt_logprobs``. ``id`` is the client's own name for the generation on this connection.
  ``patience`` (seconds) and ``events`` (``["waiting"]``) replace the headers ``x-ryzanstein-patience`` and
  ``x-ryzanstein-events`` of the handshake, which browsers cannot set.
* ``cancel``: ``{"type": "cancel", "id": "a"}``; answered by ``done`` with ``finish_reason: cancelled``.
* ``resume``: ``{"type": "resume", "id": "a", "token": "...", "from": 17}`` on a new connection: continue the
  generation of a lost connection at token index 17. ``token`` comes from ``started``. After a connection is lost, the
  gateway continues to generate and keeps all tokens for a while. Only the gateway process that started the generation
  can resume it: others answer ``unknown_generation``.
* ``ping``: ``{"type": "ping"}``, answered by ``pong``. The application need not answer the server's WebSocket pings.

Server to client:

* ``started``: ``{"type": "started", "id", "token", "model", "prompt_tokens"}``. It is sent again, before the first
  token, when the model has lost its last worker and the fallback model answers. ``ignored`` is there when a part of
  the request was left out; it has the value of REST's header ``x-ryzanstein-ignored``. Unknown fields of the message
  itself are named there as ``message.<field>``, and those of ``ping`` in ``pong``.
* ``token``: ``{"type": "token", "id", "index", "text", "ids"}``: tokens ``index`` to ``index + len(ids) - 1`` and the
  text they add. Tokens that are ready together share a message: a slow reader gets larger messages, never fewer
  tokens. The joined texts are the whole text; text can lag behind its ids (an unfinished character, a possible stop
  string). If requested, ``logprobs`` have the shape of the kind and accompany their text.
  ``reasoning_content`` and ``tool_calls`` are those of a chat's stream.
  With ``stream_options.include_workers``, the first message after a change of the worker has ``worker``.
* ``waiting``: ``{"type": "waiting", "id", "stage", "estimate_s"}``, about once a second while the generation waits for
  a model that starts, if its client wants such events; ``estimate_s`` is null where it is not known.
* ``done``: ``{"type": "done", "id", "finish_reason", "usage"}``, with the cost in ``usage`` if
  ``stream_options.include_cost`` is set.
* ``error``: ``{"type": "error", "id", "error": {...}}`` with OpenAI's error object; ``id`` is empty when the message
  itself could not be read. An error ends its generation, not the connection.

Indices have no gaps and never decrease, with one exception: after ``resume``, the first message may begin before
``from``, at the start of an earlier message. The client recognizes repeated tokens by their index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct, field
from msgspec.structs import replace

from services.gateway.api.decode import BodyDecoder, described, lone_surrogate
from services.gateway.api.ignored import Ignored, leave_out
from services.gateway.api.schema import SamplingBody
from services.gateway.errors import ApiError, invalid
from services.gateway.generation.logprobs import LogprobWriter
from services.gateway.generation.output import ScoredToken
from services.gateway.generation.prepared import Prepared, Preparer
from services.gateway.generation.request import Caller
from services.gateway.text.codec import ServedModel
from services.gateway.usage import Usage, usage_json

CANCELLED = "cancelled"  # a finish reason that REST does not have

Body = TypeVar("Body", bound=SamplingBody)
GenerationName = Annotated[str, Meta(min_length=1, max_length=128)]


class Auth(Struct, tag="auth", forbid_unknown_fields=True):
    """Authenticate."""

    key: str


class Start(Struct, tag="start", forbid_unknown_fields=True):
    """Start a generation."""

    id: GenerationName
    kind: Literal["chat", "completion"]
    request: Raw
    patience: float | None = None
    events: list[str] | None = None


class Cancel(Struct, tag="cancel", forbid_unknown_fields=True):
    """Cancel a generation."""

    id: GenerationName


class Resume(Struct, tag="resume", forbid_unknown_fields=True):
    """Resume a generation of a lost connection."""

    id: GenerationName
    token: str
    first: Annotated[int, Meta(ge=0)] = field(name="from", default=0)


class Ping(Struct, tag="ping", forbid_unknown_fields=True):
    """Check the connection."""


ClientMessage = Auth | Start | Cancel | Resume | Ping
_decoder = msgspec.json.Decoder(ClientMessage)


def read(data: bytes | str, ignored: Ignored) -> ClientMessage:
    """Decode a client's message without what `ignored` collects; raises :class:`ApiError`."""
    try:
        return _known(data, ignored)
    except msgspec.ValidationError as error:
        text, path = described(error, ClientMessage)
        raise invalid(f"The message cannot be read: {text}.", path or None, "invalid_message") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        other = invalid(f"The message cannot be read: {error}", code="invalid_message")
        raise lone_surrogate(data) or other from error


def _known(data: bytes | str, ignored: Ignored) -> ClientMessage:
    """Decode, without unknown fields; only messages that have some are read twice."""
    try:
        message: ClientMessage = _decoder.decode(data)
    except msgspec.ValidationError:
        known = leave_out(msgspec.json.decode(data), ClientMessage, ignored, "message")
        message = _decoder.decode(msgspec.json.encode(known))
    return message


def _check_body(body: SamplingBody) -> None:
    """Refuse fields whose results these messages cannot carry; raises :class:`ApiError` (400)."""
    options = body.stream_options
    for name, given in (
        ("echo", getattr(body, "echo", None)),
        ("prompt_logprobs", getattr(body, "prompt_logprobs", None) is not None),
        ("stream_options.continuous_usage_stats", options is not None and options.continuous_usage_stats),
    ):
        if given:
            raise invalid(f"`{name}` is not supported on a WebSocket.", name, "unsupported_field")


WriteLogprobs = Callable[[LogprobWriter, Sequence[ScoredToken]], dict[str, Any]]


class SingleSequence(Generic[Body]):
    """A kind of generation: the type of its body, its single sequence, and the shape of its logprobs."""

    def __init__(self, body: type[Body], preparer: Preparer[Body], write_logprobs: WriteLogprobs) -> None:
        self._decoder = BodyDecoder(body)
        self._preparer = preparer
        self._write_logprobs = write_logprobs

    async def decode(self, data: bytes, ignored: Ignored) -> Body:
        """Validate a body without what `ignored` collects; raises :class:`ApiError` (400)."""
        body = await self._decoder.decode(data, ignored)
        _check_body(body)
        return body

    async def prepare(self, body: Body, model: ServedModel, caller: Caller) -> Prepared:
        """See :class:`Preparer`."""
        prepared = await self._preparer.prepare(body, model, caller)
        if len(prepared.generations) != 1:
            raise invalid("A generation is one sequence: one prompt, and `n` of 1.", "n", "invalid_value")
        options = body.stream_options
        return replace(prepared, include_cost=options is not None and options.include_cost is True)

    def logprobs(self, prepared: Prepared, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """The logprobs of tokens, in REST's shape for this kind."""
        writer = LogprobWriter(prepared.model, prepared.generations[0].request.options.logprobs or 0)
        return self._write_logprobs(writer, tokens)


def failure(name: str, error: ApiError) -> dict[str, object]:
    """An error message."""
    return {"type": "error", "id": name, **error.body()}


def cancelled(name: str) -> dict[str, object]:
    """The `done` message of a generation that was cancelled before it began."""
    return {"type": "done", "id": name, "finish_reason": CANCELLED, "usage": usage_json(Usage())}
