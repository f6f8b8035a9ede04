"""Parts of messages that no model here reads: their text, what stands in for them in a history, and their refusal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.api.ignored import Ignored, Unserved
from services.gateway.errors import ApiError, invalid

_MEDIA = {  # in all APIs
    "image": "image", "image_url": "image", "input_image": "image", "image_file": "image",
    "audio": "audio", "input_audio": "audio", "audio_url": "audio",
    "video": "video", "video_url": "video", "input_video": "video",
    "document": "document", "file": "file", "input_file": "file", "container_upload": "file",
}  # fmt: skip
_FILES = ("document", "file")
# The kinds whose text is read, and the fields that hold it.
_TEXTUAL = frozenset(
    {
        "document", "search_result", "tool_reference", "compaction",
        "text", "input_text", "output_text", "reasoning_text", "summary_text",
    }
)  # fmt: skip
_TEXTS = (
    "title", "url", "source", "text", "content", "stdout", "stderr", "error_code", "tool_name", "tool_references",
)  # fmt: skip
_INDEX = re.compile(r"\[\d+\]")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`$")
_READABLE_SOURCES = (None, "text", "content")  # sources of a readable document; others are files


def is_media(kind: str) -> bool:
    """Whether a part of this type is an image, a sound, a video or a file."""
    return kind in _MEDIA


def media_reason(kind: str) -> str:
    """Why a part of a medium's type is refused; empty for other types."""
    match _MEDIA.get(kind):
        case None:
            return ""
        case "audio" | "video" as medium:
            return f"models here read texts and images, and no {medium}"
        case medium if medium in _FILES:
            return "files are read where the request brings them, in base64 or as a data URL"
        case _:
            return "models here read text only, and the vision of multimodal ones is not loaded"


def stand_in(part: Unserved, where: str, ignored: Ignored, *, result: bool = False) -> str:
    """The text of a part of a history: its own, or a note that it is left out; empty where no note is needed.

    `where` is the list of the part, as `messages[].content[]`. `result`: bare values of a tool's result are JSON text.
    """
    if result and part.bare:
        return json_text(part.value, where)
    text = part.value if isinstance(part.value, str) else own_text(part)
    if isinstance(text, str):
        return text
    ignored.add(f"{where}.type={part.kind}")
    return _note(part.kind)


def own_text(part: Unserved) -> str | None:
    """The text of a part that is text in another form; None if it is none."""
    if part.fault or part.kind not in _TEXTUAL or (isinstance(part.value, dict) and _is_file(part.value)):
        return None
    return text_of(part.value)


def text_of(value: Any) -> str:
    """All texts in a part, or in the content of a tool's result, a line each; notes stand for media."""
    try:
        return _text_of(value)
    except RecursionError as error:
        raise invalid("A part of a message is nested too deeply.", code="invalid_value") from error


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(_text_of, value)))
    if not isinstance(value, dict):
        return ""
    if _is_file(value):
        return _note(str(value.get("type")))
    fields = (*_TEXTS, "data") if value.get("type") == "text" else _TEXTS
    return "\n".join(filter(None, (_text_of(value.get(name)) for name in fields)))


def json_text(value: Any, where: str) -> str:
    """The JSON text of a call's arguments; a text is taken for it. Raises :class:`ApiError` (400) with its path."""
    if isinstance(value, str):
        return value or "{}"
    try:
        return msgspec.json.encode({} if value is None or value == [] else value).decode()
    except RecursionError as error:
        raise invalid(f"`{where}` is nested too deeply.", where, "invalid_value") from error


def is_role(role: str, roles: Sequence[str], where: str, ignored: Ignored, *, new: bool) -> bool:
    """Whether a message's role is one of `roles`. Messages of a history with another one are left out.

    `where` is the role's path. Raises :class:`ApiError` (400) if the message is new.
    """
    if role in roles:
        return True
    if new:
        raise refusal(role, roles, where)
    ignored.add(f"{_INDEX.sub('[]', where)}={role}")
    return False


def refusal(kind: str, allowed: Sequence[str], param: str) -> ApiError:
    """The error (400) for a part of a message that changes the answer."""
    listed = ", ".join(f"`{name}`" for name in allowed)
    problem = ": ".join(filter(None, (f"'{kind}' is none of {listed}", media_reason(kind))))
    return invalid(f"Invalid value for `{param}`: {problem}.", param, "invalid_value")


def part_refusal(part: Unserved, allowed: Sequence[str], where: str) -> ApiError:
    """The error (400) for a part that changes the answer; `where` is its path."""
    if not part.fault:
        return refusal(part.kind, allowed, f"{where}.type")
    text, _, path = part.fault.partition(" - at `$")
    param = where.removesuffix("[0]") if part.alone else f"{where}{path.rstrip('`')}"
    if missing := _MISSING.match(text):
        param = f"{param}.{missing['field']}"
        return invalid(f"Missing required field `{param}`.", param, "missing_field")
    return invalid(f"Invalid value for `{param}`: {text[0].lower()}{text[1:]}.", param)


def _is_file(value: dict[str, Any]) -> bool:
    """Whether a part is media; a document may be a text."""
    kind, source = value.get("type"), value.get("source")
    if kind == "document" and isinstance(source, dict):
        return source.get("type") not in _READABLE_SOURCES
    return isinstance(kind, str) and kind in _MEDIA


def _note(kind: str) -> str:
    medium = _MEDIA.get(kind)
    if medium is None:
        return ""
    reason = "it cannot be read" if medium in _FILES else "this model reads text only"
    return f"[The {medium} that stood here was left out: {reason}.]"
