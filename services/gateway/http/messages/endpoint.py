"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from services.gateway.api.chat import ChatRequest
from services.gateway.api.decode import BodyDecoder
from services.gateway.api.ignored import Ignored
from services.gateway.asgi import Scope, header
from services.gateway.errors import ApiError, invalid
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.chat import ChatPreparer
from services.gateway.generation.request import Caller
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.http.exchange import ApiDialect, ErrorShape, Exchange
from services.gateway.http.messages.errors import error_body, error_frames
from services.gateway.http.messages.schema import (
    ClientTool,
    CountBody,
    MessagesBody,
    ThinkingAdaptive,
    ThinkingOff,
    ThinkingOn,
)
from services.gateway.http.messages.serializer import PING, MessagesSerializer, Thoughts
from services.gateway.http.messages.translation import chat_of, sampled_chat_of
from services.gateway.http.serializer import Answer
from services.gateway.ids import new_id
from services.gateway.text.codec import ServedModel

Body = TypeVar("Body", bound=CountBody)
DIALECT = ApiDialect(ErrorShape(error_body, error_frames), PING, b"request-id")
_VERSION = b"anthropic-version"  # which Anthropic's clients send with all requests
NO_THREADS = "thread_unsupported_request"  # which lets clients send conversations whole
_INLINE_BLOCKS = 500  # translated within a millisecond
MESSAGES = Documentation(
    summary="Continue a conversation, in Anthropic's form; server-sent events with `stream`",
    tag="messages",
    body=MessagesBody,
    example={"model": EXAMPLE_MODEL, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 32},
    answer={
        "id": "msg-0d6f8f2c9b1e4a57a3c1d2e4",
        "type": "message",
        "role": "assistant",
        "model": EXAMPLE_MODEL,
        "content": [{"type": "text", "text": "Blue."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 12,
            "output_tokens": 3,
            "cache_creation_input_tokens": None,
            "cache_read_input_tokens": None,
        },
    },
    parts={"A tool of `tools` of messages": ClientTool},
)
COUNT = Documentation(
    summary="Tokens of a prompt, in Anthropic's form",
    tag="messages",
    body=CountBody,
    example={"model": EXAMPLE_MODEL, "messages": [{"role": "user", "content": "Name a colour."}]},
    answer={"input_tokens": 12},
)


def is_messages_client(scope: Scope) -> bool:
    """Whether a request of a path that two protocols share, `/v1/models`, comes from a client of Anthropic's."""
    return bool(header(scope, _VERSION))


class MessagesEndpoint:
    """Chats, written as Anthropic's messages."""

    def __init__(self, chat: ChatPreparer) -> None:
        self._chat = chat
        self._decoder = BodyDecoder(MessagesBody)

    async def decode(self, data: bytes, ignored: Ignored) -> MessagesBody:
        """Validate a body."""
        try:
            return await self._decoder.decode(data, ignored)
        except ApiError as error:
            if error.param == "thread":
                error.code = NO_THREADS
            raise

    async def answer(self, body: MessagesBody, model: ServedModel, caller: Caller) -> Answer:
        """See :class:`GeneratingEndpoint`."""
        chat = await _translated(sampled_chat_of, body, model, caller.ignored)
        prompt = await self._chat.prompt(chat, model)
        room = model.max_len - len(prompt.ids)
        full = 0 < room < body.max_tokens
        if full:
            chat = replace(chat, max_tokens=room)
        prepared = await self._chat.prepare(chat, model, caller, new_id("msg"), prompt)
        return Answer(prepared, MessagesSerializer(prepared.request_id, model.name, _thoughts(body), full=full))


class CountHandler:
    """Tells the tokens of a prompt, which are what `usage.input_tokens` of its answer will be."""

    def __init__(self, chat: ChatPreparer) -> None:
        self._chat = chat
        self.decode = BodyDecoder(CountBody).decode

    async def answer(self, exchange: Exchange, body: CountBody, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        model = await request.find_model(body.model)
        exchange.model = model.name
        chat = await _translated(chat_of, body, model, request.ignored)
        prompt = await self._chat.prompt(chat, model)
        exchange.answer_headers = list(request.admission.headers)
        await exchange.send_json(200, {"input_tokens": len(prompt.ids)})


async def _translated(
    translate: Callable[[Body, Ignored], ChatRequest], body: Body, model: ServedModel, ignored: Ignored
) -> ChatRequest:
    """The chat of a body; raises :class:`ApiError` (400), for too many blocks before any is looked at."""
    for field, contents in (("system", [body.system or ""]), ("messages", [turn.content for turn in body.messages])):
        count = sum(1 if isinstance(content, str) else max(1, len(content)) for content in contents)
        if count > model.max_len:  # a block costs a token at the least
            message = f"`{field}` may hold at most {model.max_len} blocks for this model, got {count}."
            raise invalid(message, field, "invalid_value")
    return await model.off_loop(count, partial(translate, body, ignored), _INLINE_BLOCKS)


def _thoughts(body: MessagesBody) -> Thoughts:
    match body.thinking:
        case ThinkingOff():
            return Thoughts.LEFT_OUT
        case ThinkingOn(display="omitted") | ThinkingAdaptive(display="omitted"):
            return Thoughts.OMITTED
    return Thoughts.SHOWN
