"""One port for TLS and plain text, while an installation changes over: the first byte says which one a client speaks.

A gRPC port speaks one of both. So the server has two of its own, abstract Unix sockets, and this relay copies bytes
between clients and the right one. TLS is not ended here: the server sees its client's certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from dataclasses import dataclass

from services.common.tasks import end_tasks

_TLS_HANDSHAKE = b"\x16"  # the type of a TLS record (RFC 8446, 5.1); plain HTTP/2 begins with "PRI"
_FIRST_BYTE_S = 10.0
_LAST_BYTES_S = 2.0  # for what an ended server has said
_CHUNK = 256 * 1024
_BACKLOG = 512


@dataclass(frozen=True, slots=True)
class RelayedPorts:
    """The abstract Unix sockets behind a relay, by their names without the leading zero byte."""

    plain: str
    tls: str

    @staticmethod
    def new() -> RelayedPorts:
        """Names that no other process has."""
        name = f"ryzanstein-{uuid.uuid4()}"
        return RelayedPorts(f"{name}-plain", f"{name}-tls")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises OSError if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


async def relay(listener: socket.socket, ports: RelayedPorts) -> None:
    """Relay until cancelled, and then until clients have what the server said before its end."""
    running: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            with contextlib.suppress(OSError, EOFError):
                await _connect(reader, writer, ports)
        finally:
            running.discard(task)
            writer.close()

    server = await asyncio.start_server(accept, sock=listener, limit=_CHUNK)
    try:
        await server.serve_forever()
    finally:
        server.close()
        if running:
            await asyncio.wait(running, timeout=_LAST_BYTES_S)
        await end_tasks(running)


async def _connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ports: RelayedPorts) -> None:
    async with asyncio.timeout(_FIRST_BYTE_S):
        first = await reader.readexactly(1)
    name = ports.tls if first == _TLS_HANDSHAKE else ports.plain
    back_reader, back_writer = await asyncio.open_unix_connection(sock=await _connected(name), limit=_CHUNK)
    back_writer.write(first)
    copying = [asyncio.create_task(_copy(reader, back_writer)), asyncio.create_task(_copy(back_reader, writer))]
    try:
        await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(copying)
        back_writer.close()


async def _connected(name: str) -> socket.socket:
    """A connection to an abstract socket, for which uvloop's own way to connect has no room."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, f"\0{name}")
    except BaseException:
        connection.close()
        raise
    return connection


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
