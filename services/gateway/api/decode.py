"""Decodes bodies to structs. An invalid body raises an error that names the field and the allowed values."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from services.gateway.api.allowed import allowed_values
from services.gateway.api.fields import check_neutral, neutral_values
from services.gateway.api.ignored import Ignored, leave_out
from services.gateway.api.parts import media_reason
from services.gateway.errors import ApiError, invalid

Body = TypeVar("Body", bound=msgspec.Struct)

# Decoding holds the GIL. A body of up to this size decodes in well under a millisecond, whatever its content.
_INLINE_BYTES = 64 * 1024
# Most items in a list of texts, token ids or messages: decoding that many takes about 30 ms.
_MAX_VALUES = 400_000
_MAX_OPTION_BYTES = 256 * 1024  # for each field other than the texts and the tools
_MAX_TOOLS_BYTES = 4 * 1024 * 1024
_TEXT_FIELDS = frozenset(
    {
        "prompt",
        "input",
        "instructions",
        "tokens",
        "messages",
        "text_1",
        "text_2",
        "query",
        "documents",
        "system",
        "prediction",
    }
)
_TOOL_FIELDS = frozenset({"tools", "functions"})

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`$")
# Escaped backslashes, surrogate pairs, and surrogates without a partner.
_SURROGATES = re.compile(
    r"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_NO_MEMBER = ("Invalid enum value ", "Invalid value ")
_INDEX = re.compile(r"\[\d+\]")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`$")


class BodyDecoder(Generic[Body]):
    """Decodes one kind of body."""

    def __init__(self, kind: type[Body]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._neutral = neutral_values(kind)
        fields = [(name, msgspec.Raw, msgspec.Raw(b"null")) for name in kind.__struct_encode_fields__]
        self._outline = msgspec.json.Decoder(msgspec.defstruct(f"{kind.__name__}Outline", fields))

    async def decode(self, data: bytes, ignored: Ignored | None = None) -> Body:
        """Validate and decode, a large body off the event loop; raises :class:`ApiError` (400).

        What `ignored` collects is left out; without it, unknown fields are refused.
        """
        ignored = ignored or Ignored(refuse_fields=True)
        if len(data) <= _INLINE_BYTES:
            return self._explained(data, ignored)
        return await asyncio.to_thread(self._decode_large, data, ignored)

    def _decode_large(self, data: bytes, ignored: Ignored) -> Body:
        """Check the fields' sizes one by one: the event loop can run between two fields."""
        try:
            outline = self._outline.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._explained(data, ignored)  # raises the same error with the field's name
        known = {field: bytes(getattr(outline, field)) for field in self._outline.type.__struct_fields__}
        for field, value in known.items():
            _check_size(field, value)
        if len(data) - sum(map(len, known.values())) > _MAX_OPTION_BYTES:
            self._check_unknown(data)
        collecting = gc.isenabled()
        gc.disable()  # decoding makes no garbage, and a collection takes longer than decoding
        try:
            return self._explained(data, ignored)
        finally:
            if collecting:
                gc.enable()

    def _check_unknown(self, data: bytes) -> None:
        """Refuse a body for its first unknown field, if it has one; raises :class:`ApiError` (400)."""
        try:
            self._decoder.decode(data)
        except msgspec.ValidationError as error:
            refusal = explain(error, self._kind)
            limit = f"Unknown fields may have at most {_MAX_OPTION_BYTES} bytes together. "
            text = f"{limit if refusal.code == 'unknown_field' else ''}{refusal.message}"
            raise invalid(text, refusal.param, refusal.code or "invalid_value") from error

    def _explained(self, data: bytes, ignored: Ignored) -> Body:
        try:
            body = self._known(data, ignored)
        except msgspec.ValidationError as error:
            raise _beyond_doubles(data, error) or explain(error, self._kind) from error
        except msgspec.DecodeError as error:
            other = invalid(f"The body is not valid JSON: {error}", code="invalid_json")
            raise lone_surrogate(data) or other from error
        except UnicodeDecodeError as error:
            raise invalid(f"The body is not valid UTF-8: {error.reason}", code="invalid_utf8") from error
        except RecursionError as error:
            raise invalid("The body is nested too deeply.", code="invalid_json") from error
        check_neutral(body, self._neutral)
        return body

    def _known(self, data: bytes, ignored: Ignored) -> Body:
        """Decode, without what is left out; only bodies that have it are read twice."""
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError:
            known = leave_out(msgspec.json.decode(data), self._kind, ignored)
            return self._decoder.decode(msgspec.json.encode(known))


