"""A channel that speaks TLS, and connects again with new credentials once the certificate has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from services.common.tasks import end_tasks
from services.common.tls.certificate import Certificate, Identity
from services.common.tls.credentials import Tls

_LONGEST_CALL_S = 30 * 86_400.0  # a gateway's stream to a worker lives as long as both


class TlsChannel(grpc.aio.Channel):
    """Calls go to a connection made with the current certificate; running calls keep the connection that they have.

    gRPC's credentials can't change, so that every certificate gets a channel of its own. An old one is closed when its
    last call has ended.
    """

    def __init__(self, address: str, component: str, tls: Tls, options: Sequence[tuple[str, int | str]]) -> None:
        """Calls to anyone but `component` of this process's own installation fail."""
        self._address = address
        self._tls = tls
        host = Identity(tls.identity.domain, component).host
        self._options = [*options, ("grpc.ssl_target_name_override", host)]
        self._certificate = tls.current()
        self._channel = self._open(self._certificate)
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def _open(self, certificate: Certificate) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(certificate.authorities, certificate.key, certificate.chain)
        return grpc.aio.secure_channel(self._address, credentials, options=self._options)

    def current(self) -> grpc.aio.Channel:
        """The channel for new calls."""
        certificate = self._tls.current()
        if certificate is not self._certificate:
            closing = asyncio.create_task(self._channel.close(grace=_LONGEST_CALL_S), name="retired channel")
            self._retired[closing] = self._channel
            closing.add_done_callback(self._retired.pop)
            self._channel, self._certificate = self._open(certificate), certificate
        return self._channel

    def _method(self, make: Callable[[grpc.aio.Channel], Callable[..., Any]]) -> Any:
        """A multi-callable that is made anew on every new channel."""
        channel = self.current()
        call = make(channel)

        def on_current(*args: Any, **options: Any) -> Any:
            nonlocal channel, call
            if (current := self.current()) is not channel:
                channel, call = current, make(current)
            return call(*args, **options)

        return on_current

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        """As of the base class."""
        return self._method(lambda channel: channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        """As of the base class."""
        return self._method(lambda channel: channel.unary_stream(*method, **options))

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        """As of the base class."""
        return self._method(lambda channel: channel.stream_unary(*method, **options))

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        """As of the base class."""
        return self._method(lambda channel: channel.stream_stream(*method, **options))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The state of the connection for new calls."""
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the state of the connection for new calls is another one."""
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait for a connection."""
        await self.current().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """End all calls, those over earlier connections at once."""
        for channel in list(self._retired.values()):
            await channel.close()
        await end_tasks(self._retired)
        await self._channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()
