"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.fields import neutral
from services.gateway.api.ignored import Ignored
from services.gateway.api.options import MAX_TOOLS, TokenId
from services.gateway.api.schema import ChatBody, Message, Tool
from services.gateway.errors import invalid
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.chat import ChatPreparer
from services.gateway.generation.chat_body import chat_of
from services.gateway.generation.pipeline import check_prompt
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.http.exchange import Exchange
from services.gateway.text.codec import ServedModel

_OF_MESSAGES = (
    "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort", "tools",
)  # fmt: skip


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: Annotated[bool, Meta(description="Default true for a prompt, false for messages")] | None = None
    add_generation_prompt: Annotated[bool, Meta(description="Of messages, as the next four")] | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    return_token_strs: bool | None = None
    chat_template: Annotated[Any, neutral()] = None
    mm_processor_kwargs: Annotated[Any, neutral({})] = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


TOKENIZE = Documentation(
    summary="Token ids of a text or a conversation",
    tag="tokens",
    body=TokenizeBody,
    example={"model": EXAMPLE_MODEL, "prompt": "Hello"},
    answer={"count": 1, "max_model_len": 2048, "tokens": [9906], "token_strs": None},
)
DETOKENIZE = Documentation(
    summary="Text of token ids",
    tag="tokens",
    body=DetokenizeBody,
    example={"model": EXAMPLE_MODEL, "tokens": [9906]},
    answer={"prompt": "Hello"},
)


class TokenizeHandler:
    """Converts a text or messages to token ids."""

    def __init__(self, chats: ChatPreparer) -> None:
        self._chats = chats
        self.decode = BodyDecoder(TokenizeBody).decode

    async def answer(self, exchange: Exchange, body: TokenizeBody, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        model = await request.find_model(body.model)
        ids = await self._encode(body, model, request.ignored)
        answer = {"count": len(ids), "max_model_len": model.max_len, "tokens": ids, "token_strs": None}
        if body.return_token_strs:
            answer["token_strs"] = await model.off_loop(len(ids), lambda: model.spellings(ids))
        await exchange.send_json(200, answer)

    async def _encode(self, body: TokenizeBody, model: ServedModel, ignored: Ignored) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Exactly one of `prompt` and `messages` is needed.", "prompt", "invalid_value")
        if body.messages is not None:
            body_of_chat = ChatBody(messages=body.messages, **{name: getattr(body, name) for name in _OF_MESSAGES})
            chat = chat_of(body_of_chat, model.max_len, ignored)
            return (
                await self._chats.encode(chat, model, ignored, add_special_tokens=bool(body.add_special_tokens))
            ).ids
        for name in _OF_MESSAGES:
            if getattr(body, name) is not None:
                raise invalid(f"`{name}` needs `messages`.", name)
        return await model.encode(body.prompt or "", "prompt", add_special_tokens=body.add_special_tokens is not False)


class DetokenizeHandler:
    """Converts token ids to text."""

    def __init__(self) -> None:
        self.decode = BodyDecoder(DetokenizeBody).decode

    async def answer(self, exchange: Exchange, body: DetokenizeBody, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        model = await request.find_model(body.model)
        if body.tokens:
            check_prompt(model, body.tokens, "tokens")
        await exchange.send_json(200, {"prompt": await model.text_of(body.tokens, skip_special_tokens=False)})
