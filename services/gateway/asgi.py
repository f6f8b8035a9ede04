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
    """The Authorization header of a request. Anthropic's clients send the key in `x-api-key` instead.

    The other header may then be for a proxy on the way, or without a key.
    """
    given, key = header(scope, b"authorization"), header(scope, b"x-api-key")
    scheme, _, bearer = given.partition(" ")
    has_key = scheme.lower() == "bearer" and bearer.strip()
    return given if has_key or not key else f"Bearer {key}"
