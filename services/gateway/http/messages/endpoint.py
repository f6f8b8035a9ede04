"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.ignored import Ignored
from services.gateway.asgi import Scope, header, headers_of
from services.gateway.errors import ApiError
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.chat import ChatPreparer
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.http.exchange import ApiDialect, ErrorShape, Exchange
from services.gateway.http.messages.errors import error_body, error_frames
from services.gateway.http.messages.schema import ClientTool, CountBody, MessagesBody
from services.gateway.http.messages.serializer import PING
from services.gateway.http.messages.translation import chat_of, translated

DIALECT = ApiDialect(ErrorShape(error_body, error_frames), PING, b"request-id")
_VERSION = b"anthropic-version"  # which Anthropic's clients send with all requests
NO_THREADS = "thread_unsupported_request"  # which lets clients send conversations whole
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
    return bool(header(headers_of(scope), _VERSION))


class MessagesDecoder(BodyDecoder[MessagesBody]):
    """Decodes bodies of messages."""

    async def decode(self, data: bytes, ignored: Ignored | None = None) -> MessagesBody:
        """See :class:`BodyDecoder`."""
        try:
            return await super().decode(data, ignored)
        except ApiError as error:
            if error.param == "thread":
                error.code = NO_THREADS
            raise


class CountHandler:
    """Answers the number of tokens of a prompt, which is `usage.input_tokens` of its answer."""

    def __init__(self, chat: ChatPreparer) -> None:
        self._chat = chat
        self.decode = BodyDecoder(CountBody).decode

    async def answer(self, exchange: Exchange, body: CountBody, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        model = await request.find_model(body.model)
        exchange.model = model.name
        chat = await translated(chat_of, body, model, request.ignored)
        prompt = await self._chat.prompt(chat, model, request.ignored)
        exchange.answer_headers = request.headers()
        await exchange.send_json(200, {"input_tokens": len(prompt.ids)})
