"""GET /docs: the OpenAPI document in Swagger UI. The package `fastapi_offline` has its files: no internet is needed."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.staticfiles import StaticFiles

from services.gateway.http.pages import answer_file, page_headers
from services.gateway.http.playground import PLAYGROUND

_FOLDER = Path(__file__).parents[1] / "docs"
_SWAGGER = ("swagger-ui-bundle.js", "swagger-ui.css")
_ICON = "icon.svg"


def add_docs(app: FastAPI) -> None:
    """Serve the page and its files. Links are relative, since a proxy may serve the page under another path."""
    swagger = StaticFiles(packages=[("fastapi_offline", "static")])
    places = dict.fromkeys(_SWAGGER, swagger) | {_ICON: StaticFiles(directory=PLAYGROUND)}
    own, page = StaticFiles(directory=_FOLDER), (_FOLDER / "index.html").read_text()
    # Swagger UI sets styles from its script, and embeds images in its style sheet.
    headers = page_headers(style_src="'self' 'unsafe-inline'", img_src="'self' data:", base_uri="'self'")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        below = request.scope["raw_path"].endswith(b"/")  # relative links of /docs/ need `../`
        html = page.replace('<base href="./">', '<base href="../">') if below else page
        return Response(html, media_type="text/html", headers=headers)

    @app.get("/docs/{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        return await answer_file(places.get(name, own), name, request, headers)
