"""Fetches images of allowed hosts by https, and nothing from inside a network.

A host's name is resolved once, every address is checked, and the connection goes to a checked address: a name that
resolves differently a moment later changes nothing. Redirects are followed to allowed hosts only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from services.gateway.errors import ApiError, invalid
from services.gateway.images.decoding import ImageLimits, refused, too_many_bytes

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 3
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNICAST = ipaddress.ip_network("2000::/3")  # all of IPv6 that is allocated for the public internet
# Reserved networks that Python takes for public ones: protocol assignments, relays of 6to4, documentation.
_RESERVED = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))
_PORT = 443
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOSTNAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")
_UNSAFE = re.compile(r"[^!-~]|\\")  # parsers disagree about these characters

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class PrivateAddressError(Exception):
    """A host has an address that is not of the public internet."""


def is_public(address: str) -> bool:
    """Whether an address is of the public internet, as is the address within it, for IPv6 addresses that hold one."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None, None))[1]
        if parsed in _NAT64:
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if parsed not in _UNICAST:
            return False
    reserved = any(parsed in network for network in _RESERVED if network.version == parsed.version)
    return parsed.is_global and not parsed.is_multicast and not reserved


async def resolve(host: str, port: int) -> Sequence[str]:
    """All addresses of a host; raises OSError."""
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]


@functools.cache
def _public_authorities() -> ssl.SSLContext:
    """Trust in the authorities of the system, whose certificates take 30 ms to read."""
    return ssl.create_default_context()


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """Hosts that images may be fetched from, and the time for it."""

    hosts: tuple[str, ...] = ()  # host or host:port; *.domain: all hosts below it
    timeout_s: float = 10.0  # longest time of an image, redirects included
    resolve: Resolve = resolve
    allows: Callable[[str], bool] = is_public  # whether an address may be connected to
    tls: ssl.SSLContext = field(default_factory=_public_authorities)

    def permits(self, host: str, port: int) -> bool:
        """Whether a host is on the list; another port than 443 has to be named there."""
        name = host if port == _PORT else f"{host}:{port}"
        return any(name == one or (one.startswith("*.") and name.endswith(one[1:])) for one in self.hosts)


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to checked addresses."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy, self._inner = policy, httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's interface
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to an address of `host`; raises PrivateAddressError if any of them may not be connected to."""
        addresses = await self._policy.resolve(host, port)
        if not addresses or not all(map(self._policy.allows, addresses)):
            raise PrivateAddressError
        *others, last = addresses
        for address in others:
            with contextlib.suppress(httpcore.ConnectError):
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
        return await self._inner.connect_tcp(last, port, timeout, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await self._inner.sleep(seconds)


class ImageFetcher:
    """Fetches images within a policy."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy

    async def fetch(self, url: str, field: str, limits: ImageLimits) -> bytes:
        """The bytes of an image; raises :class:`ApiError` (400), which names the client's `field`."""
        if not self._policy.hosts:
            message = f"`{field}`: images are not fetched here; send the image itself, as a data URL or in base64."
            raise invalid(message, field, "image_not_fetched")
        try:
            async with asyncio.timeout(self._policy.timeout_s):
                return await self._follow(url, field, limits)
        except TimeoutError as error:
            raise refused(field, f"its host took longer than {self._policy.timeout_s:g} s.") from error
        except PrivateAddressError as error:
            raise self._not_allowed(url, field) from error
        except (OSError, httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            raise refused(field, "its host cannot be reached, or breaks off.") from error

    async def _follow(self, url: str, field: str, limits: ImageLimits) -> bytes:
        for _ in range(_MOST_REDIRECTS + 1):
            answer = await self._get(self._checked(url, field), field, limits)
            if isinstance(answer, bytes):
                return answer
            try:
                url = urljoin(url, answer)
            except ValueError as error:
                raise refused(field, "it redirects to an invalid URL.") from error
        raise refused(field, "it redirects too often.")

    def _checked(self, url: str, field: str) -> httpcore.URL:
        """The parts of a URL that were checked, which alone are used."""
        if _UNSAFE.search(url):
            raise refused(field, "its URL is invalid; spaces and characters beyond ASCII have to be percent-encoded.")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", _PORT if parts.port is None else parts.port
        except ValueError as error:
            raise refused(field, "its URL is invalid.") from error
        permitted = _HOSTNAME.fullmatch(host) is not None and self._policy.permits(host, port)
        if parts.scheme != "https" or parts.username is not None or not permitted:
            raise self._not_allowed(url, field)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return httpcore.URL(scheme=b"https", host=host.encode(), port=port, target=target.encode())

    def _not_allowed(self, url: str, field: str) -> ApiError:
        allowed = ", ".join(f"https://{host}" for host in self._policy.hosts)
        message = f"`{field}`: `{url[:200]}` is not fetched. Allowed are data URLs and images of {allowed}."
        return invalid(message, field, "image_not_fetched")

    async def _get(self, url: httpcore.URL, field: str, limits: ImageLimits) -> bytes | str:
        """The body, or where the host redirects to."""
        backend = _CheckedBackend(self._policy)
        async with httpcore.AsyncConnectionPool(ssl_context=self._policy.tls, network_backend=backend) as pool:
            headers = [("accept", "image/*"), ("user-agent", "ryzanstein")]
            async with pool.stream("GET", url, headers=headers) as answer:
                given = {name.lower(): value.decode("latin-1") for name, value in answer.headers}
                if answer.status in _REDIRECTS and b"location" in given:
                    return given[b"location"]
                if answer.status != 200:
                    raise refused(field, f"its host answers with {answer.status}.")
                if not given.get(b"content-type", "").startswith("image/"):
                    raise refused(field, "its host sends no image.")
                body = bytearray()
                async for chunk in answer.aiter_stream():
                    body += chunk
                    if len(body) > limits.n_bytes:
                        raise too_many_bytes(field, limits)
                return bytes(body)
