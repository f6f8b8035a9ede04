"""Pages of lists, by the last id of the page before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from services.gateway.errors import invalid

_MAX_ITEMS, _DEFAULT_ITEMS = 100, 20
PAGE: dict[str, Any] = {
    "parameters": [
        {"name": "after", "in": "query", "description": "Items behind this one", "schema": {"type": "string"}},
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": _MAX_ITEMS}},
        {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
    ]
}


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list."""

    limit: int
    descending: bool
    after: str


def read_page(request: Request) -> Page:
    """The page that a query asks for; raises :class:`ApiError` (400)."""
    query = request.query_params
    limit, order = query.get("limit", str(_DEFAULT_ITEMS)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal()) or not 1 <= int(limit[:9]) <= _MAX_ITEMS:
        raise invalid(f"`limit` must be from 1 to {_MAX_ITEMS}.", "limit", "invalid_value")
    if order not in ("asc", "desc"):
        raise invalid("`order` must be asc or desc.", "order", "invalid_value")
    return Page(int(limit[:9]), order == "desc", query.get("after", ""))


def page_of(items: Sequence[dict[str, Any]], page: Page) -> dict[str, Any]:
    """A page of items, which are listed in the order in which they were added; raises :class:`ApiError` (400)."""
    items = items[::-1] if page.descending else items
    if page.after:
        ids = [item["id"] for item in items]
        if page.after not in ids:
            raise invalid(f"`after` names `{page.after[:100]}`, which is no item of the list.", "after")
        items = items[ids.index(page.after) + 1 :]
    data = items[: page.limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": data, **ends, "has_more": len(items) > page.limit}
