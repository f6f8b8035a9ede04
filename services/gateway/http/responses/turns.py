"""A turn of a conversation: a body of /v1/responses, and the conversation before it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from services.gateway.api.ignored import Ignored, Unserved
from services.gateway.errors import ApiError, invalid
from services.gateway.http.responses.conversations import ConversationStore
from services.gateway.http.responses.origin import ANYWHERE, RequestOrigin
from services.gateway.http.responses.reading import check_new_parts, read_items
from services.gateway.http.responses.schema import Item, MessageItem, ReferenceItem, ResponsesBody
from services.gateway.http.responses.store import (
    NOT_FOUND,
    NOTHING,
    Past,
    ResponseStore,
    new_response_id,
    response_of_item,
    stem_of,
)
from services.gateway.images.reader import layout_of
from services.gateway.text.codec import ServedModel

Result = TypeVar("Result")
INLINE_ITEMS = 256
_MAX_REFERRED = 64  # responses; each takes a read
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


@dataclass(frozen=True, slots=True)
class ResponseTurn:
    """A body, and the conversation before it."""

    body: ResponsesBody
    response_id: str
    tenant: str
    past: Past
    given: list[Item]  # by this body
    items: list[Item]  # items of the whole conversation

    @property
    def session(self) -> str:
        """The id of its first response, by which all turns of a conversation go to one worker."""
        return self.past.session or self.response_id

    def listed(self) -> list[dict[str, Any]]:
        """The given items as they are kept and listed, each with an id."""
        stem = stem_of(self.response_id)
        return [listed_item(item, f"{stem}in{index:04x}") for index, item in enumerate(self.given)]


def listed_item(item: Item, made: str) -> dict[str, Any]:
    """An item as it is kept and listed; its id ends with `made` unless it has one."""
    raw = _as_given(item)
    if isinstance(item, MessageItem) and not isinstance(item.content, list):
        kind = "output_text" if item.role == "assistant" else "input_text"
        raw["content"] = [{"type": kind, "text": item.content or ""}]
    own = f"{_PREFIXES.get(raw['type'], 'item')}_{made}"
    return {"status": "completed", **raw, "id": raw.get("id", own)}


def _as_given(item: Item) -> dict[str, Any]:
    """An item as JSON, with the parts and fields that no model here reads."""
    raw: dict[str, Any] = _fields(item)
    for name in ("content", "output"):
        if isinstance(parts := getattr(item, name, None), list):
            raw[name] = [_fields(part) for part in parts]
    return raw


def _fields(value: msgspec.Struct) -> Any:
    whole = value.value if isinstance(value, Unserved) else msgspec.to_builtins(value)
    if not isinstance(whole, dict):
        return whole
    return {key: value for key, value in whole.items() if value is not None}


async def _read(
    items: str | list[dict[str, Any]], ignored: Ignored, *, stored: bool = False
) -> list[Item | ReferenceItem]:
    """Read, many items off the event loop."""
    if len(items) <= INLINE_ITEMS or isinstance(items, str):
        return read_items(items, ignored, stored=stored)
    return await asyncio.to_thread(read_items, items, ignored, stored=stored)


def _check_number(body: ResponsesBody, model: ServedModel) -> None:
    """Refuse more than a prompt can hold before any of it is read; raises :class:`ApiError` (400)."""
    items = body.input if isinstance(body.input, list) else []
    lists = (value for item in items for value in item.values() if isinstance(value, list))
    if len(items) > model.max_len or sum(map(len, lists)) > model.max_len:
        message = f"`input` may hold at most {model.max_len} items, and as many parts, for this model."
        raise invalid(message, "input", "invalid_value")


def not_kept_here(field: str) -> ApiError:
    """Return the error for a field that needs kept responses, on a gateway that keeps none."""
    return invalid(f"`{field}` is not supported: no responses are kept here.", field, "unsupported_field")


class Turns:
    """Reads turns."""

    def __init__(self, store: ResponseStore, conversations: ConversationStore) -> None:
        self._store = store
        self._conversations = conversations

    async def read(
        self,
        body: ResponsesBody,
        model: ServedModel,
        tenant: str,
        ignored: Ignored,
        origin: RequestOrigin = ANYWHERE,
    ) -> ResponseTurn:
        """Return a body with the conversation before it; raises :class:`ApiError`."""
        if body.input is None and body.previous_response_id is None and body.conversation is None:
            raise invalid("Missing required field `input`.", "input", "missing_field")
        _check_number(body, model)
        past = await self._past(body, tenant, origin)
        before = await _read(past.items, ignored, stored=True)
        sent = await _read(body.input or [], ignored)
        check_new_parts(sent, sees=layout_of(model) is not None)
        given = await self._resolved(tenant, sent)
        items = [*(item for item in before if not isinstance(item, ReferenceItem)), *given]
        return ResponseTurn(body, origin.response_id or new_response_id(), tenant, past, given, items)

    async def _past(self, body: ResponsesBody, tenant: str, origin: RequestOrigin) -> Past:
        """The conversation before a body; raises :class:`ApiError`."""
        previous, conversation = body.previous_response_id, body.conversation_id
        if previous and conversation:
            message = "`previous_response_id` and `conversation`: give one of them."
            raise invalid(message, "conversation", "invalid_value")
        if previous and (recent := origin.recent.get(previous)):
            return recent
        for field, value in (("previous_response_id", previous), ("conversation", conversation)):
            if value and not self._store.limits.life_s:
                raise not_kept_here(field)
        if conversation:
            return await self._conversations.past(tenant, conversation)
        return await self._store.past(tenant, previous) if previous else NOTHING

    async def _resolved(self, tenant: str, items: Sequence[Item | ReferenceItem]) -> list[Item]:
        """Return the items, with kept items in place of references; raises :class:`ApiError`."""
        known: dict[str, dict[str, Any]] = {}
        read: set[str] = set()
        resolved: list[Item] = []
        for item in items:
            if not isinstance(item, ReferenceItem):
                resolved.append(item)
                continue
            response_id = response_of_item(item.id)
            if response_id and response_id not in read:
                read.add(response_id)
                if len(read) > _MAX_REFERRED:
                    message = f"`input` may refer to items of at most {_MAX_REFERRED} responses."
                    raise invalid(message, "input", "invalid_value")
                known |= {raw["id"]: raw for raw in await self._kept_items(tenant, response_id)}
            if item.id not in known:
                message = f"`input` refers to an item `{item.id[:100]}` that is not kept."
                raise invalid(message, "input", "item_not_found")
            stored = read_items([known[item.id]], Ignored(), stored=True)
            resolved += [entry for entry in stored if not isinstance(entry, ReferenceItem)]
        return resolved

    async def _kept_items(self, tenant: str, response_id: str) -> list[dict[str, Any]]:
        try:
            return await self._store.items(tenant, response_id)
        except ApiError as error:
            if error.code != NOT_FOUND:
                raise
            return []


async def as_much_as_fits(
    turn: ResponseTurn, attempt: Callable[[int], Awaitable[Result]], discard: Callable[[Result], None]
) -> Result:
    """Return the result of `attempt` for the conversation from the earliest possible item on; raises :class:`ApiError`.

    That is the first item, or, if the body permits to drop turns, the earliest one whose prompt fits. Other results of
    `attempt` are discarded.
    """
    try:
        return await attempt(0)
    except ApiError as error:
        if error.code != "context_length_exceeded" or turn.body.truncation != "auto":
            raise
        starts = _starts(turn.items)
        if not starts:
            raise
        return await _first_that_fits(starts, attempt, discard)


def _starts(items: Sequence[Item]) -> list[int]:
    """Return the items at which a conversation may begin: user's messages, never between a call and its output."""
    users = [index for index, item in enumerate(items) if isinstance(item, MessageItem) and item.role == "user"]
    return [index for index in users if index]


async def _first_that_fits(
    starts: Sequence[int], attempt: Callable[[int], Awaitable[Result]], discard: Callable[[Result], None]
) -> Result:
    """Return the result with the fewest items dropped; raises :class:`ApiError` when even the last turn is too long."""
    low, high = 0, len(starts) - 1
    best = await attempt(starts[high])
    while low < high:
        middle = (low + high) // 2
        try:
            result = await attempt(starts[middle])
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            low = middle + 1
        else:
            discard(best)
            best, high = result, middle
    return best
