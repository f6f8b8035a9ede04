"""Stored responses over REST: listed, read, streamed again, cancelled, deleted."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from services.gateway.errors import invalid
from services.gateway.http.identified import CallingTenant
from services.gateway.http.responses.paging import PAGE, page_of, read_page
from services.gateway.http.responses.queue import BackgroundQueue

_STREAM: dict[str, Any] = {
    "parameters": [
        {"name": "stream", "in": "query", "description": "Events of a response in the background, from the first or "
         "behind `starting_after`", "schema": {"type": "boolean"}},
        {"name": "starting_after", "in": "query", "description": "A `sequence_number`", "schema": {"type": "integer"}},
    ]
}  # fmt: skip


def add_routes(app: FastAPI, queue: BackgroundQueue) -> None:
    """Give the app the routes of kept responses."""
    store = queue.store
    tags: list[Any] = ["responses"]

    @app.get("/v1/responses", summary="Your kept responses, the last used one first", tags=tags)
    async def listed(request: Request, tenant: CallingTenant) -> dict[str, Any]:
        page = read_page(request)
        data, more = await store.listed(tenant.name, page.after, page.limit)
        return {"object": "list", "data": data, "has_more": more}

    @app.get("/v1/responses/{response_id}", summary="A kept response", tags=tags, openapi_extra=_STREAM)
    async def retrieve(response_id: str, request: Request, tenant: CallingTenant) -> Response:
        if request.query_params.get("stream", "false").lower() in ("false", "0"):
            return Response(await queue.current(tenant.name, response_id), media_type="application/json")
        after = _position(request)
        await queue.check_events(tenant.name, response_id)
        return StreamingResponse(
            queue.follow(tenant.name, response_id, after),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    @app.post("/v1/responses/{response_id}/cancel", summary="Cancel a response in the background", tags=tags)
    async def cancel(response_id: str, tenant: CallingTenant) -> Response:
        return Response(await queue.cancel(tenant.name, response_id), media_type="application/json")

    @app.delete("/v1/responses/{response_id}", summary="Delete a kept response", tags=tags)
    async def delete(response_id: str, tenant: CallingTenant) -> dict[str, Any]:
        await queue.forget(tenant.name, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get(
        "/v1/responses/{response_id}/input_items",
        summary="What a kept response was given",
        tags=tags,
        openapi_extra=PAGE,
    )
    async def input_items(response_id: str, request: Request, tenant: CallingTenant) -> dict[str, Any]:
        page = read_page(request)
        return page_of((await store.get(tenant.name, response_id)).items, page)


def _position(request: Request) -> int:
    """The number of the last event that the client has; -1: none. Raises :class:`ApiError` (400)."""
    given = request.query_params.get("starting_after", "-1")
    if given != "-1" and not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise invalid("`starting_after` must be the `sequence_number` of an event.", "starting_after")
    return int(given)
