"""Makes a response in the background: runs its request, keeps its events, and ends its job."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from services.common.jobs.claim import Claim, LostClaimError
from services.common.tasks import end_tasks, wait_for_event
from services.gateway.asgi import ASGIApp, ASGIMessage
from services.gateway.errors import ApiError
from services.gateway.http.responses.kept import LostEventsError
from services.gateway.http.responses.origin import RequestOrigin, from_origin
from services.gateway.http.responses.queue import FINAL, BackgroundQueue, event_of, object_of
from services.gateway.http.responses.store import NOT_FOUND, StoredResponse
from services.gateway.ids import new_id
from services.gateway.inside import EventReader, post
from services.gateway.responses.continuing import Continuation, DivergedError, Event, is_delta, joined, place_of
from services.gateway.tenants.redis_guard import RedisAwayError

log = logging.getLogger(__name__)
T = TypeVar("T")

_AGAIN_S = 0.5  # between tries while Redis is away
_FLUSH_S = 0.2  # events of that time are written together
_PATIENCE_S = 600.0  # how long a request is retried that finds no room
_LONGEST_PAUSE_S = 30.0
_MOST_ATTEMPTS = 5  # gateways that may begin a response
_LATER = (429, 503)
_NOT_LATER = ("insufficient_quota", "budget_exceeded", "store_full")
_SHUT_DOWN = "shutting_down"
_CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt made no response."""

    status: int  # HTTP status; 0: a stream that had begun
    error: dict[str, Any]

    @property
    def code(self) -> str:
        """The error's code."""
        return str(self.error.get("code") or self.error.get("type"))

    @property
    def later(self) -> bool:
        """Whether the same request may succeed in a while."""
        return self.status in _LATER and self.code not in _NOT_LATER

    def as_error(self) -> dict[str, Any]:
        """The `error` of the failed response."""
        if not self.status:
            return self.error
        code = "rate_limit_exceeded" if self.status == 429 else "server_error"
        code = "invalid_prompt" if self.status in (400, 404) else code
        return {"code": code, "message": self.error.get("message", ""), "type": self.code}


@dataclass(frozen=True, slots=True)
class BackgroundContext:
    """The resources that all jobs of a gateway share."""

    queue: BackgroundQueue
    routes: ASGIApp  # which take stored credentials


