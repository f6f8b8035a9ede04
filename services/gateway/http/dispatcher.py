"""The outermost ASGI app: sends hot routes to their endpoints, and all other requests to the FastAPI app."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Set

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Match

from services.gateway.asgi import ASGIApp, Receive, Scope, Send
from services.gateway.drain import Drain
from services.gateway.errors import ApiError, internal_error
from services.gateway.http.documentation import HEALTH
from services.gateway.http.endpoint import Endpoint
from services.gateway.http.exchange import OPENAI_DIALECT, ApiDialect, Exchange
from services.gateway.http.messages.endpoint import DIALECT as MESSAGES_DIALECT
from services.gateway.http.messages.endpoint import is_messages_client
from services.gateway.http.paths import unknown_path
from services.gateway.observation import CLIENT_GONE, ObservedRequest, Observer
from services.gateway.origins import OriginPolicy

log = logging.getLogger(__name__)
_SAFE = ("GET", "HEAD", "OPTIONS")


class Dispatcher:
    """Dispatches requests and turns errors into answers."""

    def __init__(
        self,
        app: Starlette,
        endpoints: Mapping[str, Endpoint],
        sockets: ASGIApp,
        observer: Observer,
        drain: Drain,
        origins: OriginPolicy,
        dialects: Mapping[str, ApiDialect],
    ) -> None:
        """`dialects`: the dialects of routes, by path."""
        self._app = app
        self._endpoints = endpoints
        self._sockets = sockets
        self._observer = observer
        self._drain = drain
        self._origins = origins
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        if scope["type"] == "http":
            endpoint = self._endpoints.get(scope["path"])
            # The app may serve another method of a hot route's path, such as a list of what the route creates.
            if endpoint is not None and (scope["method"] == "POST" or not self._methods(scope)):
                await self._serve(endpoint, Exchange(scope, receive, send, self._dialect(scope)))
            else:
                await self._pass_on(Exchange(scope, receive, send, self._dialect(scope)))
            return
        self._drain.arrive()
        await self._sockets(scope, receive, send)

    def _dialect(self, scope: Scope) -> ApiDialect:
        """The dialect of a route and of the paths below it; on other paths, the client's dialect."""
        path = scope["path"]
        if path in self._endpoints:
            return self._dialects.get(path, OPENAI_DIALECT)
        above = (dialect for route, dialect in self._dialects.items() if path.startswith(f"{route}/"))
        return next(above, MESSAGES_DIALECT if is_messages_client(scope) else OPENAI_DIALECT)

    def _matching(self, scope: Scope) -> list[BaseRoute]:
        """The app's routes for a path, with any method; a hot route's path never matches another route's parameter."""
        matching = [route for route in self._app.routes if route.matches(scope)[0] is not Match.NONE]
        if scope["path"] in self._endpoints:
            return [route for route in matching if _path_of(route) == scope["path"]]
        return matching

    def _methods(self, scope: Scope) -> set[str]:
        """The methods that the app serves for a path."""
        return {method for route in self._matching(scope) for method in getattr(route, "methods", None) or ()}

    def _check(self, scope: Scope) -> None:
        """Refuse a request that no route serves; raises :class:`ApiError` (404, 405)."""
        method, path, methods = scope["method"], scope["path"], self._methods(scope)
        if method in methods:
            return
        # A POST to a path whose end only matches a parameter (a file's or a batch's id) is an unknown path.
        named = all(_path_of(route).endswith("}") for route in self._matching(scope))
        if path not in self._endpoints and (not methods or (method == "POST" and named)):
            known = (_path_of(route) for route in self._app.routes)
            raise unknown_path(method, path, {*self._endpoints, *(one for one in known if "{" not in one)})
        raise _not_allowed(method, methods | ({"POST"} if path in self._endpoints else set()))

    async def _pass_on(self, exchange: Exchange) -> None:
        """Serve a request by the app; all unknown paths count as one route."""
        scope = exchange.scope
        scope["dialect"] = exchange.dialect
        if scope["method"] == "HEAD":  # the server drops the body
            scope = {**scope, "method": "GET"}
        route = next(iter(self._matching(scope)), None)
        observed = self._observer.begin(_path_of(route) if route else "other")
        if HEALTH not in getattr(route, "tags", ()):
            self._drain.arrive()
        exchange.identify()
        try:
            self._check(scope)
            if scope["method"] not in _SAFE:
                self._origins.check_post(exchange.headers)
            async with self._drain.limit():
                await self._app(scope, exchange.receive, exchange.send)
        except ApiError as error:
            await exchange.fail(error)
        finally:
            observed.end(exchange.status or CLIENT_GONE, "")

    async def _serve(self, endpoint: Endpoint, exchange: Exchange) -> None:
        route = exchange.scope["path"]
        self._drain.arrive()
        request_id = exchange.identify()
        observed = self._observer.begin(route, f"POST {route}", exchange.header(b"traceparent"), request_id)
        if observed.trace_id:
            exchange.response_headers.append((b"x-trace-id", observed.trace_id.encode()))
        try:
            observed.attach()
            exchange.traceparent = observed.traceparent
            await self._answer(endpoint, exchange, observed)
        finally:
            status = exchange.status if exchange.complete else CLIENT_GONE
            observed.end(exchange.failure or status, exchange.model)

    async def _answer(self, endpoint: Endpoint, exchange: Exchange, observed: ObservedRequest) -> None:
        try:
            if exchange.scope["method"] != "POST":
                raise _not_allowed(exchange.scope["method"], {"POST"})
            self._origins.check_post(exchange.headers)
            async with self._drain.limit():
                await endpoint.serve(exchange)
        except ApiError as error:
            if exchange.answering:
                observed.broken(error)
            await exchange.fail(error)
        except asyncio.CancelledError:
            raise
        except Exception:  # a bug ends only this request
            log.exception("request failed")
            if exchange.status:
                exchange.failure = 500
                observed.broken(None)
                raise  # the server closes the connection, so that the client sees an incomplete answer
            await exchange.send_error(internal_error())


def _path_of(route: BaseRoute) -> str:
    return getattr(route, "path", "")


def _not_allowed(method: str, allowed: Set[str]) -> ApiError:
    listed = ", ".join(sorted(allowed))
    message = f"{method} is not allowed here; use {listed}."
    return ApiError(405, message, "invalid_request_error", code="method_not_allowed", headers=(("allow", listed),))
