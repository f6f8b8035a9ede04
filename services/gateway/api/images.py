"""Images in the parts of messages, as each API writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.gateway.api.ignored import Unserved
from services.gateway.errors import ApiError, invalid

_KINDS = frozenset({"image", "image_url", "input_image"})
_DATA, _BASE64 = "data:", ";base64"


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image of a conversation, not read yet."""

    part: Unserved
    field: str  # the client's field, for errors
    place: str  # the list of the part, as `messages[].content[]`
    refusal: ApiError | None = None  # error of a model that reads text only; None: a note stands in for it

    @property
    def low_detail(self) -> bool:
        """Whether the client wants one frame of the whole image only."""
        inner = self.part.value.get("image_url")
        holder = inner if isinstance(inner, dict) else self.part.value
        return holder.get("detail") == "low"

    def source(self) -> ImageSource:
        """Where the image's bytes are; raises :class:`ApiError` (400)."""
        value = self.part.value
        given = value.get("source") if isinstance(value.get("source"), dict) else value
        assert isinstance(given, dict)
        url = given.get("url") or given.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if isinstance(encoded := given.get("data"), str):
            return ImageSource(encoded, is_url=False)
        if not isinstance(url, str):
            message = f"`{self.field}` has no image: give it as a data URL or in base64, or as an https URL."
            raise invalid(message, self.field, "invalid_image")
        if url[: len(_DATA)].lower() != _DATA:
            return ImageSource(url, is_url=True)
        head, comma, encoded = url.partition(",")
        if not comma or not head.endswith(_BASE64):
            raise invalid(f"`{self.field}` holds a data URL that is not in base64.", self.field, "invalid_image")
        return ImageSource(encoded, is_url=False)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image's bytes in base64, or their URL."""

    text: str
    is_url: bool


def given_image(part: Any, field: str, place: str, refusal: ApiError | None = None) -> GivenImage | None:
    """The image that a part of a message is; None if it is none."""
    if isinstance(part, Unserved) and part.kind in _KINDS:
        return GivenImage(part, field, place, refusal)
    return None
