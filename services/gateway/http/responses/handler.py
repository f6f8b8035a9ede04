"""POST /v1/responses: answered now, later in the background, or not at all where only the input is kept."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec

from services.gateway.api.decode import BodyDecoder
from services.gateway.errors import invalid
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.chat import ChatPreparer
from services.gateway.http.exchange import Exchange, UntilDisconnect
from services.gateway.http.generate import GenerateHandler
from services.gateway.http.responses.conversations import ConversationStore
from services.gateway.http.responses.endpoint import ConversationSerializer
from services.gateway.http.responses.origin import origin_of
from services.gateway.http.responses.queue import BackgroundQueue, object_of
from services.gateway.http.responses.schema import ResponsesBody
from services.gateway.http.responses.store import BackgroundPlan
from services.gateway.http.responses.turns import not_kept_here

Credential = Callable[[str], Awaitable[str]]  # the stored credential of an Authorization header


class ResponsesHandler(GenerateHandler[ResponsesBody]):
    """Serves /v1/responses."""

    def __init__(
        self,
        chats: ChatPreparer,
        queue: BackgroundQueue,
        conversations: ConversationStore,
        credential: Credential,
        heartbeat_s: float,
        *,
        background: bool,
    ) -> None:
        """`background`: whether this installation makes responses in the background."""
        super().__init__(BodyDecoder(ResponsesBody).decode, self.serializer, heartbeat_s)
        self._chats = chats
        self._queue = queue
        self._conversations = conversations
        self._credential = credential
        self._background = background

    def serializer(self, exchange: Exchange) -> ConversationSerializer:
        """A serializer that knows how its request has come, and writes the errors of its stream."""
        origin = origin_of(exchange.scope)
        serializer = ConversationSerializer(self._chats, self._queue.store, self._conversations, origin)
        exchange.errors = replace(exchange.errors, frames=serializer.failure)
        return serializer

    async def answer(self, exchange: Exchange, body: ResponsesBody, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        if body.background:
            await self._make_later(exchange, body, request)
        elif body.generate is False:
            await self._keep_input(exchange, body, request)
        else:
            await super().answer(exchange, body, request)

    async def _started(
        self, exchange: Exchange, body: ResponsesBody, request: AdmittedRequest
    ) -> ConversationSerializer:
        """A serializer whose request is checked and could run; raises :class:`ApiError`."""
        serializer = self.serializer(exchange)
        await request.start(serializer, body, exchange.header(b"x-session-id"), exchange.traceparent)
        exchange.model, exchange.answer_headers = request.model.name, request.headers()
        return serializer

    async def _keep_input(self, exchange: Exchange, body: ResponsesBody, request: AdmittedRequest) -> None:
        serializer = await self._started(exchange, body, request)
        generation = request.prepared.generations[0]
        if body.stream:
            opening = serializer.opening(0, generation)
            await exchange.start_events()
            response = await serializer.kept_input(generation)
            await exchange.send_events(opening + serializer.last(response), last=True)
        else:
            await exchange.send_json(200, await serializer.kept_input(generation))

    async def _make_later(self, exchange: Exchange, body: ResponsesBody, request: AdmittedRequest) -> None:
        if body.store is False:
            raise invalid("`background` needs a response that is kept: `store` may not be false.", "background")
        if not (self._background and self._queue.store.limits.life_s):
            raise not_kept_here("background")
        if body.generate is False:
            raise invalid("`background` and `generate` false contradict each other.", "generate")
        body.store = True
        serializer = await self._started(exchange, body, request)
        plan = BackgroundPlan(
            body=msgspec.Raw(_body_of(body)),
            credential=await self._credential(exchange.authorization),
            session=exchange.header(b"x-session-id"),
            stream=bool(body.stream),
        )
        tenant, generation = request.tenant.name, request.prepared.generations[0]
        response_id, stored = await serializer.queued(plan, generation)
        await self._queue.create(tenant, response_id, stored)
        if not body.stream:
            await exchange.send_json(200, object_of(stored))
            return
        await request.settle()  # the job is a request of its own, and may need the place
        await self._follow(exchange, tenant, response_id)

    async def _follow(self, exchange: Exchange, tenant: str, response_id: str) -> None:
        """Send the events until the client leaves, or to the last one."""
        async with UntilDisconnect(exchange):
            await exchange.start_events()
            async for frames in self._queue.follow(tenant, response_id, -1):
                exchange.answering = True
                await exchange.send_events(frames)
            await exchange.send_events(b"", last=True)


def _body_of(body: ResponsesBody) -> bytes:
    """The body for the job: it streams, and has a seed, so that another gateway writes the same answer again."""
    fields: dict[str, Any] = {name: value for name, value in msgspec.to_builtins(body).items() if value is not None}
    fields |= {"background": False, "store": True, "stream": True}
    return msgspec.json.encode({"seed": random.getrandbits(62)} | fields)
