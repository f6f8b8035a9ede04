"""Stored responses: in Redis, each tenant's own, for a while after their last use."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.errors import ApiError, invalid
from services.gateway.http.responses.kept import KeptObjects, StoreLimits, digest_of, off_loop

_ID = re.compile(r"resp_([0-9a-f]{48})")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{48})(?:in)?[0-9a-f]{4}")
NOT_FOUND = "response_not_found"
OPEN = ("queued", "in_progress")  # statuses of a response that runs in the background
MAX_CHAIN = 256  # responses of one conversation
_AT_ONCE = 32  # responses that one round trip reads


class BackgroundPlan(msgspec.Struct, kw_only=True):
    """How a response is made in the background."""

    body: msgspec.Raw  # body for POST /v1/responses
    credential: str
    session: str
    stream: bool  # events are kept


class StoredResponse(msgspec.Struct, kw_only=True):
    """A response, with what its next turn needs."""

    response: msgspec.Raw
    items: list[dict[str, Any]]  # items of this turn's input
    chain: list[str]  # ids of the responses before it, the first one first
    size: int  # bytes of the whole conversation
    session: str
    conversation: str = ""  # the conversation that it belongs to
    plan: BackgroundPlan | None = None  # None: the response is over


class _Answer(msgspec.Struct):
    output: list[dict[str, Any]]


class _Listed(msgspec.Struct):
    id: str
    created_at: int
    status: str
    model: str


@dataclass(frozen=True, slots=True)
class Past:
    """The conversation that a kept response ends."""

    items: list[dict[str, Any]]
    chain: list[str]  # that response among them
    size: int
    session: str
    conversation: str = ""  # id of the conversation that has the items
    stored: bool = True  # in Redis; false: a connection alone remembers it


NOTHING = Past([], [], 0, "")


def new_response_id() -> str:
    """Return an id that cannot be guessed: without API keys, the id alone gives access to the response."""
    return f"resp_{secrets.token_hex(24)}"


def stem_of(response_id: str) -> str:
    """Return the part that the ids of a response's items share."""
    return response_id.removeprefix("resp_")


def response_of_item(item_id: str) -> str | None:
    """Return the id of an item's response; None for an id of another format."""
    match = _ITEM_ID.fullmatch(item_id)
    return match and f"resp_{match[1]}"


def _missing(response_id: str) -> ApiError:
    message = f"No response `{response_id}` is kept: it was never kept, has expired or was deleted."
    return ApiError(404, message, "invalid_request_error", "response_id", NOT_FOUND)


