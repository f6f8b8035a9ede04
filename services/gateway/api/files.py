"""Files in the parts of messages, as each API writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.gateway.api.ignored import Unserved
from services.gateway.errors import ApiError, invalid

_KINDS = frozenset({"file", "input_file", "document"})
_TEXT_SOURCES = ("text", "content")  # sources of documents that are texts already
_NAMES = ("filename", "title")
_LONGEST_NAME = 120  # characters
_DATA, _BASE64 = "data:", ";base64"
PDF = "application/pdf"


@dataclass(frozen=True, slots=True)
class GivenFile:
    """A file that a part of a message brings, not read yet."""

    part: Unserved
    holder: dict[str, Any]  # the object with its data
    field: str  # the client's field, for errors
    place: str  # the list of the part, as `messages[].content[]`
    new: bool  # false: a note stands for it if it cannot be read

    @property
    def name(self) -> str:
        """The name by which the model may speak of it, on one line."""
        holders = (self.holder, self.part.value)
        given = next((name for holder in holders for key in _NAMES if (name := holder.get(key))), "file")
        return " ".join(str(given).split())[:_LONGEST_NAME]

    def encoded(self) -> tuple[str, str]:
        """The media type that the client says, or an empty one, and the bytes in base64; raises :class:`ApiError`."""
        data, media = _data_of(self.holder), self.holder.get("media_type")
        if data[: len(_DATA)].lower() != _DATA:
            return media if isinstance(media, str) else "", data
        head, comma, encoded = data[len(_DATA) :].partition(",")
        if not comma or not head.endswith(_BASE64):
            raise self.refused("its data URL is not in base64.")
        return head.removesuffix(_BASE64).partition(";")[0].lower(), encoded

    def refused(self, reason: str) -> ApiError:
        """400: it cannot be read."""
        return invalid(f"`{self.field}` cannot be read as a file: {reason}", self.field, "invalid_file")


def given_file(part: Any, field: str, place: str, *, new: bool) -> GivenFile | None:
    """The file that a part of a message brings; None if it brings none, as one that only names a file."""
    if not isinstance(part, Unserved) or part.kind not in _KINDS or part.fault or not isinstance(part.value, dict):
        return None
    inner = (part.value.get("file"), part.value.get("source"))
    for holder in (part.value, *inner):
        if isinstance(holder, dict) and holder.get("type") not in _TEXT_SOURCES and _data_of(holder):
            return GivenFile(part, holder, field, place, new)
    return None


def _data_of(holder: dict[str, Any]) -> str:
    data = holder.get("file_data") or holder.get("data")
    return data if isinstance(data, str) else ""
