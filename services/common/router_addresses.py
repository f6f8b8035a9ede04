"""The routers' addresses: fixed ones, and DNS names with any number of addresses."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from services.common.settings import peer_address

log = logging.getLogger(__name__)

DNS = "dns:"  # dns:host:port: every address behind the name

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


def router_address(entry: str) -> str:
    """A checked ``host:port`` or ``dns:host:port``; raises ValueError."""
    peer_address(entry.removeprefix(DNS) or "?")
    return entry


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """All addresses of a host as ``ip:port``; raises OSError."""
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ips = sorted({str(address[0]) for *_, address in addresses})
    return [f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in ips]


def _split(entry: str) -> tuple[str, int]:
    host, _, port = entry.removeprefix(DNS).rpartition(":")
    return host.strip("[]"), int(port)


class RouterAddresses:
    """The addresses behind a list of ``host:port`` and ``dns:host:port``."""

    def __init__(self, entries: Sequence[str], resolve: Resolve = resolve_host) -> None:
        self.entries = tuple(entries)
        self._fixed = [entry for entry in entries if not entry.startswith(DNS)]
        self._resolve = resolve
        self._behind: dict[str, Sequence[str]] = {entry: () for entry in entries if entry.startswith(DNS)}
        self._troubled: set[str] = set()

    async def current(self) -> list[str]:
        """All addresses, each once. A name that cannot be resolved keeps its last addresses."""
        for entry in self._behind:
            try:
                self._behind[entry] = await self._resolve(*_split(entry))
                self._troubled.discard(entry)
            except OSError as error:
                if entry not in self._troubled:  # log one line per outage
                    log.warning("routers: the name of %s is not resolved: %s", entry, error)
                self._troubled.add(entry)
        return list(dict.fromkeys([*self._fixed, *(address for some in self._behind.values() for address in some)]))
