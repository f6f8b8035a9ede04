"""A TCP proxy that loses connections: in front of a real gateway it makes networks fail on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Network:
    """Passes bytes on. A connection is lost once the server has sent as many bytes as `cuts` allows it."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._open: set[asyncio.StreamWriter] = set()
        self.cuts: list[int | None] = []  # for the connections to come; None or nothing: never
        self.connections = 0
        self.port = 0

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        cut = self.cuts.pop(0) if self.cuts else None
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, up_writer}
        try:
            up = asyncio.create_task(_pass(reader, up_writer, None))
            down = asyncio.create_task(_pass(up_reader, writer, cut))
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
            down.cancel()
        finally:
            for end in (writer, up_writer):
                self._open.discard(end)
                end.transport.abort()

    def lose_all(self) -> None:
        """Every open connection breaks."""
        for writer in tuple(self._open):
            writer.transport.abort()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None) -> None:
    sent = 0
    with suppress(OSError):
        while limit is None or sent < limit:
            data = await reader.read(65536 if limit is None else limit - sent)
            if not data:
                return
            sent += len(data)
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def network(target_port: int) -> AsyncIterator[Network]:
    """A network in front of a port of this machine."""
    made = Network(target_port)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        made.lose_all()
