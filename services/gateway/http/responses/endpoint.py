"""POST /v1/responses: a chat, with a memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.schema import ChatBody
from services.gateway.errors import ApiError, invalid
from services.gateway.generation.chat import ChatPreparer
from services.gateway.generation.logprobs import LogprobWriter
from services.gateway.generation.request import Caller
from services.gateway.generation.sequences import Sequences
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.http.responses.chat import chat_of, in_own_words
from services.gateway.http.responses.output import OutputItems
from services.gateway.http.responses.reading import read_items, read_tools
from services.gateway.http.responses.schema import FunctionTool, Item, MessageItem, ReferenceItem, ResponsesBody
from services.gateway.http.responses.serializer import ResponseChoice, ResponseSerializer
from services.gateway.http.responses.store import (
    NOT_FOUND,
    NOTHING,
    Past,
    ResponseStore,
    StoredResponse,
    new_response_id,
    response_of_item,
    stem_of,
)
from services.gateway.text.codec import ServedModel

_INLINE_ITEMS = 256
_MAX_REFERRED = 64  # responses: each is read for itself
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
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
)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A body, and what it goes on from."""

    body: ResponsesBody
    response_id: str
    tenant: str
    past: Past
    given: list[Item]  # by this body
    items: list[Item]  # of the whole conversation

    @property
    def session(self) -> str:
        """What keeps a conversation's turns on one worker: its first response."""
        return self.past.session or self.response_id

    def listed(self) -> list[dict[str, Any]]:
        """The given items as they are kept and listed, each with an id."""
        stem, listed = stem_of(self.response_id), []
        for index, item in enumerate(self.given):
            raw = {key: value for key, value in msgspec.to_builtins(item).items() if value is not None}
            if isinstance(item, MessageItem) and isinstance(item.content, str):
                kind = "output_text" if item.role == "assistant" else "input_text"
                raw["content"] = [{"type": kind, "text": item.content}]
            made = f"{_PREFIXES[item.type]}_{stem}in{index:04x}"
            listed.append({"status": "completed", **raw, "id": raw.get("id", made)})
        return listed


async def _read(items: str | list[dict[str, Any]]) -> list[Item | ReferenceItem]:
    """Read, many items off the event loop."""
    if len(items) <= _INLINE_ITEMS or isinstance(items, str):
        return read_items(items)
    return await asyncio.to_thread(read_items, items)


def _check_number(body: ResponsesBody, model: ServedModel) -> None:
    """Refuse more than a prompt can hold before any of it is read; raises :class:`ApiError` (400)."""
    items = body.input if isinstance(body.input, list) else []
    lists = (value for item in items for value in item.values() if isinstance(value, list))
    if len(items) > model.max_len or sum(map(len, lists)) > model.max_len:
        message = f"`input` may hold at most {model.max_len} items, and as many parts, for this model."
        raise invalid(message, "input", "invalid_value")


