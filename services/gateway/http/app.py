"""The FastAPI app: models, health, metrics, administration and the API's documentation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.telemetry import TelemetryConfig
from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from services.gateway.errors import ApiError, internal_error, invalid, storage_away, unavailable
from services.gateway.generation.models import Models
from services.gateway.http.docs import add_docs
from services.gateway.http.documentation import HEALTH, Documentation
from services.gateway.http.exchange import ApiDialect
from services.gateway.http.identified import CallingTenant
from services.gateway.http.models import add_models
from services.gateway.http.openapi import document
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.redis_guard import RedisAwayError
from services.gateway.tenants.tenant import Gate
from services.gateway.upstream.catalog import Catalog
from services.gateway.upstream.router import RouterClient

_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "operation_spans": False}


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    dialect: ApiDialect = request.scope["dialect"]
    waits = {} if error.retry_after_s is None else {"retry-after": str(max(1, round(error.retry_after_s)))}
    return JSONResponse(dialect.errors.body(error), error.status, headers=dict(error.headers) | waits)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "method_not_allowed" if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED else "not_found"
    headers = tuple((error.headers or {}).items())
    return await _api_error(
        request, ApiError(error.status_code, message, "invalid_request_error", code=code, headers=headers)
    )


async def _query_error(request: Request, error: Exception) -> Response:
    """Convert FastAPI's error about a query or path parameter."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return await _api_error(request, invalid(f"Invalid value for `{param}`: {first['msg']}.", param))


async def _own_mistake(request: Request, _error: Exception) -> Response:
    return await _api_error(request, internal_error())


def add_error_handlers(app: FastAPI, objects: str = "Files, batches and jobs") -> None:
    """Answer every error in the shape of the scope's dialect. `objects`: those of the app that Redis keeps."""

    async def without_redis(request: Request, _error: Exception) -> Response:
        return await _api_error(request, storage_away(objects))

    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _query_error)
    app.add_exception_handler(RedisAwayError, without_redis)
    app.add_exception_handler(Exception, _own_mistake)


def new_app(
    catalog: Catalog,
    models: Models,
    router: RouterClient,
    gate: Gate,
    metrics: GatewayMetrics,
    ready: Callable[[], bool],
    documented: Mapping[str, Documentation],
    parts: Sequence[Callable[[FastAPI], None]] = (),
) -> FastAPI:
    """Build the app. `documented`: hot routes for the OpenAPI document; `parts` add the routes of optional parts."""
    # FastAPI's instrumentation would trace mostly probes and scrapes; the routes trace requests.
    app = FastAPI(
        title="Ryzanstein", docs_url=None, redoc_url=None, openapi_url="/openapi.json", telemetry=_NO_TELEMETRY
    )
    app.state.gate = gate
    add_error_handlers(app)
    add_models(app, models)
    add_docs(app)

    @app.get("/admin/workers", summary="The workers as the routers see them", tags=["administration"])
    async def workers(tenant: CallingTenant) -> dict[str, Any]:
        if not tenant.admin:
            raise ApiError(403, "This needs an administrator's key.", "permission_error", code="forbidden")
        if (views := await router.views()) is None:
            raise unavailable("No router answers.")
        return {"workers": [MessageToDict(view, preserving_proto_field_name=True) for view in views]}

    _add_probes(app, catalog, metrics, ready)
    for add_routes in parts:
        add_routes(app)
    app.openapi = lambda: document(app, documented)  # type: ignore[method-assign]  # as FastAPI documents it
    return app


def _add_probes(app: FastAPI, catalog: Catalog, metrics: GatewayMetrics, ready: Callable[[], bool]) -> None:
    @app.get(
        "/health",
        summary="Whether requests can be served, and for which models",
        tags=[HEALTH],
        responses={503: {"description": "No model has a worker"}},
    )
    async def health(response: Response) -> dict[str, Any]:
        names = sorted(model.name for model in catalog.available())
        response.status_code = 200 if names else 503
        return {"status": "ok" if names else "unavailable", "models": names}

    @app.get("/livez", summary="Whether the process answers", tags=[HEALTH])
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @app.get(
        "/readyz",
        summary="Whether the gateway should get traffic",
        tags=[HEALTH],
        responses={503: {"description": "Not yet"}},
    )
    async def readyz(response: Response) -> dict[str, str]:
        response.status_code = 200 if ready() else 503
        return {"status": "ok" if ready() else "not ready"}

    @app.get("/metrics", summary="Prometheus metrics", tags=[HEALTH], response_class=PlainTextResponse)
    async def prometheus() -> Response:
        text = await asyncio.to_thread(generate_latest, metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)
