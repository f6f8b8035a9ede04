"""From the items of a body to their structs, with errors that name the item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.api.decode import converted, unsupported_value
from services.gateway.api.ignored import Ignored
from services.gateway.http.responses.schema import ITEMS, Item, MessageItem, ReferenceItem


def read_items(
    value: str | Sequence[dict[str, Any]], ignored: Ignored, field: str = "input"
) -> list[Item | ReferenceItem]:
    """The items of a body; raises :class:`ApiError` (400)."""
    if isinstance(value, str):
        return [MessageItem(role="user", content=value)]
    found = []
    for index, raw in enumerate(value):
        kind, where = raw.get("type"), f"{field}[{index}]"
        kind = "message" if kind is None else kind
        struct = ITEMS.get(kind) if isinstance(kind, str) else None
        if struct is None:
            raise unsupported_value(f"{where}.type", kind, tuple(ITEMS))
        found.append(converted({**raw, "type": kind}, struct, where, ignored))
    return found
