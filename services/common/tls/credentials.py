"""TLS of one process: its certificate, read again when its files change, and gRPC's credentials made of it."""

from __future__ import annotations

import logging
import threading
import time
from enum import StrEnum
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry, Gauge

from services.common.tls.certificate import (
    AUTHORITIES,
    CERTIFICATE,
    KEY,
    Certificate,
    CertificateError,
    Identity,
    file_stamp,
)

_LOOK_EVERY_S = 1.0

log = logging.getLogger(__name__)


class TlsPhase(StrEnum):
    """Steps from plain text to TLS. Processes of neighbouring steps can call each other."""

    OFFER = "offer"  # servers accept TLS and plain text; clients speak plain text
    USE = "use"  # clients speak TLS; servers still accept both
    REQUIRE = "require"  # plain text is refused


class Tls:
    """A process's certificate and phase; all channels and servers of the process share it."""

    def __init__(self, folder: Path, phase: TlsPhase = TlsPhase.REQUIRE) -> None:
        """Raises CertificateError if the folder holds no usable certificate."""
        self.phase = phase
        self._folder = folder
        self._lock = threading.Lock()  # gRPC asks from threads of its own
        self._stamp = self._files()
        self._certificate = Certificate.read(folder)
        self._looked_at = time.monotonic()

    @property
    def identity(self) -> Identity:
        """This process's own identity."""
        return self._certificate.identity

    @property
    def clients_encrypt(self) -> bool:
        """Whether channels of this process speak TLS."""
        return self.phase is not TlsPhase.OFFER

    def current(self) -> Certificate:
        """The certificate, at most a second behind its files. Files that are not usable are logged, once."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at >= _LOOK_EVERY_S:
                self._looked_at = now
                self._look()
            return self._certificate

    def _look(self) -> None:
        stamp = self._files()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            renewed = Certificate.read(self._folder)
        except CertificateError as error:
            log.error("the certificate is not renewed, the last one is kept: %s", error)
            return
        if renewed.identity != self._certificate.identity:
            names = renewed.identity.uri, self._certificate.identity.uri
            log.error("the certificate is not renewed: it is of %s, this process is %s", *names)
            return
        self._certificate = renewed
        log.info("certificate renewed", extra={"ends": renewed.ends})

    def _files(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(file_stamp(self._folder / name) for name in (CERTIFICATE, KEY, AUTHORITIES))

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a server that wants its clients' certificates, and shows the current one at each handshake."""
        shown = self.current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            certificate = self.current()
            if certificate is shown:
                return None
            shown = certificate
            return _server_side(certificate)

        return grpc.dynamic_ssl_server_credentials(
            _server_side(shown),
            renewed,  # type: ignore[arg-type]  # None, for unchanged, is missing in the stubs
            require_client_authentication=True,
        )


def export_end(registry: CollectorRegistry, tls: Tls | None) -> None:
    """Export when this process's certificate ends."""
    about = "When the certificate of this process ends, seconds since the epoch; 0 without TLS"
    gauge = Gauge("ryzanstein_tls_certificate_end_seconds", about, registry=registry)
    gauge.set_function(lambda: tls.current().ends if tls else 0.0)


def _server_side(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(certificate.key, certificate.chain)], certificate.authorities)
