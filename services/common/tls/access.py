"""The callers of each method, by the component in the caller's certificate."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio

from services.common.tls.certificate import Identity

ADMIN = "admin"  # people and their tools: `ryzanstein kube status`, `drain-worker`
KEDA = "keda"  # KEDA's operator, which asks routers how many workers a pool needs
COMPONENTS = ("gateway", "router", "coordinator", "worker", ADMIN)
_EVERYBODY = frozenset(COMPONENTS)

# Callers by the method's full name, without the leading slash. A method without a row has no callers.
CALLERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "ryzanstein.v1.Router/Route": frozenset({"gateway"}),
        "ryzanstein.v1.Router/RouteMany": frozenset({"gateway"}),
        "ryzanstein.v1.Router/Report": frozenset({"gateway"}),
        "ryzanstein.v1.Router/ListWorkers": frozenset({"gateway", ADMIN}),
        "ryzanstein.v1.Router/Explain": frozenset({ADMIN}),
        "ryzanstein.v1.Router/DrainWorker": frozenset({ADMIN}),
        "ryzanstein.v1.Router/GetDemand": frozenset({"router"}),
        **{
            f"externalscaler.ExternalScaler/{method}": frozenset({KEDA})
            for method in ("IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics")
        },
        "ryzanstein.v1.KvCoordinator/Lookup": frozenset({"router"}),
        "ryzanstein.v1.KvCoordinator/Pin": frozenset({ADMIN}),
        "ryzanstein.v1.KvCoordinator/Stats": frozenset({ADMIN}),
        "ryzanstein.v1.Worker/Connect": frozenset({"gateway"}),
        "ryzanstein.v1.Worker/GetModelCard": frozenset({"gateway"}),
        "ryzanstein.v1.Worker/InspectAdapter": frozenset({"gateway"}),
        "ryzanstein.v1.Worker/WatchState": frozenset({"router"}),
        "ryzanstein.v1.Worker/Drain": frozenset({"router"}),
        "ryzanstein.v1.Worker/Sleep": frozenset({"router", "worker"}),  # pods start their workers in turns
        "ryzanstein.v1.Worker/Wake": frozenset({"router"}),
        "ryzanstein.v1.Worker/KvSync": frozenset({"coordinator"}),
        "ryzanstein.v1.Worker/PullBlocks": frozenset({"worker"}),
        "ryzanstein.v1.Worker/CopyBlocks": frozenset({"worker"}),
        "grpc.health.v1.Health/Check": _EVERYBODY,
        "grpc.health.v1.Health/Watch": _EVERYBODY,
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": frozenset({ADMIN}),
    }
)

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler = Callable[[Any, _Context], Any]


class Authorization(grpc.aio.ServerInterceptor):
    """Refuses calls that the table does not allow: PERMISSION_DENIED, with the caller and the method."""

    def __init__(self, domain: str, *, plain_too: bool) -> None:
        """`domain`: that of this process; `plain_too`: let callers without TLS do everything, as before TLS."""
        self._domain = domain
        self._plain_too = plain_too

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler behind the check."""
        handler = await continuation(handler_call_details)
        return handler and _guarded(handler, handler_call_details.method.lstrip("/"), self._check)

    async def _check(self, method: str, context: _Context) -> None:
        facts = context.auth_context()
        if self._plain_too and "x509_common_name" not in facts and "peer_spiffe_id" not in facts:
            return
        try:
            (uri,) = facts.get("peer_spiffe_id", ())
            caller = Identity.from_uri(uri.decode())
        except ValueError:
            await self._refuse(context, method, "a caller without a name spiffe://RELEASE.NAMESPACE/COMPONENT")
        if caller.domain != self._domain:
            await self._refuse(context, method, f"{caller.uri}, of another installation than {self._domain},")
        if caller.component not in CALLERS.get(method, ()):
            await self._refuse(context, method, caller.component)

    async def _refuse(self, context: _Context, method: str, caller: str) -> None:
        allowed = ", ".join(sorted(CALLERS.get(method, ()))) or "none"
        detail = f"{caller} may not call {method}, which {allowed} may"
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, detail)


def _guarded(handler: Any, method: str, check: Callable[[str, _Context], Awaitable[None]]) -> Any:
    """The handler, which calls `check` first; an RpcMethodHandler of any of the four kinds."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behave: _Handler = getattr(handler, kind)

    async def answer(request: Any, context: _Context) -> Any:
        await check(method, context)
        return await behave(request, context)

    async def stream(request: Any, context: _Context) -> None:
        # A coroutine that writes costs what gRPC's own loop costs; a generator around a generator would cost twice.
        await check(method, context)
        if not inspect.isasyncgenfunction(behave):
            await behave(request, context)
            return
        messages: AsyncIterable[Any] = behave(request, context)
        async for message in messages:
            await context.write(message)

    return handler._replace(**{kind: stream if handler.response_streaming else answer})
