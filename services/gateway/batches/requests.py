"""The answers to a batch's requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from services.gateway.asgi import ASGIApp, ASGIMessage
from services.gateway.inside import post

_NOT_LATER = "insufficient_quota"  # a retry fails in the same way
_BUSY = "overloaded"


class _Error(msgspec.Struct):
    code: str | None = None


class _Failure(msgspec.Struct):
    error: _Error | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _ReportedUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Answered(msgspec.Struct):
    usage: _ReportedUsage | None = None


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """A request's answer."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return self.status == HTTPStatus.OK

    @property
    def later(self) -> bool:
        """Whether a retry may succeed: the request failed for lack of workers or by a limit."""
        if self.status not in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            return False
        return self._code != _NOT_LATER

    @property
    def limited(self) -> bool:
        """Whether the tenant's own limits refused the request."""
        return self.status == HTTPStatus.TOO_MANY_REQUESTS and self._code != _BUSY

    @property
    def _code(self) -> str | None:
        error = msgspec.json.decode(self.body, type=_Failure).error
        return error.code if error else None

    @property
    def retry_after_s(self) -> float:
        """The least pause before a retry."""
        text = self.headers.get(b"retry-after", b"1")
        return float(text) if text.isdigit() else 1.0

    def tokens(self) -> tuple[int, int, int]:
        """Input, cached input, and output tokens."""
        usage = msgspec.json.decode(self.body, type=_Answered).usage if self.ok else None
        if usage is None:
            return 0, 0, 0
        details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
        used = usage.prompt_tokens + usage.input_tokens, usage.completion_tokens + usage.output_tokens
        return used[0], details.cached_tokens or 0, used[1]


async def answer_of(routes: ASGIApp, path: str, credential: str, request_id: str, body: bytes) -> LineAnswer:
    """Send one request to the gateway's own routes; returns its whole answer."""
    status, headers, parts = 0, {}, []

    async def send(message: ASGIMessage) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    await post(
        routes, path, [(b"authorization", credential.encode()), (b"x-request-id", request_id.encode())], body, send
    )
    return LineAnswer(status, headers, b"".join(parts))
