"""Responses in the background: each is kept without an answer, and a job in Redis until a gateway has made it.

    queued -> in_progress -> completed, incomplete or failed
       \\----------\\---> cancelled

The kept response has the truth: it is replaced once, by its first ending. The job only says who works on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from services.common.jobs.claim import Claim, LostClaimError
from services.common.jobs.queue import END, JobQueue
from services.common.keys import RedisKeys
from services.gateway.errors import ApiError, invalid
from services.gateway.http.responses.kept import ChangedError, away
from services.gateway.http.responses.serializer import DIALECT
from services.gateway.http.responses.store import OPEN, ResponseStore, StoredResponse
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard

# Gateways take turns among tenants; a job that ends them one after the other is not taken for ever.
_CHOICE = """
local function place(job, status) return ARGV[4] == '1' and 'fair' end
local function take(job) redis.call('HINCRBY', job, 'attempts', 1) end
"""
LEASE_S = 10.0  # a gateway that renews nothing for so long loses its jobs to another one
_MOST_OPEN = 100  # per tenant
_LOOK_S = 0.2
_LOOKS_PER_STATUS = 5  # a look at the events costs less than one at the response
_LOOKS_PER_BEAT = 75  # 15 s: a comment in a silent stream keeps proxies from ending it
_ENDED = "ended"
_TURNS = dict.fromkeys(OPEN, _ENDED)
FINAL = frozenset(f"response.{status}" for status in ("completed", "incomplete", "failed", "cancelled"))
LOST = {"code": "server_error", "message": "The response was lost: its job has expired.", "type": "background_lost"}


class _Status(msgspec.Struct):
    status: str
    background: bool = False


class _Event(msgspec.Struct):
    type: str


def event_of(kind: str, response: dict[str, Any] | msgspec.Raw, number: int) -> bytes:
    """An event that holds a whole response."""
    return msgspec.json.encode({"type": kind, "response": response, "sequence_number": number})


def object_of(stored: StoredResponse) -> dict[str, Any]:
    """A kept response as JSON."""
    value: dict[str, Any] = msgspec.json.decode(stored.response)
    return value


def frame(event: bytes) -> bytes:
    """An event as a server-sent one."""
    kind = msgspec.json.decode(event, type=_Event).type
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), event)


class BackgroundQueue:
    """The responses of all tenants that are made in the background."""

    def __init__(self, store: ResponseStore, guard: RedisGuard, keys: RedisKeys) -> None:
        self.store = store
        self.woken = asyncio.Event()  # set when a job was created
        self._keys = keys
        life_s = max(1, int(store.limits.life_s))
        self._queue = JobQueue(guard.client, keys.background_jobs, guard.run, life_s, _CHOICE)

    # --- for clients -----------------------------------------------------------------------------------------------

    async def create(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Keep a response and queue its job; raises :class:`ApiError` (400, 429, 503)."""
        assert stored.plan is not None
        await self.store.keep(tenant, response_id, stored)
        if stored.plan.stream:
            kinds = enumerate(("response.created", "response.queued"))
            events = [event_of(kind, object_of(stored), number) for number, kind in kinds]
            await self.store.objects.record(tenant, response_id, "", events)
        try:
            created = await self._queue.create(self._member(tenant, response_id), {"status": "queued"}, _MOST_OPEN)
        except RedisAwayError as error:
            raise away(error) from error
        if not created:
            await self.store.forget(tenant, response_id)
            message = f"At most {_MOST_OPEN} of your responses may be made in the background at once."
            raise ApiError(429, message, "background", code="too_many_background_responses", retry_after_s=5)
        self.woken.set()

    async def current(self, tenant: str, response_id: str) -> bytes:
        """A kept response as it is now; raises :class:`ApiError` 404 or 503."""
        stored, digest = await self.store.read(tenant, response_id)
        if stored.plan is None:
            return bytes(stored.response)
        status = await self._status(tenant, response_id)
        if status in OPEN:
            return msgspec.json.encode(object_of(stored) | {"status": status})
        # Its job has ended in the meantime, or is lost.
        await self.close(tenant, response_id, stored, digest, "failed", LOST)
        return bytes((await self.store.get(tenant, response_id)).response)

    async def cancel(self, tenant: str, response_id: str) -> bytes:
        """Cancel a response, once; returns it. Raises :class:`ApiError` 400, 404 or 503."""
        stored, digest = await self.store.read(tenant, response_id)
        if stored.plan is not None:
            await self.close(tenant, response_id, stored, digest, "cancelled", None)
            await self._end(tenant, response_id)
            stored = await self.store.get(tenant, response_id)
        state = msgspec.json.decode(stored.response, type=_Status)
        if state.status != "cancelled":
            reason = f"is {state.status}" if state.background else "was not made in the background"
            raise invalid(f"Cannot cancel the response: it {reason}.", "response_id", "response_not_cancellable")
        return bytes(stored.response)

    async def forget(self, tenant: str, response_id: str) -> None:
        """Delete a response, and end its job; raises :class:`ApiError` 404 or 503."""
        await self.store.forget(tenant, response_id)
        await self._end(tenant, response_id)

    async def follow(self, tenant: str, response_id: str, after: int) -> AsyncIterator[bytes]:
        """The events behind number `after`, as they come, to the last one; raises :class:`ApiError`."""
        position, looks = after + 1, 0  # looks without an event
        while True:
            events = await self.store.objects.events(tenant, response_id, position)
            if events:
                position, looks = position + len(events), 0
                yield b"".join(map(frame, events))
                if msgspec.json.decode(events[-1], type=_Event).type in FINAL:
                    return
                continue
            looks += 1
            # A response that has ended without a last event: its events were too large, or it was cancelled or lost.
            if looks % _LOOKS_PER_STATUS == 0 and (last := await self._last(tenant, response_id, position)):
                yield last
                return
            if looks % _LOOKS_PER_BEAT == 0:
                yield DIALECT.heartbeat
            await asyncio.sleep(_LOOK_S)

    async def check_events(self, tenant: str, response_id: str) -> None:
        """Raise :class:`ApiError` 404, or 400 for a response without kept events."""
        await self.store.get(tenant, response_id)
        if not await self.store.objects.events(tenant, response_id, 0):
            message = "Only a response that was created with `background` and `stream` can be streamed again."
            raise invalid(message, "stream", "response_not_streamable")

    async def _last(self, tenant: str, response_id: str, number: int) -> bytes:
        """The last event of a response that has ended; empty while it is open, or has events behind `number`."""
        response = await self.current(tenant, response_id)
        status = msgspec.json.decode(response, type=_Status).status
        if status in OPEN or await self.store.objects.events(tenant, response_id, number):
            return b""
        return frame(event_of(f"response.{status}", msgspec.Raw(response), number))

    # --- for gateways ----------------------------------------------------------------------------------------------

    async def claim(self, owner: str, room: bool) -> Claim | None:
        """Claim a job without an owner; raises RedisAwayError."""
        return await self._queue.claim(owner, LEASE_S, int(room))

    async def renew(self, claim: Claim, *, give_up: bool = False) -> None:
        """Renew a claim, or give it up; raises LostClaimError and RedisAwayError."""
        if await self._queue.write(claim, {}, {}, 0 if give_up else LEASE_S) == _ENDED:
            raise LostClaimError

    async def begin(self, claim: Claim) -> int:
        """Note that the owner works on it; returns how often a gateway has begun. Raises LostClaimError."""
        await self._queue.write(claim, dict.fromkeys(OPEN, "in_progress"), {})
        return int((await self._queue.fields(claim.member)).get("attempts", b"1"))

    async def end(self, claim: Claim) -> None:
        """End a job whose response is final, or gone; raises LostClaimError and RedisAwayError."""
        await self._queue.write(claim, _TURNS, {}, END)

    async def close(
        self, tenant: str, response_id: str, stored: StoredResponse, digest: str, status: str, error: Any
    ) -> dict[str, Any] | None:
        """End a response without an answer; returns it, or None when it had ended already."""
        response = object_of(stored) | {"status": status, "error": error}
        if status == "cancelled":
            response["completed_at"] = int(time.time())
        final = msgspec.structs.replace(stored, response=msgspec.Raw(msgspec.json.encode(response)), plan=None)
        try:
            await self.store.keep(tenant, response_id, final, digest)
        except ChangedError:
            return None
        return response

    async def _end(self, tenant: str, response_id: str) -> None:
        """End a job of any owner, which notices when it renews its claim."""
        try:
            await self._queue.turn(self._member(tenant, response_id), _TURNS, {}, ends=True)
        except RedisAwayError as error:
            raise away(error) from error

    async def _status(self, tenant: str, response_id: str) -> str:
        try:
            fields = await self._queue.fields(self._member(tenant, response_id))
        except RedisAwayError as error:
            raise away(error) from error
        return fields.get("status", b"").decode()

    def _member(self, tenant: str, response_id: str) -> str:
        return self._keys.member(tenant, response_id)
