"""POST /v1/responses/input_tokens: how long the prompt of a response would be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.fields import ADVISORY
from services.gateway.api.options import MAX_TOOLS
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.chat import ChatPreparer
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.http.exchange import Exchange
from services.gateway.http.responses.chat import chat_of
from services.gateway.http.responses.schema import (
    ConversationReference,
    ReasoningConfig,
    ResponseId,
    ResponsesBody,
    TextConfig,
)
from services.gateway.http.responses.tools import read_tools
from services.gateway.http.responses.turns import Turns, as_much_as_fits

_OF_RESPONSES = (
    "input", "model", "instructions", "previous_response_id", "conversation", "tools", "tool_choice",
    "parallel_tool_calls", "text", "reasoning", "truncation", "chat_template_kwargs",
)  # fmt: skip


class InputTokensBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses/input_tokens: what makes the prompt, as in POST /v1/responses."""

    input: Annotated[str | list[dict[str, Any]] | None, Meta(description="Needed without previous_response_id")] = None
    model: Annotated[str, Meta(description="A model of /v1/models; may be left out when there is only one")] | None = (
        None
    )
    instructions: str | None = None
    previous_response_id: Annotated[ResponseId, Meta(description="A kept response to go on from")] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Annotated[Literal["auto", "disabled"], Meta(description="auto drops the oldest turns")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables for the chat template")] | None = None
    client_metadata: Annotated[Any, ADVISORY] = None
    personality: Annotated[Any, ADVISORY] = None
    conversation: ResponseId | ConversationReference | None = None


DOCUMENTED = Documentation(
    summary="Tokens of the prompt that a response would have; nothing is generated or kept",
    tag="responses",
    body=InputTokensBody,
    example={"model": EXAMPLE_MODEL, "input": "Name a colour."},
    answer={"object": "response.input_tokens", "input_tokens": 12},
)


class InputTokensHandler:
    """Tells the tokens of a prompt, which are what `usage.input_tokens` of its response will be."""

    def __init__(self, chats: ChatPreparer, turns: Turns) -> None:
        self._chats = chats
        self._turns = turns
        self.decode = BodyDecoder(InputTokensBody).decode

    async def answer(self, exchange: Exchange, body: InputTokensBody, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        model = await request.find_model(body.model)
        exchange.model = model.name
        whole = ResponsesBody(**{name: getattr(body, name) for name in _OF_RESPONSES})
        turn = await self._turns.read(whole, model, request.tenant.name, request.ignored)
        offer = read_tools(whole, turn.items, len(turn.given), request.ignored)

        async def attempt(start: int) -> int:
            return len(
                (await self._chats.prompt(chat_of(whole, turn.items[start:], offer), model, request.ignored)).ids
            )

        count = await as_much_as_fits(turn, attempt, lambda _count: None)
        exchange.answer_headers = request.headers()
        await exchange.send_json(200, {"object": "response.input_tokens", "input_tokens": count})
