"""POST /v1/responses/compact: a conversation becomes a summary, which goes on as one item."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from services.gateway.api.fields import ADVISORY, neutral
from services.gateway.api.options import KeepAlive, Priority, Session
from services.gateway.generation.chat import ChatPreparer
from services.gateway.generation.choice import Choice
from services.gateway.generation.output import Generation
from services.gateway.generation.prepared import Prepared
from services.gateway.generation.request import Caller
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.http.responses.chat import chat_of
from services.gateway.http.responses.history import SUMMARIZE
from services.gateway.http.responses.output import OutputItems
from services.gateway.http.responses.schema import ConversationReference, MessageItem, ResponseId, ResponsesBody
from services.gateway.http.responses.sealing import seal
from services.gateway.http.responses.serializer import ResponseSerializer, usage_of
from services.gateway.http.responses.store import stem_of
from services.gateway.http.responses.tools import ToolOffer
from services.gateway.http.responses.turns import Turns, as_much_as_fits
from services.gateway.text.codec import ServedModel
from services.gateway.usage import Usage

_OF_RESPONSES = ("input", "instructions", "previous_response_id", "conversation", "max_output_tokens")


class CompactBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses/compact: a conversation, as in POST /v1/responses."""

    model: Annotated[str, Meta(description="A model of /v1/models; empty: the only one")]
    input: Annotated[str | list[dict[str, Any]] | None, Meta(description="Needed without a kept conversation")] = None
    instructions: str | None = None
    previous_response_id: Annotated[ResponseId, Meta(description="A kept response to go on from")] | None = None
    conversation: ResponseId | ConversationReference | None = None
    max_output_tokens: (
        Annotated[int, Meta(ge=1, description="Of the summary; default: a quarter of the context")] | None
    ) = None
    prompt_cache_key: Annotated[Session, Meta(description="Keeps requests on one worker")] | None = None
    priority: Priority | None = None
    keep_alive: KeepAlive | None = None
    service_tier: Annotated[Any, ADVISORY] = None
    prompt_cache_options: Annotated[Any, ADVISORY] = None
    prompt_cache_retention: Annotated[Any, ADVISORY] = None
    image: Annotated[Any, neutral()] = None

    @property
    def stream(self) -> bool | None:
        """It is never streamed."""
        return None

    @property
    def session(self) -> str:
        """See :class:`GeneratingBody`."""
        return self.prompt_cache_key or ""


DOCUMENTED = Documentation(
    summary="Summarize a conversation; the returned item takes its place in the next `input`",
    tag="responses",
    body=CompactBody,
    example={"model": EXAMPLE_MODEL, "input": [{"role": "user", "content": "Name a colour."}]},
    answer={
        "id": "resp_0d6f8f2c9b1e4a57a3c1d2e40d6f8f2c9b1e4a57a3c1d2e4",
        "object": "response.compaction",
        "created_at": 1767225600,
        "output": [{"id": "cmp_0d6f8f2c9b1e4a57", "type": "compaction", "encrypted_content": "rz1.Qmx1ZS4="}],
        "usage": {"input_tokens": 62, "output_tokens": 3, "total_tokens": 65},
    },
)


class CompactSerializer(ResponseSerializer):
    """Asks the model for a summary; of a conversation that is too long, the oldest turns are left out."""

    def __init__(self, chat: ChatPreparer, turns: Turns) -> None:
        self._chat = chat
        self._turns = turns

    async def prepare(self, body: CompactBody, model: ServedModel, caller: Caller) -> Prepared:  # type: ignore[override]
        """See :class:`Serializer`."""
        whole = ResponsesBody(**{name: getattr(body, name) for name in _OF_RESPONSES}, truncation="auto")
        whole.max_output_tokens = body.max_output_tokens or model.max_len // 4  # a longer one would leave no room
        turn = await self._turns.read(whole, model, caller.tenant, caller.ignored)
        ask = MessageItem(role="user", content=SUMMARIZE)
        self._offer = ToolOffer(caller.ignored)
        self._output = OutputItems(stem_of(turn.response_id), None, self._offer)
        self._id = turn.response_id

        async def attempt(start: int) -> Prepared:
            request = chat_of(whole, [*turn.items[start:], ask], self._offer)
            return await self._chat.prepare(request, model, caller, turn.response_id)

        return await as_much_as_fits(turn, attempt, Prepared.close)

    async def body(self, choices: Sequence[Choice], generations: Sequence[Generation], usage: Usage) -> dict[str, Any]:
        """See :class:`Serializer`."""
        for _ in self._output.close():
            pass
        parts = [part for item in self._output.items if item["type"] == "message" for part in item["content"]]
        summary = "".join(part["text"] for part in parts)
        item = {"id": f"cmp_{secrets.token_hex(12)}", "type": "compaction", "encrypted_content": seal(summary)}
        return {
            "id": self._id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [item],
            "usage": usage_of(usage, self._output.reasoning_tokens),
        }

    async def _keep(self, response: dict[str, Any]) -> bool:
        """See :class:`ResponseSerializer`."""
        return False
