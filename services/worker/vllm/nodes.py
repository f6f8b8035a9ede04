"""Several machines compute one worker: a leader, which serves, and followers, whose ranks it commands.

vLLM's ranks meet at the leader's address, but followers do not notice when the leader is lost or starts anew. So each
follower holds a connection to the leader while its ranks run. It ends them with the connection, and the leader takes
the end of a connection for a loss of ranks.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from services.common.lifecycle import StartupError
from services.worker.settings import WorkerSettings

RENDEZVOUS_PORT = 29_500  # the leader's port for followers' connections
MASTER_PORT = 29_501  # the leader's port for the rendezvous of vLLM's ranks
_BEGIN = b"begin\n"
_HELLO_S = 10.0
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}  # a lost machine: 11 s

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Node:
    """One of the machines of a worker."""

    nodes: int
    rank: int  # 0: the leader
    leader: str  # its host

    def arguments(self) -> dict[str, object]:
        """vLLM's engine arguments."""
        return {
            "nnodes": self.nodes,
            "node_rank": self.rank,
            "master_addr": self.leader,
            "master_port": MASTER_PORT,
            "distributed_executor_backend": "mp",
        }


def node_of(settings: WorkerSettings) -> Node | None:
    """This machine's place among those of its worker, None if there is one machine. Raises StartupError.

    The pods NAME-0, NAME-1, ... of a StatefulSet make workers of `nodes` pods each; the first of each is the leader.
    """
    if settings.nodes == 1:
        return None
    if settings.engine != "vllm":
        raise StartupError(f"RYZANSTEIN_NODES {settings.nodes}: only the engine vllm computes on several machines")
    match = re.fullmatch(r"(.+)-(\d+)", settings.worker_id)
    if match is None:
        raise StartupError(f"RYZANSTEIN_WORKER_ID {settings.worker_id}: with RYZANSTEIN_NODES it ends with -0, -1, ...")
    name, ordinal = match[1], int(match[2])
    rank = ordinal % settings.nodes
    leader = f"{name}-{ordinal - rank}"
    return Node(settings.nodes, rank, f"{leader}.{settings.node_service}" if settings.node_service else leader)


class NodeRendezvous:
    """The leader's connections from its followers."""

    def __init__(self, nodes: int, port: int = RENDEZVOUS_PORT) -> None:
        self._nodes, self._port = nodes, port
        self._server: asyncio.Server | None = None
        self._present: dict[int, asyncio.StreamWriter] = {}
        self._changed = asyncio.Event()
        self._begun = False
        self._lost: set[int] = set()  # followers that have left since they began

    async def gather(self, tell: Callable[[str], None]) -> None:
        """Wait until all followers are connected, then let them start their ranks.

        `tell` gets a message with the missing followers, whenever they change.
        """
        if self._server is None:
            self._server = await asyncio.start_server(self._attend, None, self._port)
        while missing := sorted(set(range(1, self._nodes)) - self._present.keys()):
            tell(f"waiting for nodes {', '.join(map(str, missing))}")
            self._changed.clear()
            await self._changed.wait()
        self._begun = True
        for writer in self._present.values():
            writer.write(_BEGIN)

    async def wait_lost(self) -> str:
        """Wait until a follower that has begun is lost."""
        while not self._lost:
            self._changed.clear()
            await self._changed.wait()
        return f"node {min(self._lost)} is lost"

    def dismiss(self) -> None:
        """End the rendezvous: followers end their ranks, and come again to the next one."""
        self._begun = False
        self._lost.clear()
        for writer in self._present.values():
            writer.close()
        self._present.clear()
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _keep_alive(writer)
        try:
            async with asyncio.timeout(_HELLO_S):
                hello = (await reader.readline()).decode(errors="replace").split()
            rank = int(hello[0]) if len(hello) == 1 and hello[0].isdecimal() else 0
            if not 0 < rank < self._nodes:
                log.warning("%s is no follower: %s", writer.get_extra_info("peername"), hello)
                return
            if (before := self._present.get(rank)) is not None:
                self._leave(rank, before)
            self._present[rank] = writer
            self._changed.set()
            try:
                await reader.read()
            finally:
                self._leave(rank, writer)
        except (OSError, TimeoutError) as error:
            log.info("a follower's connection ended: %s", error)
        finally:
            writer.close()

    def _leave(self, rank: int, writer: asyncio.StreamWriter) -> None:
        if self._present.get(rank) is writer:
            del self._present[rank]
            writer.close()
            if self._begun:
                self._lost.add(rank)
            self._changed.set()


async def attend(node: Node, port: int = RENDEZVOUS_PORT) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the leader and wait until it begins. Raises OSError, also if the leader ends the connection."""
    reader, writer = await asyncio.open_connection(node.leader, port)
    try:
        _keep_alive(writer)
        writer.write(f"{node.rank}\n".encode())
        if await reader.readline() != _BEGIN:
            raise ConnectionResetError("the leader ended the connection")
    except BaseException:
        writer.close()
        raise
    return reader, writer


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
