"""Bodies to structs; whatever is wrong becomes an error that names the field and what is allowed."""

from __future__ import annotations

import re
from typing import Generic, TypeVar

import msgspec

from services.gateway.errors import ApiError, invalid

Body = TypeVar("Body", bound=msgspec.Struct)

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`$")


class BodyDecoder(Generic[Body]):
    """Decodes one kind of body."""

    def __init__(self, kind: type[Body]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)

    def decode(self, data: bytes) -> Body:
        """Validate and decode; raises :class:`ApiError` (400)."""
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            raise explain(error, self._kind) from error
        except msgspec.DecodeError as error:
            raise invalid(f"The body is not valid JSON: {error}", code="invalid_json") from error
        except UnicodeDecodeError as error:
            raise invalid(f"The body is not valid UTF-8: {error.reason}", code="invalid_utf8") from error
        except RecursionError as error:
            raise invalid("The body is nested too deeply.", code="invalid_json") from error


def explain(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> ApiError:
    """The refusal of a value that is no `kind`: names the field and what is allowed."""
    message = str(error)
    located = _AT.search(message)
    path = located["path"] if located else ""
    text = message[: located.start()] if located else message
    if unknown := _UNKNOWN.match(text):
        param = f"{path}.{unknown['field']}" if path else unknown["field"]
        known = "" if path else f" Known fields: {', '.join(kind.__struct_encode_fields__)}."
        return invalid(f"Unknown field `{param}`.{known}", param, "unknown_field")
    if missing := _MISSING.match(text):
        param = f"{path}.{missing['field']}" if path else missing["field"]
        return invalid(f"Missing required field `{param}`.", param, "missing_field")
    where = f"`{path}`" if path else "the body"
    return invalid(f"Invalid value for {where}: {text[0].lower()}{text[1:]}.", path or None, "invalid_value")
