"""Decides which web pages may use the gateway, by the Origin header that browsers send."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware

from services.gateway.asgi import ASGIApp, header
from services.gateway.errors import ApiError

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,]+")
_EXPOSED = (
    "retry-after", "x-request-id", "x-trace-id", "x-ryzanstein-fallback-model", "x-ryzanstein-target",
    "x-ryzanstein-ignored", "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests", "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens",
)  # fmt: skip


def origin(entry: str) -> str:
    """Parse an entry of the list of origins; raises ValueError."""
    if entry not in (ANY, "null") and not _ORIGIN.fullmatch(entry.lower()):
        raise ValueError("must be scheme://host, scheme://host:port, null or *, without a path")
    return entry.lower()


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class OriginPolicy:
    """Allows pages of the gateway's own address and of the listed origins."""

    def __init__(self, allowed: Collection[str], *, host: str, keyless: bool) -> None:
        """`host` is the address that the gateway listens on; `keyless`: requests need no key."""
        self._allowed = frozenset(allowed)
        self._loopback = is_loopback(host)
        self._keyless = keyless

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a WebSocket of another page, which browsers do not prevent; raises :class:`ApiError` (403)."""
        sent = header(headers, b"origin")
        if sent and not self._permits(sent.lower(), header(headers, b"host").lower()):
            message = f"Pages of {sent} may not use this gateway; RYZANSTEIN_ALLOWED_ORIGINS lists those that may."
            raise ApiError(403, message, "permission_error", code="origin_not_allowed")

    def check_post(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a POST of another page when no key is needed; raises :class:`ApiError` (403).

        Browsers send it and hide only the answer.
        """
        if self._keyless:
            self.check(headers)

    def _permits(self, sent: str, host: str) -> bool:
        if ANY in self._allowed or sent in self._allowed:
            return True
        # A foreign DNS name that resolves to this machine is not the gateway's own address (DNS rebinding).
        own = not self._loopback or is_loopback(urlsplit(f"//{host}").hostname or "")
        return own and sent.partition("://")[2] == host

    def share(self, app: ASGIApp) -> ASGIApp:
        """The app with CORS headers, which tell browsers which pages may read its answers."""
        if not self._allowed:
            return app
        return CORSMiddleware(
            app,
            allow_origins=sorted(self._allowed),
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=_EXPOSED,
        )
