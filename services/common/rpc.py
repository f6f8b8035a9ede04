"""gRPC channels and servers with the project's options."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.tls.access import Authorization
from services.common.tls.channel import TlsChannel
from services.common.tls.credentials import Tls, TlsPhase
from services.common.tls.relay import RelayedPorts, listen, relay

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# Pings detect a peer that is stopped, or whose machine vanished without closing its connections; a dead process is
# noticed without them. The ping time-out ends a connection; its default of a minute overrides the keepalive time-out.
RECEIVE_LIMIT = "grpc.max_receive_message_length"
_COMMON: list[tuple[str, int | str]] = [
    (RECEIVE_LIMIT, MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_KEEPALIVE_MS = (4_000, 5_000)
_CLIENT: list[tuple[str, int | str]] = [
    *_COMMON,
    # Reconnect quickly to a restarted peer.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name, the longest time of one try, with the handshakes of TLS and HTTP/2. A peer that gets little CPU
    # takes hundreds of milliseconds, and its callers give up after the first try.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # Channels to the same address share no connection, so that closing one never affects another.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
_SMALL: list[tuple[str, int | str]] = [("grpc.http2.bdp_probe", 0)]
_SERVER: list[tuple[str, int | str]] = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port in use is an error; it is never shared
]


def open_channel(
    address: str, *, to: str = "", tls: Tls | None = None, small_messages: bool = False
) -> grpc.aio.Channel:
    """A channel to ``host:port`` or ``unix:/path``; connects on first use.

    `to`: the component that is called; with `tls`, nothing else is accepted as the peer.
    `small_messages`: answers are far below 64 KiB, so that gRPC need not probe the bandwidth. A probe is a ping for
    almost every message that arrives, which is half the cost of following a worker's state.
    """
    options = [*_CLIENT, *(_SMALL if small_messages else []), _keepalive()]
    if tls is not None and tls.clients_encrypt:
        return TlsChannel(address, to, tls, options)
    return grpc.aio.insecure_channel(address, options=options)


def new_server(
    options: Sequence[tuple[str, int]] = (),
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    tls: Tls | None = None,
) -> grpc.aio.Server:
    """A server with the project's options, which `options` override. Add servicers, call :func:`bind`, then start.

    With `tls`, callers may call what `services.common.tls.access` allows them.
    """
    every = dict([*_SERVER, _keepalive()]) | dict(options)
    if tls is not None:
        access = Authorization(tls.identity.domain, plain_too=tls.phase is not TlsPhase.REQUIRE)
        interceptors = [access, *interceptors]
    return grpc.aio.server(interceptors=interceptors, options=list(every.items()))


def _keepalive() -> tuple[str, int]:
    """The interval of pings to an idle peer: random, since a thousand pings at once block the process for 60 ms."""
    return "grpc.keepalive_time_ms", random.randint(*_KEEPALIVE_MS)


def bind(server: grpc.aio.Server, host: str, port: int, tls: Tls | None = None) -> int:
    """Listen on `host`:`port` (0 picks a free one); return the port, raise OSError if it is taken.

    With `tls`, the port speaks TLS; plain text as well in the phases before the last.
    """
    if tls is not None and tls.phase is not TlsPhase.REQUIRE:
        return _bind_both(server, host, port, tls)
    return bind_with(server, host, port, tls.server_credentials() if tls is not None else None)


def bind_with(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """The same with one kind of credentials; None: plain text."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error


def _bind_both(server: grpc.aio.Server, host: str, port: int, tls: Tls) -> int:
    listener, ports = listen(host, port), RelayedPorts.new()
    server.add_insecure_port(f"unix-abstract:{ports.plain}")
    server.add_secure_port(f"unix-abstract:{ports.tls}", tls.server_credentials())

    async def until_it_stops() -> None:
        relaying = asyncio.create_task(relay(listener, ports))
        await server.wait_for_termination()
        relaying.cancel()  # once: it ends by itself when clients have the server's last words
        await asyncio.wait([relaying])

    asyncio.create_task(until_it_stops(), name="relay")  # noqa: RUF006  # the server's end holds it
    return int(listener.getsockname()[1])


class Health:
    """grpc.health.v1 of one server: `SERVING` only while the service can work."""

    def __init__(self, server: grpc.aio.Server, service_names: Sequence[str]) -> None:
        self._servicer = health.aio.HealthServicer()
        self._names = ("", *service_names)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)

    async def set_serving(self, serving: bool) -> None:
        """Set the status of all names."""
        for name in self._names:
            await self.set_status(name, serving)

    async def set_status(self, name: str, serving: bool) -> None:
        """Set the status of one name. It need not be a service: a probe may ask for `liveness`."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._servicer.set(name, status)
