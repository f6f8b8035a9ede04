"""GET /: a page to try the models on. Plain files, no build step."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.staticfiles import StaticFiles

from services.gateway.http.pages import answer_file, page_headers

PLAYGROUND = Path(__file__).parents[1] / "playground"


def add_playground(app: FastAPI) -> None:
    """Serve the page and its files. Links are relative, since a proxy may serve the page under another path."""
    # The page makes its elements one by one; browsers refuse any text that a script would have parsed as HTML.
    headers = page_headers(require_trusted_types_for="'script'", trusted_types="'none'")
    files = StaticFiles(directory=PLAYGROUND)

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return await answer_file(files, "index.html", request, headers)

    @app.get("/playground/{name:path}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        return await answer_file(files, name, request, headers)
