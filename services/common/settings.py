"""Configuration shared by every service: environment variables with the prefix ``RYZANSTEIN_``."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from services.common.redis_client import RedisAccess, RedisUrlError
from services.common.telemetry_names import Scheme
from services.common.tls.certificate import Certificate
from services.common.tls.credentials import Tls, TlsPhase

PREFIX = "RYZANSTEIN_"
_ANY_PORT = 9
# Addresses reserved for documentation (RFC 5737 and 3849): the default route leads to them.
_SOMEWHERE = ((socket.AF_INET, ("192.0.2.1", _ANY_PORT)), (socket.AF_INET6, ("2001:db8::1", _ANY_PORT)))


def peer_address(address: str) -> str:
    """Check that an address is ``host:port`` or empty; raises ValueError."""
    host, _, port = address.rpartition(":")
    if address and not (host and "/" not in host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("must be host:port")
    return address


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class ServiceSettings(BaseSettings):
    """Settings of every service. Subclasses add their own fields; all are read once, at start.

    Fields with ``repr=False`` are secret: no message shows their values.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    namespace: str = Field(default="default", description="Separates installations that share one Redis")
    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0", repr=False, description="redis://, rediss:// (TLS) or unix:// URL"
    )
    redis_username: str = Field(default="", description="ACL user; default: the URL's, else Redis's default user")
    redis_password: str = Field(default="", repr=False, description="As it is, unlike in the URL: nothing is escaped")
    redis_password_file: str = Field(
        default="", description="File with the password instead; read at every connect, so that it may change"
    )
    redis_ca_file: str = Field(
        default="", description="PEM file of the CAs that rediss:// servers are trusted by, besides the system's"
    )
    tls_folder: str = Field(
        default="",
        description="Folder with `tls.crt`, `tls.key` and `ca.crt` (PEM): services talk TLS 1.3 to each other, and "
        "both sides show a certificate; read again when the files change. Default: plain text",
    )
    tls_phase: TlsPhase = Field(
        default=TlsPhase.REQUIRE,
        description="`require` refuses plain text; to change a running installation over without a loss: `offer` on "
        "all, then `use`, then `require`",
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    telemetry_names: Annotated[tuple[Scheme, ...], NoDecode, BeforeValidator(_split)] = Field(
        default=(),
        description="Names of other tools, comma-separated, under which gateways and workers also export their metrics "
        "and spans: `vllm` (vLLM's `vllm:*`), `gen_ai` (OpenTelemetry's conventions)",
    )
    host: str = Field(default="127.0.0.1", description="Address that the service's ports listen on")
    advertise_host: str = Field(
        default="", description="Host that peers reach this process by; default: `host`, or this machine's address"
    )
    metrics_port: int = Field(default=0, ge=0, le=65535, description="Port of /metrics, /livez and /readyz; 0 is off")

    @field_validator("redis_url")
    @classmethod
    def _url(cls, url: str) -> str:
        try:
            RedisAccess(url).check()
        except RedisUrlError as error:
            raise ValueError(str(error)) from None
        return url

    @field_validator("redis_password_file")
    @classmethod
    def _readable(cls, path: str) -> str:
        if path:
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ValueError(f"cannot be read: {error.strerror}") from error
        return path

    @field_validator("redis_ca_file")
    @classmethod
    def _certificates(cls, path: str) -> str:
        if path:
            try:
                ssl.create_default_context(cafile=path)
            except ssl.SSLError as error:
                raise ValueError("must hold certificates in PEM format") from error
            except OSError as error:
                raise ValueError(f"cannot be read: {error.strerror}") from error
        return path

    @field_validator("tls_folder")
    @classmethod
    def _certificate(cls, folder: str) -> str:
        if folder:
            Certificate.read(Path(folder))
        return folder

    @model_validator(mode="after")
    def _one_way_to_redis(self) -> Self:
        if self.redis_password and self.redis_password_file:
            raise ValueError(f"{PREFIX}REDIS_PASSWORD and {PREFIX}REDIS_PASSWORD_FILE: set one of them")
        if self.redis_ca_file and not self.redis_url.startswith("rediss://"):
            raise ValueError(f"{PREFIX}REDIS_CA_FILE is set, but {PREFIX}REDIS_URL does not start with rediss://")
        return self

    @property
    def redis(self) -> RedisAccess:
        """Address and credentials of Redis."""
        return RedisAccess(
            self.redis_url, self.redis_username, self.redis_password, self.redis_password_file, self.redis_ca_file
        )

    def open_tls(self) -> Tls | None:
        """TLS of this process; None: plain text. Open it once: all channels and servers share it."""
        return Tls(Path(self.tls_folder), self.tls_phase) if self.tls_folder else None

    def advertised(self, port: int) -> str:
        """The ``host:port`` that peers call."""
        host = self.advertise_host or (self._own_address() if self.host in ("0.0.0.0", "::") else self.host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _own_address(self) -> str:
        """The address of the network interface towards Redis: peers often cannot resolve this machine's host name."""
        towards: list[tuple[int, Any]] = list(_SOMEWHERE)
        if redis_host := self.redis.host:
            with contextlib.suppress(OSError):  # its name may not resolve yet
                addresses = socket.getaddrinfo(redis_host, _ANY_PORT, type=socket.SOCK_DGRAM)
                towards = [(int(family), address[:2]) for family, *_, address in addresses] + towards
        for family, address in towards:
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
        return socket.gethostname()
