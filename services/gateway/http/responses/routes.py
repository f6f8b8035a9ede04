"""Stored responses over REST: read, listed, deleted."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from services.gateway.errors import invalid
from services.gateway.http.identified import CallingTenant
from services.gateway.http.responses.store import ResponseStore

_MAX_ITEMS, _DEFAULT_ITEMS = 100, 20
_PAGE: dict[str, Any] = {
    "parameters": [
        {"name": "after", "in": "query", "description": "Items behind this one", "schema": {"type": "string"}},
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": _MAX_ITEMS}},
        {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
    ]
}


def add_routes(app: FastAPI, store: ResponseStore) -> None:
    """Give the app the routes of kept responses."""

    @app.get("/v1/responses/{response_id}", summary="A kept response", tags=["responses"])
    async def retrieve(response_id: str, request: Request, tenant: CallingTenant) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise invalid("`stream` is not supported for kept responses.", "stream", "unsupported_field")
        stored = await store.get(tenant.name, response_id)
        return Response(bytes(stored.response), media_type="application/json")

    @app.delete("/v1/responses/{response_id}", summary="Delete a kept response", tags=["responses"])
    async def delete(response_id: str, tenant: CallingTenant) -> dict[str, Any]:
        await store.forget(tenant.name, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get(
        "/v1/responses/{response_id}/input_items",
        summary="What a kept response was given",
        tags=["responses"],
        openapi_extra=_PAGE,
    )
    async def input_items(response_id: str, request: Request, tenant: CallingTenant) -> dict[str, Any]:
        limit, descending, after = _page(request)
        items = (await store.get(tenant.name, response_id)).items
        if descending:
            items = items[::-1]
        if after:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise invalid(f"`after` names `{after[:100]}`, which is no item of the response.", "after")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
        return {"object": "list", "data": page, **ends, "has_more": len(items) > limit}


def _page(request: Request) -> tuple[int, bool, str]:
    """Limit, whether the newest come first, and the item before; raises :class:`ApiError` (400)."""
    query = request.query_params
    limit, order = query.get("limit", str(_DEFAULT_ITEMS)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal()) or not 1 <= int(limit[:9]) <= _MAX_ITEMS:
        raise invalid(f"`limit` must be from 1 to {_MAX_ITEMS}.", "limit", "invalid_value")
    if order not in ("asc", "desc"):
        raise invalid("`order` must be asc or desc.", "order", "invalid_value")
    return int(limit[:9]), order == "desc", query.get("after", "")