def _check_size(field: str, value: bytes) -> None:
    """Refuse a field that would take long to decode; raises :class:`ApiError` (400)."""
    if field not in _TEXT_FIELDS:
        most = _MAX_TOOLS_BYTES if field in _TOOL_FIELDS else _MAX_OPTION_BYTES
        if len(value) > most:
            message = f"`{field}` may have at most {most} bytes, got {len(value)}."
            raise invalid(message, field, "invalid_value")
    elif not value.startswith(b'"') and value.count(b",") >= _MAX_VALUES:
        message = f"`{field}` may hold at most {_MAX_VALUES} values (commas are counted)."
        raise invalid(message, field, "invalid_value")


def _beyond_doubles(data: bytes, error: msgspec.ValidationError) -> ApiError | None:
    """An error (400) with the place of a number such as 1e400, which msgspec does not name inside open parts."""
    if not str(error).startswith("Number out of range"):
        return None
    waiting: list[tuple[str, object]] = [("", json.loads(data))]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{path}.{key}".removeprefix("."), item) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
        elif value in (math.inf, -math.inf):
            message = f"Invalid value for `{path}`: number out of range, larger than any double."
            return invalid(message, path, "invalid_value")
    return None


def lone_surrogate(data: bytes | str) -> ApiError | None:
    """An error (400) for JSON with an unpaired surrogate escape; None when it has none."""
    text = data if isinstance(data, str) else str(data, "latin-1")
    lone = next((match["lone"] for match in _SURROGATES.finditer(text) if match["lone"]), None)
    if lone is None:
        return None
    return invalid(f"The text holds the lone surrogate `{lone}`: it stands for no character.", code="invalid_unicode")


def described(error: msgspec.ValidationError, kind: Any) -> tuple[str, str]:
    """The error's text, without a full stop, and the field's path. For an enumeration the text lists its values."""
    message = str(error)
    located = _AT.search(message)
    path = located["path"] if located else ""
    text = message[: located.start()] if located else message
    if text.startswith(_NO_MEMBER):
        allowed = ", ".join(f"`{value}`" for value in allowed_values(kind, path))
        value = next(text.removeprefix(start) for start in _NO_MEMBER if text.startswith(start))
        reason = media_reason(value.strip("'"))
        text = ": ".join(filter(None, (f"{value} is none of {allowed}", reason))) if allowed else text
    return text, path


def explain(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> ApiError:
    """An error (400) that names the invalid field of a `kind` and the allowed values."""
    text, path = described(error, kind)
    if unknown := _UNKNOWN.match(text):
        param = f"{path}.{unknown['field']}" if path else unknown["field"]
        supported = (name for name in kind.__struct_encode_fields__ if name not in neutral_values(kind))
        known = "" if path else f" Known fields: {', '.join(supported)}."
        return invalid(f"Unknown field `{param}`.{known}", param, "unknown_field")
    if missing := _MISSING.match(text):
        param = f"{path}.{missing['field']}" if path else missing["field"]
        return invalid(f"Missing required field `{param}`.", param, "missing_field")
    where = f"`{path}`" if path else "the body"
    return invalid(f"Invalid value for {where}: {text[0].lower()}{text[1:]}.", path or None, "invalid_value")


def converted(raw: dict[str, Any], kind: type[Body], where: str, ignored: Ignored) -> Body:
    """Convert a part that a body's type leaves open; raises :class:`ApiError` (400) naming the field below `where`."""
    try:
        return _known_part(raw, kind, where, ignored)
    except msgspec.ValidationError as error:
        refusal = explain(error, kind)
        param = f"{where}.{refusal.param}" if refusal.param else where
        message = refusal.message.replace(f"`{refusal.param}`" if refusal.param else "the body", f"`{param}`")
        raise invalid(message, param, refusal.code or "invalid_value") from error


def _known_part(raw: dict[str, Any], kind: type[Body], where: str, ignored: Ignored) -> Body:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError:
        return msgspec.convert(leave_out(raw, kind, ignored, _INDEX.sub("[]", where)), kind)


def unsupported_value(param: str, value: object, allowed: Sequence[str]) -> ApiError:
    """An error (400) for a value outside a list of allowed ones."""
    shown = msgspec.json.encode(value).decode()[:100]
    listed = ", ".join(f"`{name}`" for name in allowed)
    return invalid(f"`{param}` may be {listed}; {shown} is not supported.", param, "unsupported_value")
