"""Marks of a body's fields: supported, accepted without effect, or refused unless the value changes nothing."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from msgspec import Meta

from services.gateway.errors import invalid

ADVISORY = Meta(description="Accepted, without effect", extra={"advisory": True})


def neutral(*values: object) -> Meta:
    """Mark an unsupported field: null and `values` change nothing and are accepted, every other value is refused."""
    accepted = " or ".join([msgspec.json.encode(value).decode() for value in values] + ["null"])
    return Meta(
        description=f"Not supported: only {accepted}",
        extra_json_schema={"enum": [*values, None]},
        extra={"neutral": (*values, None)},
    )


@functools.cache  # describing a body and all that it contains takes tens of milliseconds
def _marked(kind: type[msgspec.Struct], mark: str) -> dict[str, Any]:
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    extras = {
        field.encode_name: field.type.extra or {}
        for field in described.fields
        if isinstance(field.type, msgspec.inspect.Metadata)
    }
    return {name: extra[mark] for name, extra in extras.items() if mark in extra}


def neutral_values(kind: type[msgspec.Struct]) -> dict[str, tuple[object, ...]]:
    """A body's unsupported fields, each with the values that are accepted."""
    return _marked(kind, "neutral")


def advisory_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """A body's fields that are accepted without effect."""
    return frozenset(_marked(kind, "advisory"))


def _same(value: object, other: object) -> bool:
    """Whether two values are equal in JSON, where `true` is not 1."""
    return value == other and isinstance(value, bool) is isinstance(other, bool)


def check_neutral(body: msgspec.Struct, accepted: dict[str, tuple[object, ...]]) -> None:
    """Refuse unsupported fields whose value would change the answer; raises :class:`ApiError` (400)."""
    for field, values in accepted.items():
        value = getattr(body, field)
        if value is not None and not any(_same(value, other) for other in values):
            *others, last = [f"`{msgspec.json.encode(value).decode()}`" for value in values]
            listed = f"{', '.join(others)} or {last}" if others else last
            raise invalid(f"`{field}` is not supported; only {listed} is accepted.", field, "unsupported_field")