class ResponsesPreparer:
    """Turns bodies into sequences."""

    def __init__(self, chat: ChatPreparer, store: ResponseStore) -> None:
        self._chat = chat
        self._store = store
        self._decoder = BodyDecoder(ResponsesBody)

    async def decode(self, data: bytes) -> ResponsesBody:
        """Validate a body."""
        return await self._decoder.decode(data)

    async def prepare(self, body: ResponsesBody, model: ServedModel, caller: Caller) -> Sequences:
        """The sequences of a body; raises :class:`ApiError`."""
        await self._check_store(body)
        turn = await self._turn(body, model, caller.tenant)
        if not caller.session and body.store is not False:
            caller = replace(caller, session=turn.session)
        output = OutputItems(stem_of(turn.response_id), self._writer(body, model))
        serializer = ResponseSerializer(self._facts(turn, model), output, partial(self._keep, turn))
        sequences = await self._sequences(turn, model, caller, serializer)
        return replace(sequences, new_choice=partial(ResponseChoice, output))

    async def _check_store(self, body: ResponsesBody) -> None:
        """Refuse now what could not be kept later; raises :class:`ApiError` 400 or 503."""
        if self._store.limits.life_s:
            if body.store:
                await self._store.check()
            return
        for field, asked in (("store", body.store), ("previous_response_id", body.previous_response_id)):
            if asked:
                raise invalid(f"`{field}` is not supported: no responses are kept here.", field, "unsupported_field")

    async def _turn(self, body: ResponsesBody, model: ServedModel, tenant: str) -> _Turn:
        if body.input is None and body.previous_response_id is None:
            raise invalid("Missing required field `input`.", "input", "missing_field")
        _check_number(body, model)
        previous = body.previous_response_id
        past = await self._store.past(tenant, previous) if previous else NOTHING
        before = await _read(past.items)
        given = await self._resolved(tenant, await _read(body.input or []))
        items = [*(item for item in before if not isinstance(item, ReferenceItem)), *given]
        return _Turn(body, new_response_id(), tenant, past, given, items)

    async def _resolved(self, tenant: str, items: Sequence[Item | ReferenceItem]) -> list[Item]:
        """The items themselves where kept ones are referred to; raises :class:`ApiError`."""
        known: dict[str, dict[str, Any]] = {}
        asked: set[str] = set()
        resolved: list[Item] = []
        for item in items:
            if not isinstance(item, ReferenceItem):
                resolved.append(item)
                continue
            response_id = response_of_item(item.id)
            if response_id and response_id not in asked:
                asked.add(response_id)
                if len(asked) > _MAX_REFERRED:
                    message = f"`input` may refer to items of at most {_MAX_REFERRED} responses."
                    raise invalid(message, "input", "invalid_value")
                known |= {raw["id"]: raw for raw in await self._kept_items(tenant, response_id)}
            if item.id not in known:
                message = f"`input` refers to an item `{item.id[:100]}` that is not kept."
                raise invalid(message, "input", "item_not_found")
            resolved += [found for found in read_items([known[item.id]]) if not isinstance(found, ReferenceItem)]
        return resolved

    async def _kept_items(self, tenant: str, response_id: str) -> list[dict[str, Any]]:
        try:
            return await self._store.items(tenant, response_id)
        except ApiError as error:
            if error.code != NOT_FOUND:
                raise
            return []

    async def _sequences(
        self, turn: _Turn, model: ServedModel, caller: Caller, serializer: ResponseSerializer
    ) -> Sequences:
        """The sequences for as much of the conversation as the model takes, where the body lets turns be dropped."""
        items = turn.items

        async def attempt(start: int) -> Sequences:
            chat: ChatBody = chat_of(turn.body, items[start:])
            try:
                return await self._chat.prepare(chat, model, caller, lambda *_: serializer, turn.response_id)
            except ApiError as error:
                raise in_own_words(error) from error

        try:
            return await attempt(0)
        except ApiError as error:
            if error.code != "context_length_exceeded" or turn.body.truncation != "auto":
                raise
            starts = _starts(items)
            if not starts:
                raise
            return await _first_that_fits(starts, attempt)

    @staticmethod
    def _writer(body: ResponsesBody, model: ServedModel) -> LogprobWriter | None:
        return LogprobWriter(model, body.top_logprobs or 0) if body.logprobs else None

    def _facts(self, turn: _Turn, model: ServedModel) -> dict[str, Any]:
        """The response but for its answer; raises :class:`ApiError` (400)."""
        body = turn.body
        text, reasoning = body.text, body.reasoning
        asked = text.format if text and text.format else None
        chosen = {"type": "text"} if asked is None else _without_none(asked)
        facts: dict[str, Any] = {
            "id": turn.response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "completed_at": None,
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
            "tools": [_echoed(tool) for tool in read_tools(body)],
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

    async def _keep(self, turn: _Turn, response: dict[str, Any]) -> bool:
        """Whether the response is kept now; raises :class:`ApiError` when that was demanded and is not possible."""
        if not response["store"]:
            return False
        data = msgspec.Raw(msgspec.json.encode(response))
        listed = turn.listed() if len(turn.given) <= _INLINE_ITEMS else await asyncio.to_thread(turn.listed)
        size = turn.past.size + len(bytes(data)) + sum(len(msgspec.json.encode(item)) for item in listed)
        kept = StoredResponse(response=data, items=listed, chain=turn.past.chain, size=size, session=turn.session)
        try:
            await self._store.keep(turn.tenant, turn.response_id, kept)
        except ApiError:
            if turn.body.store:
                raise
            return False
        return True


def _without_none(value: msgspec.Struct) -> dict[str, Any]:
    return {key: found for key, found in msgspec.to_builtins(value).items() if found is not None}


def _echoed(tool: FunctionTool) -> dict[str, Any]:
    return _without_none(tool) | {"parameters": tool.parameters, "strict": bool(tool.strict)}


def _starts(items: Sequence[Item]) -> list[int]:
    """Where a conversation may begin: with a user's message, never between a call and its output."""
    users = [index for index, item in enumerate(items) if isinstance(item, MessageItem) and item.role == "user"]
    return [index for index in users if index]


async def _first_that_fits(starts: Sequence[int], attempt: Any) -> Sequences:
    """With the fewest items dropped; raises :class:`ApiError` when even the last turn is too long."""
    low, high = 0, len(starts) - 1
    best: Sequences = await attempt(starts[high])
    while low < high:
        middle = (low + high) // 2
        try:
            sequences: Sequences = await attempt(starts[middle])
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            low = middle + 1
        else:
            best.close()
            best, high = sequences, middle
    return best
