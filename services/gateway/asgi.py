"""The types of ASGI, and readers of a request's headers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
ASGIMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[ASGIMessage]]
Send = Callable[[ASGIMessage], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """A request's headers by name in lower case; the first one of each name."""
    return dict(reversed(scope["headers"]))


def header(headers: Mapping[bytes, bytes], name: bytes) -> str:
    """A header of a request, or the empty string."""
    return str(headers.get(name, b""), "latin-1")


def authorization(headers: Mapping[bytes, bytes]) -> str:
    """The Authorization header of a request. Anthropic's clients send the key in `x-api-key` instead.

    The other header may then be for a proxy on the way, or without a key.
    """
    given, key = header(headers, b"authorization"), header(headers, b"x-api-key")
    scheme, _, bearer = given.partition(" ")
    has_key = scheme.lower() == "bearer" and bearer.strip()
    return given if has_key or not key else f"Bearer {key}"