class ResponseStore:
    """Keeps responses. All methods raise :class:`ApiError` 503 while Redis is away."""

    def __init__(self, objects: KeptObjects) -> None:
        self.objects = objects

    @property
    def limits(self) -> StoreLimits:
        """The limits of what is kept."""
        return self.objects.limits

    async def keep(self, tenant: str, response_id: str, response: StoredResponse, replaces: str = "") -> str:
        """Keep a response; returns its digest. Raises 400 when it is too large.

        `replaces`: digest of the response that is there; raises ChangedError when that is another one.
        """
        data = await off_loop(response.size, lambda: msgspec.json.encode(response))
        if len(data) > self.limits.response_bytes:
            limit = self.limits.response_bytes
            message = f"A response that is kept may have at most {limit} bytes, this one has {len(data)}."
            raise invalid(message, "store", "response_too_large")
        await self.objects.keep(tenant, response_id, data, replaces)
        return digest_of(data)

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """A response; raises 404 when it is not kept, or not the tenant's."""
        return (await self.read(tenant, response_id))[0]

    async def read(self, tenant: str, response_id: str) -> tuple[StoredResponse, str]:
        """A response and its digest; raises 404 as :meth:`get`."""
        data = await self.objects.get(tenant, response_id) if _ID.fullmatch(response_id) else None
        if data is None:
            raise _missing(response_id[:100])
        try:
            return await _decoded(data), digest_of(data)
        except msgspec.DecodeError as error:  # written by another version of the gateway
            raise _missing(response_id) from error

    async def forget(self, tenant: str, response_id: str) -> None:
        """Delete a response; raises 404 as :meth:`get`."""
        if not _ID.fullmatch(response_id) or not await self.objects.forget(tenant, response_id):
            raise _missing(response_id[:100])

    async def listed(self, tenant: str, after: str, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """Id, time, status and model of responses, last used first, behind `after`; and whether there are more."""
        return await self.objects.listed(tenant, "resp_", after, limit, _brief)

    async def past(self, tenant: str, response_id: str) -> Past:
        """The conversation up to a response, which lives on; raises 400 when a part of it is not kept any more."""
        (last,) = await self._turns(tenant, [response_id], response_id)
        limits = self.limits
        if last.conversation:
            message = f"`{response_id}` belongs to a conversation: name that as `conversation` (`{last.conversation}`)."
            raise invalid(message, "previous_response_id", "response_in_conversation")
        if len(last.chain) + 1 >= MAX_CHAIN:
            message = f"A conversation may have at most {MAX_CHAIN} responses; send its items as `input` instead."
            raise invalid(message, "previous_response_id", "conversation_too_long")
        if last.size > limits.conversation_bytes:
            message = f"A conversation may have at most {limits.conversation_bytes} bytes, this one has {last.size}."
            raise invalid(message, "previous_response_id", "conversation_too_long")
        turns: list[StoredResponse] = []
        for start in range(0, len(last.chain), _AT_ONCE):
            turns += await self._turns(tenant, last.chain[start : start + _AT_ONCE], response_id)
        items: list[dict[str, Any]] = []
        for turn in [*turns, last]:
            items += turn.items
            items += await _output_of(turn)
        return Past(items, [*last.chain, response_id], last.size, last.session)

    async def items(self, tenant: str, response_id: str) -> list[dict[str, Any]]:
        """Return the input and output items of a response, without the turns before it; raises 404."""
        stored = await self.get(tenant, response_id)
        return [*stored.items, *await _output_of(stored)]

    async def _turns(self, tenant: str, ids: Sequence[str], requested: str) -> list[StoredResponse]:
        known = all(map(_ID.fullmatch, ids))
        texts = await self.objects.use(tenant, ids) if known else []
        present = [data for data in texts if data]
        if not known or len(present) < len(ids):
            lost = next((name for name, data in zip(ids, texts, strict=True) if not data), "") if known else requested
            shown, param = requested[:100], "previous_response_id"
            message = f"Previous response with id `{shown}` not found: it was never kept, has expired or was deleted."
            if lost != requested:
                message = f"The conversation of `{shown}` needs a response that is not kept any more, `{lost}`."
            raise invalid(message, param, "previous_response_not_found")
        try:
            turns = [await _decoded(data) for data in present]
        except msgspec.DecodeError as error:
            message = f"The conversation of `{requested[:100]}` was kept by another version of the gateway."
            raise invalid(message, "previous_response_id", "previous_response_not_found") from error
        if any(turn.plan for turn in turns):
            message = f"`{requested[:100]}` is not complete yet: poll it until it has ended."
            raise invalid(message, "previous_response_id", "previous_response_not_complete")
        return turns


async def _brief(data: bytes) -> dict[str, Any]:
    listed = msgspec.json.decode((await _decoded(data)).response, type=_Listed)
    return {"object": "response", **msgspec.to_builtins(listed)}


async def _decoded(data: bytes) -> StoredResponse:
    stored: StoredResponse = await off_loop(len(data), lambda: msgspec.json.decode(data, type=StoredResponse))
    return stored


async def _output_of(stored: StoredResponse) -> list[dict[str, Any]]:
    data = bytes(stored.response)
    answer: _Answer = await off_loop(len(data), lambda: msgspec.json.decode(data, type=_Answer))
    return answer.output
