"""What becomes of a body's fields: honoured, accepted without effect, or refused unless they change nothing."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Meta

from services.gateway.errors import invalid

ADVISORY = Meta(description="Accepted, without effect", extra={"advisory": True})


def neutral(*values: object) -> Meta:
    """A field that is not supported: null and `values`, which change nothing, are accepted, all else is refused."""
    accepted = " or ".join([msgspec.json.encode(value).decode() for value in values] + ["null"])
    return Meta(
        description=f"Not supported: only {accepted}",
        extra_json_schema={"enum": [*values, None]},
        extra={"neutral": (*values, None)},
    )


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
    """The fields of a body that are not supported, with the values that are accepted."""
    return _marked(kind, "neutral")


def advisory_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The fields of a body that are accepted and have no effect."""
    return frozenset(_marked(kind, "advisory"))


def _same(value: object, other: object) -> bool:
    """Equal as JSON: `true` is not 1."""
    return value == other and isinstance(value, bool) is isinstance(other, bool)


def check_neutral(body: msgspec.Struct, accepted: dict[str, tuple[object, ...]]) -> None:
    """Refuse fields that would change the answer and are not supported; raises :class:`ApiError` (400)."""
    for field, values in accepted.items():
        value = getattr(body, field)
        if value is not None and not any(_same(value, other) for other in values):
            *others, last = [f"`{msgspec.json.encode(value).decode()}`" for value in values]
            listed = f"{', '.join(others)} or {last}" if others else last
            raise invalid(f"`{field}` is not supported; only {listed} is accepted.", field, "unsupported_field")
