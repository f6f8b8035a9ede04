"""/v1/conversations: items that turns share, made, read, changed and deleted."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from msgspec import Meta, Struct

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.ignored import IGNORED_HEADER, Ignored
from services.gateway.api.options import Labels
from services.gateway.asgi import ASGIMessage
from services.gateway.errors import invalid
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.http.documentation import Documentation
from services.gateway.http.exchange import BodyLimits, Exchange
from services.gateway.http.identified import CallingTenant
from services.gateway.http.responses.conversations import ConversationStore, KeptConversation, missing_item
from services.gateway.http.responses.paging import PAGE, page_of, read_page
from services.gateway.http.responses.reading import read_items
from services.gateway.http.responses.schema import ReferenceItem
from services.gateway.http.responses.turns import listed_item

PATH = "/v1/conversations"
_MAX_ITEMS = 20  # OpenAI's limit for a request
Items = Annotated[list[dict[str, Any]], Meta(description="Items as those of `input` of /v1/responses")]


class ConversationBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/conversations."""

    items: Annotated[Items, Meta(max_length=_MAX_ITEMS)] | None = None
    metadata: Labels | None = None


class _UpdateBody(Struct, kw_only=True, forbid_unknown_fields=True):
    metadata: Labels | None


class _ItemsBody(Struct, kw_only=True, forbid_unknown_fields=True):
    items: Annotated[Items, Meta(min_length=1, max_length=_MAX_ITEMS)]


DOCUMENTED = Documentation(
    summary="Begin a conversation, which `conversation` of a response names",
    tag="responses",
    body=ConversationBody,
    example={"metadata": {"topic": "colours"}},
    answer={
        "id": "conv_0d6f8f2c9b1e4a57a3c1d2e40d6f8f2c9b1e4a57a3c1d2e4",
        "object": "conversation",
        "created_at": 1767225600,
        "metadata": {"topic": "colours"},
    },
)


def _listed(raw: list[dict[str, Any]], ignored: Ignored) -> list[dict[str, Any]]:
    """Items as they are kept, each with an id; raises :class:`ApiError` (400)."""
    items = read_items(raw, ignored, "items")
    for index, item in enumerate(items):
        if isinstance(item, ReferenceItem):
            raise invalid(f"`items[{index}]` is a reference; a conversation needs the item.", f"items[{index}].type")
    return [listed_item(item, secrets.token_hex(16)) for item in items if not isinstance(item, ReferenceItem)]


class ConversationHandler:
    """POST /v1/conversations."""

    def __init__(self, conversations: ConversationStore) -> None:
        self._conversations = conversations
        self.decode = BodyDecoder(ConversationBody).decode

    async def answer(self, exchange: Exchange, body: ConversationBody, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        items = _listed(body.items or [], request.ignored)
        made = await self._conversations.create(request.tenant.name, body.metadata or {}, items)
        await exchange.send_json(200, made.described(), list(request.admission.headers))


async def _unsent(message: ASGIMessage) -> None:
    raise AssertionError(message)


def add_conversations(
    app: FastAPI, conversations: ConversationStore, limits: BodyLimits, *, refuse_fields: bool
) -> None:
    """Add all routes except the creation of a conversation; `refuse_fields`: unknown fields are 400."""
    update = BodyDecoder(_UpdateBody)
    tags: list[Any] = ["responses"]

    @app.get(PATH, summary="Your conversations, the last used one first", tags=tags)
    async def listed(request: Request, tenant: CallingTenant) -> dict[str, Any]:
        page = read_page(request)
        data, more_follow = await conversations.listed(tenant.name, page.after, page.limit)
        return {"object": "list", "data": data, "has_more": more_follow}

    @app.get(PATH + "/{conversation_id}", summary="A conversation, without its items", tags=tags)
    async def retrieve(conversation_id: str, tenant: CallingTenant) -> dict[str, Any]:
        return (await conversations.get(tenant.name, conversation_id)).described()

    @app.post(PATH + "/{conversation_id}", summary="Replace a conversation's metadata", tags=tags)
    async def change(
        conversation_id: str, request: Request, response: Response, tenant: CallingTenant
    ) -> dict[str, Any]:
        ignored = Ignored(refuse_fields)
        metadata = (await update.decode(await _body(request, limits), ignored)).metadata or {}
        _name(ignored, response)

        def edit(conversation: KeptConversation) -> None:
            conversation.metadata = metadata

        return (await conversations.change(tenant.name, conversation_id, edit)).described()

    @app.delete(PATH + "/{conversation_id}", summary="Delete a conversation with its items", tags=tags)
    async def delete(conversation_id: str, tenant: CallingTenant) -> dict[str, Any]:
        await conversations.delete(tenant.name, conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    _add_items(app, conversations, limits, refuse_fields=refuse_fields)


def _name(ignored: Ignored, response: Response) -> None:
    if ignored.names:
        response.headers[IGNORED_HEADER] = ignored.header


async def _body(request: Request, limits: BodyLimits) -> bytes:
    return await Exchange(request.scope, request.receive, _unsent).body(limits)


def _add_items(app: FastAPI, conversations: ConversationStore, limits: BodyLimits, *, refuse_fields: bool) -> None:
    more = BodyDecoder(_ItemsBody)
    tags: list[Any] = ["responses"]

    @app.get(PATH + "/{conversation_id}/items", summary="A conversation's items", tags=tags, openapi_extra=PAGE)
    async def items(conversation_id: str, request: Request, tenant: CallingTenant) -> dict[str, Any]:
        page = read_page(request)
        return page_of((await conversations.get(tenant.name, conversation_id)).items, page)

    @app.post(PATH + "/{conversation_id}/items", summary="Add items to a conversation", tags=tags)
    async def add(conversation_id: str, request: Request, response: Response, tenant: CallingTenant) -> dict[str, Any]:
        ignored = Ignored(refuse_fields)
        added = _listed((await more.decode(await _body(request, limits), ignored)).items, ignored)
        _name(ignored, response)
        await conversations.add(tenant.name, conversation_id, added)
        return {
            "object": "list", "data": added, "first_id": added[0]["id"], "last_id": added[-1]["id"], "has_more": False,
        }  # fmt: skip

    @app.get(PATH + "/{conversation_id}/items/{item_id}", summary="An item of a conversation", tags=tags)
    async def item(conversation_id: str, item_id: str, tenant: CallingTenant) -> dict[str, Any]:
        present = (await conversations.get(tenant.name, conversation_id)).items
        if (one := next((one for one in present if one["id"] == item_id), None)) is None:
            raise missing_item(item_id)
        return one

    @app.delete(PATH + "/{conversation_id}/items/{item_id}", summary="Delete an item", tags=tags)
    async def delete_item(conversation_id: str, item_id: str, tenant: CallingTenant) -> dict[str, Any]:
        def edit(conversation: KeptConversation) -> None:
            left = [one for one in conversation.items if one["id"] != item_id]
            if len(left) == len(conversation.items):
                raise missing_item(item_id)
            conversation.items = left

        return (await conversations.change(tenant.name, conversation_id, edit)).described()
