"""Steering: what a client adds to a response while it is made, and the response that goes on with it.

`response.steer` names a running response and is answered at once. The response is not cut short. After its end a
successor begins, with the same settings and the steers as its input. If it ended with calls, the steers wait for the
client's `response.create` with their outputs, whose input they precede.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.gateway.api.ignored import Ignored
from services.gateway.errors import ApiError
from services.gateway.http.responses.reading import check_new_parts, read_items
from services.gateway.ids import new_id

Fields = dict[str, msgspec.Raw]  # JSON values of a `response.create`
STEER = "response.steer"
_MOST_QUEUED = 32  # steers of a connection that no response has taken up
_UNSTEERED = ("conversation", "context_management")
_MESSAGE = {"type", "role", "content"}
# The output that a call waits for, and the fields by which it names its call.
_OUTPUTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "function_call": ("function_call_output", ("call_id", "name")),
    "custom_tool_call": ("custom_tool_call_output", ("call_id",)),
}


class SteerError(Exception):
    """A steer that cannot be queued, or that no response could take up; `code` is OpenAI's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class SteerBody(msgspec.Struct):
    """The message of a client; `previous_response_id` is the response to steer."""

    previous_response_id: str
    input: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Steer:
    """Input for the successor of a response."""

    body: SteerBody
    lane: str | None = None
    steer_id: str = ""  # empty: it was not accepted
    items: Sequence[dict[str, Any]] = ()  # messages of the user

    def accepted(self) -> dict[str, Any]:
        """The event that acknowledges it."""
        return {"type": "response.steer.accepted", "steer": self._reference}

    def pending(self, required: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The event for a response that ended with calls, which wait for the `required` outputs."""
        reason = {"reason": "waiting_for_required_input", "required_input": required}
        return {"type": "response.steer.pending", "steer": self._reference, **reason}

    def failed(self, error: SteerError) -> dict[str, Any]:
        """The event that returns its input."""
        why = {"type": "invalid_request_error", "code": error.code, "message": str(error)}
        return {"type": "response.steer.failed", "steer": {**self._reference, "input": self.body.input}, "error": why}

    @property
    def _reference(self) -> dict[str, Any]:
        own = {"id": self.steer_id} if self.steer_id else {}
        return {**own, "previous_response_id": self.body.previous_response_id}


@dataclass(frozen=True, slots=True)
class QueuedSteers:
    """The steers of a connection that no response has taken up."""

    _steers: list[Steer] = field(default_factory=list)

    def add(self, data: bytes | str, body: SteerBody, lane: str | None) -> Steer:
        """Queue a client's message for a running response of `lane`. Raises SteerError."""
        if len(self._steers) >= _MOST_QUEUED:
            message = f"At most {_MOST_QUEUED} steers of a connection may wait."
            raise SteerError("too_many_pending_steers", message)
        steer = Steer(body, lane, new_id("steer"), _messages(data, body))
        self._steers.append(steer)
        return steer

    def of(self, response_id: str, lane: str | None) -> list[Steer]:
        """The steers of a response, in their order."""
        return [each for each in self._steers if (each.body.previous_response_id, each.lane) == (response_id, lane)]

    def take(self, response_id: str, lane: str | None) -> list[Steer]:
        """Remove the steers of a response and return them."""
        taken = self.of(response_id, lane)
        self._steers[:] = [each for each in self._steers if each not in taken]
        return taken


def is_steerable(fields: Fields) -> bool:
    """Whether the responses to these fields may have successors."""
    return all(bytes(fields.get(name, b"null")) in (b"null", b"[]") for name in _UNSTEERED)


def previous_of(fields: Fields) -> str:
    """The response that these fields go on from; empty if they name none."""
    given = _value(fields.get("previous_response_id"))
    return given if isinstance(given, str) else ""


def with_steers(fields: Fields, steers: Sequence[Steer]) -> Fields:
    """The fields with steers before their input; unchanged if that is neither a text nor a list."""
    if not steers:
        return fields
    given = _value(fields.get("input"))
    own = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    if not isinstance(own, list):
        return fields
    items = [*(item for steer in steers for item in steer.items), *own]
    return {**fields, "input": msgspec.Raw(msgspec.json.encode(items))}


def successor_of(fields: Fields, response_id: str) -> Fields:
    """The fields of a response that goes on from the response to `fields`, without an input of its own."""
    settings = {name: value for name, value in fields.items() if name != "input"}
    return {**settings, "previous_response_id": msgspec.Raw(msgspec.json.encode(response_id))}


def required_outputs(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The outputs that a response's calls require, without their contents."""
    required = []
    for item in items:
        if output := _OUTPUTS.get(item["type"]):
            kind, names = output
            required.append({"type": kind, **{name: item[name] for name in names}})
    return required


def _value(raw: msgspec.Raw | None) -> Any:
    """A JSON value; None for one that cannot be read, which the checks of its field refuse."""
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _messages(data: bytes | str, body: SteerBody) -> list[dict[str, Any]]:
    """The user's messages of a steer. Raises SteerError."""
    if unknown := msgspec.json.decode(data, type=Fields).keys() - {"type", *SteerBody.__struct_fields__}:
        raise SteerError("invalid_input", f"`{min(unknown)}` is not a field of a steer.")
    given = _value(body.input)
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not given or not isinstance(items, list) or not all(_is_message(item) for item in items):
        message = "`input` is a text, or a list of messages of the role `user` with `type`, `role` and `content` alone."
        raise SteerError("invalid_input", message)
    try:
        check_new_parts(read_items(items, Ignored()), sees=True)
    except ApiError as error:
        raise SteerError("invalid_input", error.message) from error
    return items


def _is_message(item: object) -> bool:
    if not isinstance(item, dict) or item.keys() - _MESSAGE:
        return False
    return item.get("role") == "user" and item.get("type", "message") == "message" and bool(item.get("content"))
