"""The public gRPC port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from ryzanstein.v1 import inference_pb2_grpc

from services.common.rpc import RECEIVE_LIMIT, Health, bind_with, new_server
from services.gateway.grpc.inference import SERVICE, InferenceService, Undecodable
from services.gateway.public_tls import PublicTls
from services.gateway.settings import GatewaySettings


class KeepUndecodable(grpc.aio.ServerInterceptor):
    """Passes requests that cannot be decoded to their method, which refuses them; gRPC would answer UNKNOWN."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler; methods of the Inference service get a decoder that never fails."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(f"/{SERVICE}/"):
            return handler
        decode = handler.request_deserializer

        def decode_or_keep(data: bytes) -> object:
            try:
                return decode(data)
            except DecodeError as error:
                return Undecodable(str(error))

        return handler._replace(request_deserializer=decode_or_keep)


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A server and its health service; both None when gRPC is off."""

    port: int = 0
    server: grpc.aio.Server | None = None
    health: Health | None = None

    async def announce_end(self) -> None:
        """Report NOT_SERVING to health checks."""
        if self.health is not None:
            await self.health.set_serving(False)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and return when the open ones have ended; calls are cancelled after `grace_s`.

        May be called again with a shorter grace period.
        """
        if self.server is not None:
            await self.server.stop(grace_s)


def _age_limit(settings: GatewaySettings) -> list[tuple[str, int]]:
    """Channel options for the age of connections, which gRPC varies by 10 %. Running calls may take any time."""
    age_s = settings.grpc_max_connection_age_s
    return [("grpc.max_connection_age_ms", int(age_s * 1000))] if age_s else []


@asynccontextmanager
async def serving_grpc(
    service: InferenceService, settings: GatewaySettings, tls: PublicTls | None
) -> AsyncIterator[GrpcServer]:
    """Serve while the block runs."""
    if not settings.grpc_port:
        yield GrpcServer()
        return
    options = [*_age_limit(settings), (RECEIVE_LIMIT, settings.max_body_bytes)]
    server = new_server(options, [KeepUndecodable()])
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    health = Health(server, [SERVICE])
    credentials = tls.grpc_credentials() if tls else None
    port = bind_with(server, settings.host, settings.grpc_port, credentials)
    await server.start()
    await health.set_serving(True)
    try:
        yield GrpcServer(port, server, health)
    finally:
        await server.stop(0)
