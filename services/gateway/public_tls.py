"""TLS for clients at the gateway itself: a certificate and its key, read again when their files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.common.tls.certificate import file_stamp

_LOOK_EVERY_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """A certificate with its chain, and its key: PEM files."""

    certificate: Path
    key: Path

    def load_into(self, context: ssl.SSLContext) -> None:
        """Show this certificate at the context's next handshakes; raises OSError, or ssl.SSLError as one."""
        context.load_cert_chain(self.certificate, self.key, password="")

    def pair(self) -> tuple[bytes, bytes]:
        """Key and chain, as gRPC takes them."""
        return self.key.read_bytes(), self.certificate.read_bytes()

    def stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return a value that changes with the files."""
        return tuple(file_stamp(path) for path in (self.certificate, self.key))


class PublicTls:
    """TLS of the public ports, HTTP and gRPC; both show the current certificate at each handshake."""

    def __init__(self, files: CertificateFiles) -> None:
        """Raises OSError, or ssl.SSLError as one, if the files hold no certificate with its key."""
        self._files = files
        self._stamp = files.stamp()
        self._pair = files.pair()
        self.context = _server_context()
        files.load_into(self.context)

    async def watch(self) -> None:
        """Use what the files hold until cancelled. Files that are not usable are logged; the last certificate stays."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            stamp = self._files.stamp()
            if stamp == self._stamp:
                continue
            self._stamp = stamp
            try:
                self._files.load_into(_server_context())  # tried first: a failure would leave half of it in the context
                self._files.load_into(self.context)
                self._pair = self._files.pair()
            except OSError as error:  # ssl.SSLError is one
                log.error("the public certificate is not renewed, the last one is kept: %s", error)
            else:
                log.info("public certificate renewed")

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials of the gRPC port, whose clients show no certificate."""
        shown = self._pair

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            if self._pair is shown:
                return None
            shown = self._pair
            return self._configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            renewed,  # type: ignore[arg-type]  # None, for unchanged, is missing in the stubs
            require_client_authentication=False,
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([self._pair])


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
