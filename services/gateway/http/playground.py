"""GET /: a page to try the models on. Plain files, no build step, nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.staticfiles import StaticFiles

_FOLDER = Path(__file__).parents[1] / "playground"
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again after an upgrade; unchanged files are not sent
}


def add_playground(app: FastAPI) -> None:
    """Serve the page and its files. Their links are relative: a proxy may add a path before them."""
    files = StaticFiles(directory=_FOLDER)

    async def answer(name: str, request: Request) -> Response:
        response = await files.get_response(name, request.scope)
        response.headers.update(_HEADERS)
        return response

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return await answer("index.html", request)

    @app.get("/playground/{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        return await answer(name, request)
