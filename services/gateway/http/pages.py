"""Pages for browsers: plain files, nothing from elsewhere, and a policy that keeps it so."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request, Response
from fastapi.staticfiles import StaticFiles

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again after an upgrade; unchanged files are not sent
}


def page_headers(**allowed: str) -> dict[str, str]:
    """The headers of a page's files; `allowed` are directives of its policy that differ, with `_` for `-`."""
    policy = _POLICY | {name.replace("_", "-"): sources for name, sources in allowed.items()}
    return _HEADERS | {"content-security-policy": "; ".join(f"{name} {sources}" for name, sources in policy.items())}


async def answer_file(files: StaticFiles, name: str, request: Request, headers: Mapping[str, str]) -> Response:
    """A file of a folder; raises 404 where it has none of that name."""
    response = await files.get_response(name, request.scope)
    response.headers.update(headers)
    return response
