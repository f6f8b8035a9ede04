"""Pages for browsers: plain files, with a content security policy that allows nothing from other sites."""

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
    "cache-control": "no-cache",  # browsers revalidate each file, so an upgrade takes effect at once
}


def page_headers(**allowed: str) -> dict[str, str]:
    """The headers of a page's files; `allowed` overrides directives of the policy, with `_` for `-`."""
    policy = _POLICY | {name.replace("_", "-"): sources for name, sources in allowed.items()}
    return _HEADERS | {"content-security-policy": "; ".join(f"{name} {sources}" for name, sources in policy.items())}


async def answer_file(files: StaticFiles, name: str, request: Request, headers: Mapping[str, str]) -> Response:
    """A file of a folder; raises 404 for an unknown name."""
    response = await files.get_response(name, request.scope)
    response.headers.update(headers)
    return response