class BackgroundRun:
    """Runs a claimed job."""

    def __init__(self, claim: Claim, context: BackgroundContext, stopping: asyncio.Event) -> None:
        """`stopping` is set when this gateway ends; another gateway then makes the response."""
        self._claim = claim
        self._queue = context.queue
        self._routes = context.routes
        self._stopping = stopping
        self._tenant = claim.tenant
        self._id = claim.job_id

    async def renew(self) -> None:
        """See :class:`ClaimedRun`."""
        await self._queue.renew(self._claim)

    async def leave(self) -> None:
        """See :class:`ClaimedRun`."""
        await self._queue.renew(self._claim, give_up=True)

    async def run(self) -> None:
        """See :class:`ClaimedRun`."""
        try:
            stored, digest = await patiently(lambda: self._queue.store.read(self._tenant, self._id))
        except ApiError as error:  # deleted, or evicted
            if error.code != NOT_FOUND:
                raise
            await self._end()
            return
        if stored.plan is None:
            await self._end()
            return
        attempts = await patiently(lambda: self._queue.begin(self._claim))
        if attempts > _MOST_ATTEMPTS:
            message = f"{_MOST_ATTEMPTS} gateways have ended while they made the response."
            await self._fail(stored, digest, {"code": "server_error", "message": message, "type": "background_lost"})
            return
        await self._make(stored, digest)

    async def _make(self, stored: StoredResponse, digest: str) -> None:
        began, pause_s = time.monotonic(), 0.5
        while not self._stopping.is_set():
            try:
                failure = await self._attempt(stored, digest)
            except DivergedError as error:
                message = f"The gateway that made the response ended, and its text cannot be continued: {error}."
                failure = Failure(0, {"code": "server_error", "message": message, "type": "background_diverged"})
            if failure is None:
                await self._end()
                return
            if failure.code == _SHUT_DOWN:
                await self._stopping.wait()
                return
            if not failure.later or time.monotonic() - began > _PATIENCE_S:
                await self._fail(stored, digest, failure.as_error())
                return
            await wait_for_event(self._stopping, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _attempt(self, stored: StoredResponse, digest: str) -> Failure | None:
        """Run the request; None when the response is kept, or was ended by its client."""
        plan = stored.plan
        assert plan is not None
        created_at = object_of(stored)["created_at"]
        more = from_origin(RequestOrigin(response_id=self._id, created_at=created_at, replaces=digest))
        headers = [
            (b"authorization", plan.credential.encode()),
            (b"x-request-id", new_id("req").encode()),
            (b"x-session-id", plan.session.encode()),
        ]
        events = await EventLog.opened(self._queue, self._claim, self._tenant, recorded=plan.stream)
        answer = _Answer(events)
        asking = asyncio.create_task(post(self._routes, "/v1/responses", headers, bytes(plan.body), answer.send, more))
        flushing = asyncio.create_task(events.flush_often())
        try:
            await asyncio.wait([asking, flushing], return_when=asyncio.FIRST_COMPLETED)
            (asking if asking.done() else flushing).result()
            failure = answer.failure()
            if failure is None or failure.code == _SHUT_DOWN:
                await events.flush()
            return None if failure is not None and failure.code == _CANCELLED else failure
        finally:
            await end_tasks([asking, flushing])

    async def _fail(self, stored: StoredResponse, digest: str, error: dict[str, Any]) -> None:
        close = self._queue.close
        response = await patiently(lambda: close(self._tenant, self._id, stored, digest, "failed", error))
        if response is not None and stored.plan and stored.plan.stream:
            events = await EventLog.opened(self._queue, self._claim, self._tenant, recorded=True)
            await events.append_final(response)
        await self._end()

    async def _end(self) -> None:
        await patiently(lambda: self._queue.end(self._claim))


class _Answer:
    """The answer of the gateway's own route, as it comes."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._reader = EventReader()
        self._status = 0
        self._body = b""
        self._last: Event = {}

    async def send(self, message: ASGIMessage) -> None:
        """ASGI."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        data = message.get("body", b"")
        if self._status != 200:
            self._body += data
            return
        for event in map(msgspec.json.decode, self._reader.read(data)):
            self._last = event
            if event["type"] not in ("response.failed", "error"):
                self._events.add(event)

    def failure(self) -> Failure | None:
        """Why there is no response; None when there is one."""
        if self._status != 200:
            return Failure(self._status, msgspec.json.decode(self._body)["error"] if self._body else {})
        kind = self._last.get("type")
        if kind == "response.failed":
            error = self._last["response"]["error"]
            return Failure(0, error | {"code": error["type"]} if error["type"] in (_SHUT_DOWN, _CANCELLED) else error)
        if kind == "error":
            return Failure(400 if self._last.get("code") == "context_length_exceeded" else 500, self._last)
        if kind not in FINAL:
            return Failure(0, {"code": "server_error", "message": "The answer was cut off.", "type": "server_error"})
        return None


class EventLog:
    """Keeps the events of a response, numbered without a gap, also across gateways."""

    def __init__(
        self, queue: BackgroundQueue, claim: Claim, tenant: str, published: list[Event], *, recorded: bool
    ) -> None:
        self._queue, self._claim, self._tenant, self._recorded = queue, claim, tenant, recorded
        self._number = len(published)
        self._continuation = Continuation(published)
        self._waiting: list[Event] = []
        self._lock = asyncio.Lock()

    @classmethod
    async def opened(cls, queue: BackgroundQueue, claim: Claim, tenant: str, *, recorded: bool) -> EventLog:
        """The log with what earlier runs have published."""
        events = await patiently(lambda: queue.store.objects.events(tenant, claim.job_id, 0)) if recorded else []
        return cls(queue, claim, tenant, [msgspec.json.decode(event) for event in events], recorded=recorded)

    def add(self, event: Event) -> None:
        """Add an event; raises DivergedError."""
        new = self._continuation.new_part(event) if self._recorded else None
        if new is None:
            return
        if self._waiting and is_delta(new) and place_of(self._waiting[-1]) == place_of(new):
            self._waiting[-1] = joined(self._waiting[-1], new)
        else:
            self._waiting.append(new)

    async def append_final(self, response: dict[str, Any]) -> None:
        """Write the last event of a response that has failed."""
        event = msgspec.json.decode(event_of(f"response.{response['status']}", response, 0))
        self._waiting.append(event)
        await self.flush()

    async def flush_often(self) -> None:
        """Write what is waiting, again and again; raises LostClaimError."""
        while True:
            await asyncio.sleep(_FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what is waiting; raises LostClaimError."""
        async with self._lock:
            events, self._waiting = self._waiting, []
            if not events:
                return
            numbered = [event | {"sequence_number": number} for number, event in enumerate(events, self._number)]
            data = [msgspec.json.encode(event) for event in numbered]
            record = self._queue.store.objects.record
            try:
                self._number = await patiently(
                    lambda: record(self._tenant, self._claim.job_id, self._claim.owner, data)
                )
            except LostEventsError as error:
                raise LostClaimError from error
            except ApiError as error:  # they are too large: clients get the end of the response without them
                log.warning("response %s: no further events are kept: %s", self._claim.job_id, error)
                self._recorded = False


async def patiently(operation: Callable[[], Awaitable[T]]) -> T:
    """The operation's result, once Redis answers; raises its other errors."""
    while True:
        with contextlib.suppress(RedisAwayError):
            try:
                return await operation()
            except ApiError as error:
                if error.code != "store_unavailable":
                    raise
        await asyncio.sleep(_AGAIN_S)
