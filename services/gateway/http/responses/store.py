"""Stored responses: in Redis, each tenant's own, for a while after their last use."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.common.keys import RedisKeys
from services.gateway.errors import ApiError, invalid
from services.gateway.http.responses import scripts
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard

_ID = re.compile(r"resp_([0-9a-f]{48})")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{48})(?:in)?[0-9a-f]{4}")
_INLINE_BYTES = 64 * 1024
NOT_FOUND = "response_not_found"
MAX_CHAIN = 256  # responses of one conversation
_AT_ONCE = 32  # responses that one round trip reads


class StoredResponse(msgspec.Struct, kw_only=True):
    """A response, with what its next turn needs."""

    response: msgspec.Raw
    items: list[dict[str, Any]]  # items of this turn's input
    chain: list[str]  # ids of the responses before it, the first one first
    size: int  # bytes of the whole conversation
    session: str


class _Answer(msgspec.Struct):
    output: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Past:
    """The conversation that a kept response ends."""

    items: list[dict[str, Any]]
    chain: list[str]  # that response among them
    size: int
    session: str


NOTHING = Past([], [], 0, "")


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of kept responses: sizes, and their life."""

    life_s: float
    response_bytes: int
    tenant_bytes: int
    conversation_bytes: int


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


def _away(error: RedisAwayError) -> ApiError:
    message = "Kept responses cannot be reached at the moment; with `store` false no response needs them."
    unavailable = ApiError(503, message, "service_unavailable_error", "store", "store_unavailable", retry_after_s=2)
    unavailable.__cause__ = error
    return unavailable


class ResponseStore:
    """Keeps responses. All methods raise :class:`ApiError` 503 while Redis is away."""

    def __init__(self, guard: RedisGuard, keys: RedisKeys, limits: StoreLimits) -> None:
        self.limits = limits
        self._guard = guard
        self._keys = keys
        register = guard.client.register_script
        self._keep, self._use, self._forget = map(register, (scripts.KEEP, scripts.USE, scripts.FORGET))

    async def check(self) -> None:
        """Return when something could be kept now."""
        try:
            await self._guard.run(self._guard.client.ping)
        except RedisAwayError as error:
            raise _away(error) from error

    async def keep(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Keep a response; the tenant's least recently used ones make room. Raises 400 when it is too large."""
        data = await _off_loop(response.size, lambda: msgspec.json.encode(response))
        if len(data) > self.limits.response_bytes:
            limit = self.limits.response_bytes
            message = f"A response that is kept may have at most {limit} bytes, this one has {len(data)}."
            raise invalid(message, "store", "response_too_large")
        if await self._run(self._keep, tenant, response_id, data, str(self.limits.tenant_bytes)) < 0:
            message = "There is no room to keep a response at the moment; with `store` false none is needed."
            raise ApiError(503, message, "service_unavailable_error", "store", "store_full", retry_after_s=10)

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """A response; raises 404 when it is not kept, or not the tenant's."""
        if not _ID.fullmatch(response_id):
            raise _missing(response_id[:100])
        client, key = self._guard.client, self._keys.kept_response(tenant, response_id)
        try:
            data = await self._guard.run(lambda: client.get(key))
        except RedisAwayError as error:
            raise _away(error) from error
        if data is None:
            raise _missing(response_id)
        assert isinstance(data, bytes)  # the client does not decode
        try:
            return await _decoded(data)
        except msgspec.DecodeError as error:  # written by another version of the gateway
            raise _missing(response_id) from error

    async def forget(self, tenant: str, response_id: str) -> None:
        """Delete a response; raises 404 as :meth:`get`."""
        if not _ID.fullmatch(response_id) or not await self._run(self._forget, tenant, response_id):
            raise _missing(response_id[:100])

    async def past(self, tenant: str, response_id: str) -> Past:
        """The conversation up to a response, which lives on; raises 400 when a part of it is not kept any more."""
        (last,) = await self._turns(tenant, [response_id], response_id)
        limits = self.limits
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
        texts = await self._run(self._use, tenant, *ids) if known else []
        lost = [response_id for response_id, data in zip(ids, texts, strict=True) if not data] if known else [requested]
        if lost:
            shown, param = requested[:100], "previous_response_id"
            message = f"Previous response with id `{shown}` not found: it was never kept, has expired or was deleted."
            if lost != [requested]:
                message = f"The conversation of `{shown}` needs a response that is not kept any more, `{lost[0]}`."
            raise invalid(message, param, "previous_response_not_found")
        try:
            return [await _decoded(data) for data in texts]
        except msgspec.DecodeError as error:
            message = f"The conversation of `{requested[:100]}` was kept by another version of the gateway."
            raise invalid(message, "previous_response_id", "previous_response_not_found") from error

    async def _run(self, script: Any, tenant: str, *arguments: str | bytes) -> Any:
        keys = [self._keys.kept_index(tenant), self._keys.kept_sizes(tenant)]
        life_ms = str(max(1, int(1000 * self.limits.life_s)))
        args = [self._keys.kept_response(tenant, ""), life_ms, *arguments]
        try:
            return await self._guard.run(lambda: script(keys=keys, args=args))
        except RedisAwayError as error:
            raise _away(error) from error


async def _off_loop(size: int, work: Any) -> Any:
    """Run `work` in a thread if it would take long."""
    return work() if size < _INLINE_BYTES else await asyncio.to_thread(work)


async def _decoded(data: bytes) -> StoredResponse:
    stored: StoredResponse = await _off_loop(len(data), lambda: msgspec.json.decode(data, type=StoredResponse))
    return stored


async def _output_of(stored: StoredResponse) -> list[dict[str, Any]]:
    data = bytes(stored.response)
    answer: _Answer = await _off_loop(len(data), lambda: msgspec.json.decode(data, type=_Answer))
    return answer.output
