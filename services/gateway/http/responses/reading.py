"""From the items of a body to their structs, with errors that name the item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.api.decode import converted, unsupported_value
from services.gateway.api.files import given_file
from services.gateway.api.ignored import Ignored, Unserved
from services.gateway.api.images import given_image
from services.gateway.api.parts import own_text, part_refusal, refusal
from services.gateway.errors import ApiError
from services.gateway.http.responses.schema import COMMANDS, ITEMS, ROLES, Item, MessageItem, ReferenceItem

_TEXT_PARTS = ("input_text", "output_text", "refusal")


def read_items(
    value: str | Sequence[dict[str, Any]], ignored: Ignored, field: str = "input", *, stored: bool = False
) -> list[Item | ReferenceItem]:
    """The items of a body; raises :class:`ApiError` (400), but for malformed ones of a history, which are left out.

    All items but the last are a history, and all of them if they were `stored`.
    """
    if isinstance(value, str):
        return [MessageItem(role="user", content=value)]
    new = len(value) - (not stored)
    return [_read_item(raw, f"{field}[{index}]", ignored, old=index < new) for index, raw in enumerate(value)]


def _read_item(raw: dict[str, Any], where: str, ignored: Ignored, *, old: bool) -> Item | ReferenceItem:
    kind = _kind(raw)
    if not isinstance(kind, str) and old:
        return Unserved("object", raw | {"type": "object"})
    if not isinstance(kind, str) or kind in COMMANDS:
        raise unsupported_value(f"{where}.type", kind, tuple(ITEMS))
    struct, typed = ITEMS.get(kind), {**raw, "type": kind}
    try:
        return converted(typed, struct, where, ignored) if struct else Unserved(kind, raw)
    except ApiError:
        if not old:
            raise
        return Unserved(kind, typed)


def _kind(raw: dict[str, Any]) -> object:
    """The type of an item; messages and references may leave it out."""
    kind = raw.get("type")
    if kind is None:
        return "item_reference" if "id" in raw and "role" not in raw else "message"
    return kind


def check_new_parts(items: Sequence[Item | ReferenceItem], field: str = "input", *, sees: bool = False) -> None:
    """Raise :class:`ApiError` (400) for a role or a part without text in what the answer is about, and not a history.

    That are the user's messages behind all other items, and system messages. `sees`: images are read as well.
    Files are, where the items bring them.
    """
    last = len(items) - 1
    if items and isinstance(item := items[last], MessageItem) and item.role not in ROLES:
        raise refusal(item.role, ROLES, f"{field}[{last}].role")
    for index in new_messages(items):
        content = getattr(items[index], "content", ())
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, Unserved) or own_text(part) is not None:
                continue
            read = given_file(part, field, field, new=True) or (sees and given_image(part, field, field))
            if not read:
                raise part_refusal(part, _TEXT_PARTS, f"{field}[{index}].content[{number}]")


def new_messages(items: Sequence[Item | ReferenceItem]) -> list[int]:
    """The messages that the answer is about: the user's behind all other items, and those of the system."""
    roles = [item.role if isinstance(item, MessageItem) else "" for item in items]
    old = max((index for index, role in enumerate(roles) if role in ("", "assistant")), default=-1)
    return [
        index for index, role in enumerate(roles) if role in ("system", "developer") or (role == "user" and index > old)
    ]
