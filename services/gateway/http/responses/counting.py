"""POST /v1/responses/input_tokens: how long the prompt of a response would be."""

from __future__ import annotations

from typing import Annotated, Any

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.fields import ADVISORY
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.chat import ChatPreparer
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.http.exchange import Exchange
from services.gateway.http.responses.chat import chat_of
from services.gateway.http.responses.schema import PromptBody, ResponsesBody
from services.gateway.http.responses.tools import read_tools
from services.gateway.http.responses.turns import Turns, as_much_as_fits


class InputTokensBody(PromptBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses/input_tokens: what makes the prompt, as in POST /v1/responses."""

    personality: Annotated[Any, ADVISORY] = None


DOCUMENTED = Documentation(
    summary="Tokens of the prompt that a response would have; nothing is generated or kept",
    tag="responses",
    body=InputTokensBody,
    example={"model": EXAMPLE_MODEL, "input": "Name a colour."},
    answer={"object": "response.input_tokens", "input_tokens": 12},
)


class InputTokensHandler:
    """Answers the number of tokens of a prompt, which is `usage.input_tokens` of its response."""

    def __init__(self, chats: ChatPreparer, turns: Turns) -> None:
        self._chats = chats
        self._turns = turns
        self.decode = BodyDecoder(InputTokensBody).decode

    async def answer(self, exchange: Exchange, body: InputTokensBody, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        model = await request.find_model(body.model)
        exchange.model = model.name
        whole = ResponsesBody(**{name: getattr(body, name) for name in PromptBody.__struct_fields__})
        turn = await self._turns.read(whole, model, request.tenant.name, request.ignored)
        offer = read_tools(whole, turn.items, len(turn.given), request.ignored)

        async def attempt(start: int) -> int:
            chat = chat_of(whole, turn.items[start:], offer)
            return len((await self._chats.prompt(chat, model, request.ignored)).ids)

        count = await as_much_as_fits(turn, attempt, lambda _count: None)
        exchange.answer_headers = request.headers()
        await exchange.send_json(200, {"object": "response.input_tokens", "input_tokens": count})
