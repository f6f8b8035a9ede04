"""A component's certificate, its key and the CAs that it trusts: three PEM files of one folder."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

# The names of Kubernetes' secrets of type kubernetes.io/tls, and of cert-manager.
CERTIFICATE, KEY, AUTHORITIES = "tls.crt", "tls.key", "ca.crt"
_SCHEME = "spiffe://"


class CertificateError(ValueError):
    """The files do not hold a usable certificate; the message names the file and contains no secret."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The holder of a certificate: its SPIFFE id is ``spiffe://{domain}/{component}``."""

    domain: str  # RELEASE.NAMESPACE
    component: str

    @property
    def uri(self) -> str:
        """The SPIFFE id, an entry of the certificate's subject alternative names."""
        return f"{_SCHEME}{self.domain}/{self.component}"

    @property
    def host(self) -> str:
        """The DNS name that a client checks instead of the address, since pods' addresses are in no certificate."""
        return f"{self.component}.{self.domain}"

    @staticmethod
    def from_uri(uri: str) -> Identity:
        """Read a SPIFFE id; raises ValueError if it is not one of ours."""
        domain, slash, component = uri.removeprefix(_SCHEME).partition("/")
        if not (uri.startswith(_SCHEME) and domain and slash and component) or "/" in component:
            raise ValueError(f"{uri!r} is not {_SCHEME}RELEASE.NAMESPACE/COMPONENT")
        return Identity(domain, component)


@dataclass(frozen=True, slots=True)
class Certificate:
    """The files of the folder, read once."""

    identity: Identity
    chain: bytes
    key: bytes
    authorities: bytes  # one CA, or the old and the new one
    ends: float  # seconds since the epoch

    @staticmethod
    def read(folder: Path) -> Certificate:
        """Read and check the three files; raises CertificateError."""
        # Imported here: it takes a tenth of a second, which a process without TLS need not wait.
        from cryptography import x509
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        chain, key, authorities = (_read(folder / name) for name in (CERTIFICATE, KEY, AUTHORITIES))
        try:
            leaf = x509.load_pem_x509_certificates(chain)[0]
            names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
            identity = Identity.from_uri(uri)
        except (ValueError, x509.ExtensionNotFound) as error:
            wanted = f"must hold a certificate in PEM format with one name {_SCHEME}RELEASE.NAMESPACE/COMPONENT"
            raise CertificateError(f"{folder / CERTIFICATE} {wanted}: {error}") from error
        try:
            same = load_pem_private_key(key, None).public_key() == leaf.public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm):  # the cause may quote the key
            raise CertificateError(f"{folder / KEY} must hold a private key in PEM format, not encrypted") from None
        if not same:
            raise CertificateError(f"{folder / KEY} is not the key of {CERTIFICATE}")
        try:
            ssl.create_default_context(cadata=authorities.decode("ascii"))
        except (ssl.SSLError, UnicodeDecodeError) as error:
            raise CertificateError(f"{folder / AUTHORITIES} must hold certificates in PEM format") from error
        return Certificate(identity, chain, key, authorities, leaf.not_valid_after_utc.timestamp())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}") from error


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when a file is replaced or written; None while it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
