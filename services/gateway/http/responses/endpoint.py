"""POST /v1/responses: a chat, with a memory."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from msgspec.structs import replace

from services.gateway.api.ignored import Ignored
from services.gateway.errors import ApiError, invalid
from services.gateway.generation.chat import ChatPreparer
from services.gateway.generation.logprobs import LogprobWriter
from services.gateway.generation.output import Generation
from services.gateway.generation.prepared import Prepared
from services.gateway.generation.request import Caller
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.http.responses.chat import chat_of
from services.gateway.http.responses.conversations import ConversationStore
from services.gateway.http.responses.kept import ChangedError
from services.gateway.http.responses.origin import RequestOrigin
from services.gateway.http.responses.output import OutputItems
from services.gateway.http.responses.schema import (
    INCLUDABLE,
    CustomTool,
    FunctionTool,
    MessageItem,
    ReasoningConfig,
    ResponsesBody,
    TextConfig,
)
from services.gateway.http.responses.serializer import ResponseSerializer
from services.gateway.http.responses.store import BackgroundPlan, Past, ResponseStore, StoredResponse, stem_of
from services.gateway.http.responses.tools import ToolOffer, read_tools
from services.gateway.http.responses.turns import INLINE_ITEMS, ResponseTurn, Turns, as_much_as_fits, not_kept_here
from services.gateway.text.codec import ServedModel
from services.gateway.usage import Usage

DOCUMENTED = Documentation(
    summary="Answer a turn of a conversation that the gateway may keep; server-sent events with `stream`",
    tag="responses",
    body=ResponsesBody,
    example={"model": EXAMPLE_MODEL, "input": "Name a colour.", "max_output_tokens": 32},
    answer={
        "id": "resp_0d6f8f2c9b1e4a57a3c1d2e40d6f8f2c9b1e4a57a3c1d2e4",
        "object": "response",
        "created_at": 1767225600,
        "status": "completed",
        "model": EXAMPLE_MODEL,
        "output": [
            {
                "id": "msg_0d6f8f2c9b1e4a57a3c1d2e40d6f8f2c9b1e4a57a3c1d2e40000",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Blue.", "annotations": [], "logprobs": []}],
            }
        ],
        "store": True,
        "usage": {"input_tokens": 12, "output_tokens": 3, "total_tokens": 15},
    },
    parts={
        "`text` of responses": TextConfig,
        "`reasoning` of responses": ReasoningConfig,
        "A message of `input`": MessageItem,
        "A function of `tools` of responses": FunctionTool,
        "A custom tool of `tools` of responses": CustomTool,
    },
)


class ConversationSerializer(ResponseSerializer):
    """Prepares a response to a conversation that goes on from kept ones, and keeps it."""

    _turn: ResponseTurn

    def __init__(
        self, chat: ChatPreparer, store: ResponseStore, conversations: ConversationStore, origin: RequestOrigin
    ) -> None:
        self._chat = chat
        self._store = store
        self._conversations = conversations
        self._origin = origin
        self._open_names = origin.open_names

    async def prepare(self, body: ResponsesBody, model: ServedModel, caller: Caller) -> Prepared:
        """See :class:`Serializer`."""
        await self._check_store(body)
        _leave_out(body, caller.ignored)
        turns = Turns(self._store, self._conversations)
        turn = self._turn = await turns.read(body, model, caller.tenant, caller.ignored, self._origin)
        offer = read_tools(body, turn.items, len(turn.given), caller.ignored)
        if not caller.session and body.store is not False:
            caller = replace(caller, session=turn.session)
        self._with_cost = bool(body.stream_options and body.stream_options.include_cost)
        writer = self._writer(body, model)
        self._output = OutputItems(
            stem_of(turn.response_id), writer, offer, sealed=body.sealed, open_names=self._open_names
        )
        self._facts = self._facts_of(turn, model, offer)
        return await self._prepared(turn, model, caller, offer)

    async def kept_input(self, generation: Generation) -> dict[str, Any]:
        """The response without an answer, which is kept for the next turn."""
        self._read_options(generation)
        return await self._ended(Usage())

    async def queued(self, plan: BackgroundPlan, generation: Generation) -> tuple[str, StoredResponse]:
        """The id of a response that is made later, and what is kept of it."""
        self._read_options(generation)
        response = self._response("queued", None) | {"background": True, "store": True}
        listed = await self._listed()
        return self._turn.response_id, msgspec.structs.replace(self._stored(response, listed), plan=plan)

    async def _check_store(self, body: ResponsesBody) -> None:
        """Refuse now what could not be kept later; raises :class:`ApiError` 400 or 503."""
        if self._store.limits.life_s:
            if body.store:
                await self._store.objects.check()
            return
        if body.store:
            raise not_kept_here("store")

    async def _prepared(self, turn: ResponseTurn, model: ServedModel, caller: Caller, offer: ToolOffer) -> Prepared:
        """The sequences for as much of the conversation as the model takes, where the body lets turns be dropped."""

        async def attempt(start: int) -> Prepared:
            request = chat_of(turn.body, turn.items[start:], offer)
            return await self._chat.prepare(request, model, caller, turn.response_id)

        return await as_much_as_fits(turn, attempt, Prepared.close)

    @staticmethod
    def _writer(body: ResponsesBody, model: ServedModel) -> LogprobWriter | None:
        return LogprobWriter(model, body.top_logprobs or 0) if body.logprobs else None

    def _facts_of(self, turn: ResponseTurn, model: ServedModel, offer: ToolOffer) -> dict[str, Any]:
        """The response but for its answer; raises :class:`ApiError` (400)."""
        body = turn.body
        text, reasoning = body.text, body.reasoning
        form = text.format if text and text.format else None
        chosen = {"type": "text"} if form is None else _without_none(form)
        facts: dict[str, Any] = {
            "id": turn.response_id,
            "object": "response",
            "created_at": self._origin.created_at or int(time.time()),
            "status": "in_progress",
            "background": bool(self._origin.response_id),
            "completed_at": None,
            "conversation": {"id": turn.past.conversation} if turn.past.conversation else None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": model.name,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": bool(self._store.limits.life_s) and body.store is not False,
            "text": {"format": chosen, "verbosity": (text and text.verbosity) or "medium"},
            "tool_choice": body.tool_choice or "auto",
            "tools": offer.listed,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }
        try:
            msgspec.json.encode(facts)
        except RecursionError as error:
            raise invalid("The body is nested too deeply.", code="invalid_json") from error
        return facts

    async def _keep(self, response: dict[str, Any]) -> bool:
        """See :class:`ResponseSerializer`."""
        turn = self._turn
        listed = await self._listed()
        stored = self._stored(response, listed)
        if turn.past.conversation:
            added = [*listed, *response["output"]]
            await self._conversations.add(turn.tenant, turn.past.conversation, added, again=True)
        else:
            items = [*turn.past.items, *listed, *response["output"]]
            past = Past(
                items, [*stored.chain, turn.response_id], stored.size, turn.session, stored=bool(response["store"])
            )
            self._origin.recent.add(turn.response_id, past)
        if not response["store"]:
            return False
        try:
            await self._store.keep(turn.tenant, turn.response_id, stored, self._origin.replaces)
        except ApiError:
            if turn.body.store:
                raise
            return False
        except ChangedError as error:
            raise ApiError(409, "The response was cancelled or deleted.", "conflict_error", code="cancelled") from error
        return True

    async def _listed(self) -> list[dict[str, Any]]:
        turn = self._turn
        return turn.listed() if len(turn.given) <= INLINE_ITEMS else await asyncio.to_thread(turn.listed)

    def _stored(self, response: dict[str, Any], listed: list[dict[str, Any]]) -> StoredResponse:
        """The stored part of a response; it begins a conversation of its own where the turns before it are not kept."""
        turn = self._turn
        data = msgspec.Raw(msgspec.json.encode(response))
        size = turn.past.size + len(bytes(data)) + sum(len(msgspec.json.encode(item)) for item in listed)
        return StoredResponse(
            response=data,
            items=listed if turn.past.stored else [*turn.past.items, *listed],
            chain=turn.past.chain if turn.past.stored else [],
            size=size,
            session=turn.session,
            conversation=turn.past.conversation,
        )


def _leave_out(body: ResponsesBody, ignored: Ignored) -> None:
    for name in body.include or ():
        if name not in INCLUDABLE:
            ignored.add(f"include={name}")
    if body.context_management:
        ignored.add("context_management")


def _without_none(value: msgspec.Struct) -> dict[str, Any]:
    return {key: field for key, field in msgspec.to_builtins(value).items() if field is not None}
