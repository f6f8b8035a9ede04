"""The types of ASGI, and readers of a request's headers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
ASGIMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[ASGIMessage]]
Send = Callable[[ASGIMessage], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")


def header(scope: Scope, name: bytes) -> str:
    """A header of a request (name in lower case), or the empty string."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return ""


def authorization(scope: Scope) -> str:
    """The Authorization header of a request. Anthropic's clients send the key in `x-api-key` instead."""
    key = header(scope, b"x-api-key")
    return header(scope, b"authorization") or (f"Bearer {key}" if key else "")
